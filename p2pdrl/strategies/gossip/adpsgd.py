"""AD-PSGD (Lian 2018, arXiv 1710.06952): two nodes average at a time, asynchronously."""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sized
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from p2pdrl.config.strategy import AdpsgdConfig, Content
from p2pdrl.errors import P2PDRLError, PoisonedVectorError, TensorError, TransportError
from p2pdrl.group.compatibility import Summary, Verdict
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.call_timeouts import outcome_of, unready
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.gossip.asynchronous import AsynchronousStrategy
from p2pdrl.strategies.gossip.exchange_timer import COOL_MAX_S, ExchangeTimer
from p2pdrl.strategies.gossip.pair_average import (
    Bounds,
    ExchangeHead,
    PairScratch,
    PairUpdate,
    WireName,
    decode_head,
    fresh_weight,
    pair_report,
    pair_step,
)
from p2pdrl.strategies.protocol import LearnerHandle, LearnerRequest, RoundReport, StrategyContext
from p2pdrl.strategies.topology import candidates
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.wire import WireDtype
from p2pdrl.transport.protocol import Address, Answer, Incoming, Refusal, Reply

__all__ = [
    "COOL_MAX_S",
    "ROUTE",
    "AdpsgdCore",
    "AdpsgdStrategy",
    "ExchangeLock",
    "GradientOffers",
    "GradientQuantity",
    "PairQuantity",
    "ParameterQuantity",
]


class AdpsgdCore(ExchangeTimer):
    """Timing (see `ExchangeTimer`), choice of partners, and what the next exchange is about.

    Args:
        config: the strategy's options.
        me: own node id.
        rng: source of the random choices.
    """

    def __init__(self, config: AdpsgdConfig, me: str, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._config = config
        self._me = me
        self._gradients_in_a_row = 0

    def choose(self, alive: Iterable[str], now_s: float) -> str | None:
        """Return the partner of the next exchange, or None while nobody is fit.

        Members that lately failed to answer are passed over for a while.
        """
        return self.choose_among(candidates(self._config.partners, self._me, alive), now_s)

    def choose_among(self, peers: Iterable[str], now_s: float) -> str | None:
        """The same for peers that are candidates already."""
        fit = self.fit(peers, now_s)
        return self._rng.choice(fit) if fit else None

    @property
    def gradients_next(self) -> bool:
        """Whether the next exchange that we begin averages gradients."""
        config = self._config
        return config.exchanges == "gradients" and self._gradients_in_a_row < config.parameters_every

    def exchanged(self, *, gradients: bool) -> None:
        """Note what an exchange averaged, whoever began it: parameters keep replicas together."""
        self._gradients_in_a_row = self._gradients_in_a_row + 1 if gradients else 0


class ExchangeLock:
    """True while an exchange has the node's buffers."""

    def __init__(self) -> None:
        self._free = asyncio.Event()
        self._free.set()

    def __bool__(self) -> bool:
        return not self._free.is_set()

    def begin(self) -> None:
        """An exchange takes the buffers; only when it is false."""
        self._free.clear()

    def end(self) -> None:
        """The exchange gives them back."""
        self._free.set()

    async def until_free(self, timeout_s: float) -> None:
        """Wait for the end of the exchange, at most so long."""
        if self and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._free.wait()
            except TimeoutError:
                return


class GradientOffers:
    """What of the learner's posts can be exchanged.

    Args:
        learner: who posts.
    """

    def __init__(self, learner: LearnerHandle) -> None:
        self._learner = learner
        self._post: LearnerRequest | None = None

    @property
    def open(self) -> bool:
        """Whether there is a gradient to exchange."""
        return self._post is not None

    async def follow(self, alive: Callable[[], Sized], told: Callable[[], None]) -> None:
        """Offer each gradient as it comes, for ever; while nobody is alive its answer comes at once.

        Args:
            alive: the peers that there are.
            told: called after each.
        """
        while True:
            self.put(await self._learner.next_post())
            if not alive():
                self.withdraw()
            told()

    def put(self, post: LearnerRequest) -> None:
        """Offer a newer gradient."""
        self.withdraw()
        if post.vector is None:
            self._learner.answer(post, "none")
        else:
            self._post = post

    def withdraw(self) -> None:
        """Let the learner go on with its own."""
        post, self._post = self._post, None
        if post is not None:
            self._learner.answer(post, "none")

    def take(self) -> LearnerRequest | None:
        """Take the gradient for an exchange; the taker answers it, or puts it `back`."""
        post, self._post = self._post, None
        return post

    def back(self, post: LearnerRequest) -> None:
        """Offer again what an exchange couldn't use; when there is a newer one, answer it ``none``."""
        if self._post is None:
            self._post = post
        else:
            self._learner.answer(post, "none")


class PairQuantity(Protocol):
    """One side of an exchange."""

    content: Content
    wire: WireName

    @property
    def outgoing(self) -> memoryview:
        """What goes to the peer, once loaded."""
        ...

    @property
    def step(self) -> PairUpdate:
        """What our side does, once mixed."""
        ...

    def begin(self) -> bool:
        """Take part with what there is; False when there is nothing."""
        ...

    def load(self) -> None:
        """Write what is ours into ``outgoing``.

        Raises:
            PoisonedVectorError: ours is unusable.
        """
        ...

    def room(self, nbytes: int) -> memoryview | None:
        """Where the peer's ``nbytes`` go; None when they can't be right."""
        ...

    def mix(self, weight: float) -> None:
        """Compute what we add.

        Raises:
            PoisonedVectorError: the peer's is unusable.
            WireError: it can't be read.
        """
        ...

    def commit(self, policy_version: int) -> bool:
        """Add it; False when what it belongs to is gone."""
        ...

    def end(self, *, done: bool) -> None:
        """The exchange is over; ``done`` when our side was committed."""
        ...


class ParameterQuantity:
    """The vector on the board.

    Args:
        scratch: buffers and arithmetic.
        board: where the learner's vector is.
        wire: number format.
    """

    content: Content = "parameters"

    def __init__(self, scratch: PairScratch, board: DaemonBoard, wire: WireName) -> None:
        self._scratch = scratch
        self._board = board
        self.wire = wire

    @property
    def outgoing(self) -> memoryview:
        """What goes to the peer."""
        return self._scratch.outgoing

    @property
    def step(self) -> PairUpdate:
        """What our side does."""
        return self._scratch.step

    def begin(self) -> bool:
        """There always is a vector."""
        return True

    def load(self) -> None:
        """Read the board."""
        self._scratch.load(self._board)

    def room(self, nbytes: int) -> memoryview | None:
        """The peer's vector is as long as ours."""
        return self._scratch.incoming if nbytes == self._scratch.nbytes else None

    def mix(self, weight: float) -> None:
        """Compute our delta."""
        self._delta_D = self._scratch.mix(weight)

    def commit(self, policy_version: int) -> bool:
        """Post it."""
        return self._scratch.commit(self._board, self._delta_D, policy_version)

    def end(self, *, done: bool) -> None:
        """Nothing is held."""


class GradientQuantity:
    """The gradient that the learner offers; both sides answer ``add`` with ``weight · (theirs − mine)``.

    Compressed gradients are subtracted as the other side decoded them, so what one side's step gains the
    other's loses; what the compression left out is kept for our next exchange (`feedback`).

    Args:
        config: the strategy's options.
        learner: whose gradients.
        size: D, float32 parameters.
        max_abs: largest entry accepted.
    """

    content: Content = "gradients"

    def __init__(self, config: AdpsgdConfig, learner: LearnerHandle, size: int, max_abs: float) -> None:
        self.offers = GradientOffers(learner)
        self.wire: WireName = "float32" if config.compression == "none" else config.compression
        clip = config.clip_distance if config.mixing == "clipped" else None
        self._bounds = Bounds(max_abs, config.max_distance, clip)
        self._learner = learner
        self._encoder = FeedbackEncoder(
            config.compression, size, keep=config.keep, threshold=config.threshold, max_abs=max_abs
        )
        self._theirs_D = np.zeros(size, np.float32)
        self._incoming = memoryview(bytearray(self._encoder.max_nbytes))
        self._in = 0
        self._post: LearnerRequest | None = None
        self.step = PairUpdate(0.0, 0.0, 0.0)

    @property
    def outgoing(self) -> memoryview:
        """What goes to the peer."""
        return self._encoder.message

    def begin(self) -> bool:
        """Take the gradient on offer."""
        self._post = self.offers.take()
        return self._post is not None

    def load(self) -> None:
        """Compress the gradient, and read it as the peer will.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """
        post = self._post
        if post is None or post.vector is None:
            raise PoisonedVectorError("there is no gradient to send")
        self._encoder.encode(post.vector)

    def room(self, nbytes: int) -> memoryview | None:
        """The peer's may be shorter or longer than ours, but not than the codec's longest."""
        if not 0 < nbytes <= len(self._incoming):
            return None
        self._in = nbytes
        return self._incoming[:nbytes]

    def mix(self, weight: float) -> None:
        """Compute what is to be added to our next gradient."""
        self._encoder.decode(self._incoming[: self._in], self._theirs_D)
        self.step = pair_step(self._encoder.sent_D, self._theirs_D, weight, self._bounds)

    def commit(self, policy_version: int) -> bool:
        """Put it into the learner's slot."""
        del policy_version
        if self._post is None or self._post.vector is None:
            return False
        np.copyto(self._post.vector, self._theirs_D)
        return True

    def end(self, *, done: bool) -> None:
        """Let the learner have it, or offer its gradient again."""
        post, self._post = self._post, None
        if post is None:
            return
        if done:
            self._encoder.delivered()
            self._learner.answer(post, "add")
        else:
            self.offers.back(post)


ROUTE = "exchange"
REMEMBERED = 1024


class _Visit(NamedTuple):
    """An exchange that a peer began."""

    incoming: Incoming
    side: PairQuantity
    theirs: ExchangeHead
    ours: ExchangeHead
    began_s: float


class AdpsgdStrategy(AsynchronousStrategy[AdpsgdCore]):
    """AD-PSGD over the transport; see `Strategy`.

    Outcomes of exchanges that we began: ``ok busy timeout refused failed poisoned unchanged``, ``behind`` (we
    adopted instead) and ``ahead`` (the peer did); begun by peers: ``answered``. ``unsure``: one side may have
    moved alone; a ``timeout`` may hide another such case.
    """

    DONE = "ok"

    def __init__(self, config: AdpsgdConfig, context: StrategyContext) -> None:
        wire: WireDtype = "float32" if config.compression == "none" else "bf16"
        self._scratch = PairScratch(
            context.size,
            wire,
            config.weight,
            context.max_abs,
            config.max_distance,
            config.clip_distance if config.mixing == "clipped" else None,
        )
        core = AdpsgdCore(config, context.swarm.node_id, context.rng)
        super().__init__(config, context, core, self._scratch.nbytes)
        self._config = config
        self._parameters = ParameterQuantity(self._scratch, self._board, wire)
        self._gradients: GradientQuantity | None = None
        if config.exchanges == "gradients":
            self._gradients = GradientQuantity(config, context.learner, context.size, context.max_abs)
        self._fresh_steps = 0
        self._locked = ExchangeLock()
        self._seen: OrderedDict[str, None] = OrderedDict()

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, in either role, waiting at most ``timeout_s``."""
        until_s = self._clock.monotonic() + timeout_s
        await self._runner.stop(timeout_s)
        await self._locked.until_free(until_s - self._clock.monotonic())
        await self._heavy.close()

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        if self._gradients is None:
            return []
        return [self._gradients.offers.follow(self._swarm.alive, self._runner.news.set)]

    async def _turn(self) -> bool:
        partner = self._next_partner()
        if partner is None:
            return False
        await self._meet(*partner)
        return True

    def _next_partner(self) -> tuple[str, Address] | None:
        now_s, alive = self._clock.monotonic(), self._swarm.alive()
        if self._locked or not self._may_begin(now_s, len(alive) + 1):
            return None
        if self._gradients is not None and self._core.gradients_next and not self._gradients.offers.open:
            return None
        peer = self._core.choose(alive, now_s)
        return None if peer is None else (peer, alive[peer])

    # --- as the one that calls ------------------------------------------------------------------

    async def _meet(self, peer: str, address: Address) -> None:
        began_s = self._clock.monotonic()
        self._core.began(began_s)
        gradients = self._gradients if self._core.gradients_next else None
        side: PairQuantity = self._parameters if gradients is None else gradients
        self._locked.begin()
        report = RoundReport("failed", missing=(peer,), error="given up")
        try:
            report = await self._exchange(side, peer, address)
        finally:
            side.end(done=report.outcome in ("ok", "unchanged"))
            self._locked.end()
        self._ended(peer, report, began_s)

    async def _exchange(self, side: PairQuantity, peer: str, address: Address) -> RoundReport:
        """Begin an exchange and finish it; a peer's failure is a report."""
        report = RoundReport("failed", missing=(peer,))
        mine = self._swarm.summary()
        if mine is None or not side.begin():
            return replace(report, error="there is nothing to exchange")
        try:
            if not await self._load(side):
                return replace(report, error="our own numbers are unusable")
            report = replace(report, bytes_out=len(side.outgoing), round_trips=1)
            head = self._head(new_exchange_id(), side, mine)
            answer = await self._call(side, head, peer, address)
            report = replace(report, bytes_in=answer.vector_nbytes)
            theirs = decode_head(answer.meta)
            if theirs is None or theirs.exchange_id != head.exchange_id:
                return replace(report, error="the answer's head can't be read")
            heard = self._admission.heard(peer, mine, theirs.summary, theirs.verdict)
            if heard != "ok" or theirs.content != side.content or not answer.vector_nbytes:
                outcome = "failed" if heard == "ok" else heard
                return replace(report, outcome=outcome, error=f"it answered {theirs.verdict} without numbers")
            await self._mix(side, head, theirs)
            version = max(mine.policy_version, theirs.summary.policy_version)
            if not await self._heavy.run(lambda: side.commit(version)):
                return replace(report, outcome="unsure", error="our vector was replaced meanwhile")
        except (TransportError, TensorError) as error:
            return self._failed(peer, report, error)
        return self._met(side, peer, head, theirs.summary, report)

    async def _call(self, side: PairQuantity, head: ExchangeHead, peer: str, address: Address) -> Answer:
        return await self._transport.call(
            address,
            peer,
            ROUTE,
            msgspec.msgpack.encode(head),
            vector=side.outgoing,
            into=lambda _, nbytes: side.room(nbytes),
            deadline_s=self._deadline.seconds,
            lane="bulk",
        )

    def _failed(self, peer: str, report: RoundReport, error: P2PDRLError) -> RoundReport:
        outcome = outcome_of(error)
        if outcome == "poisoned":
            self._swarm.strike(peer, str(error))
        return replace(report, outcome=outcome, error=str(error), unready=unready(error))

    # --- as the one that is called ---------------------------------------------------------------

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's exchange.

        Raises:
            Refusal: locked (423), no state yet (503), another task or mode (409), a replay (409),
                poisoned (422), quarantined (403), malformed (400).
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is adpsgd, which has no {incoming.route}")
        head = decode_head(incoming.meta)
        if head is None:
            raise Refusal(400, "the exchange's head can't be read")
        mine = self._admission.admit(incoming.sender, stopping=self._runner.stopping)
        if self._locked:
            raise Refusal(BUSY, "in another exchange")
        verdict = self._admission.judge(incoming.sender, mine, head.summary)
        side: PairQuantity | None = self._parameters if head.content == "parameters" else self._gradients
        if side is None:
            raise Refusal(409, f"this node exchanges parameters, not {head.content}")
        reply = self._head(head.exchange_id, side, mine, verdict)
        if verdict is not Verdict.MIX:
            return Reply(msgspec.msgpack.encode(reply))
        room = side.room(incoming.vector_nbytes)
        if head.wire != side.wire or room is None:
            raise Refusal(422, "the vector has another format or length than ours")
        if head.exchange_id in self._seen:
            raise Refusal(409, "this exchange was here before")
        if not side.begin():
            raise Refusal(BUSY, "no gradient at hand")
        self._remember(head.exchange_id)
        return await self._engage(_Visit(incoming, side, head, reply, self._clock.monotonic()), room)

    async def _engage(self, visit: _Visit, room: memoryview) -> Reply:
        incoming, side = visit.incoming, visit.side
        self._locked.begin()
        handed_over = False
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await incoming.read_vector_into(room)
                if not await self._load(side):
                    raise Refusal(503, "our own numbers are unusable")
                await self._mix(side, visit.ours, visit.theirs)

            def ended(sent: bool) -> None:
                self._runner.briefly(self._commit(visit, sent=sent and not self._heavy.closed))

            handed_over = True
            return Reply(msgspec.msgpack.encode(visit.ours), vector=side.outgoing, on_end=ended)
        except PoisonedVectorError as error:
            self._swarm.strike(incoming.sender, str(error))
            raise Refusal(422, f"poisoned vector: {error}") from error
        except TimeoutError as error:
            raise Refusal(408, "the vector didn't arrive in time") from error
        finally:
            if not handed_over:
                side.end(done=False)
                self._locked.end()

    async def _commit(self, visit: _Visit, *, sent: bool) -> None:
        """End an exchange that a peer began: our side counts once the answer is written."""
        peer, side, nbytes = visit.incoming.sender, visit.side, visit.incoming.vector_nbytes
        version = max(visit.ours.summary.policy_version, visit.theirs.summary.policy_version)
        report = RoundReport("unsure", missing=(peer,), bytes_in=nbytes, error="cut off")
        try:
            if sent and await self._heavy.run(lambda: side.commit(version)):
                report = RoundReport("answered", bytes_in=nbytes, bytes_out=len(side.outgoing))
                report = self._met(side, peer, visit.ours, visit.theirs.summary, report)
        finally:
            side.end(done=report.outcome == "answered")
            self._locked.end()
        took_s = self._clock.monotonic() - visit.began_s
        self._outcomes.ended(replace(report, seconds=took_s), ours=False)

    # --- in both roles ----------------------------------------------------------------------------

    def _head(
        self, exchange_id: str, side: PairQuantity, mine: Summary, verdict: Verdict = Verdict.MIX
    ) -> ExchangeHead:
        if self._config.merge_weights == "fresh":
            self._fresh_steps += self._swarm.steps_since()
        return ExchangeHead(exchange_id, side.wire, mine, verdict.value, side.content, self._fresh_steps)

    async def _mix(self, side: PairQuantity, mine: ExchangeHead, theirs: ExchangeHead) -> None:
        """Compute how far our side moves; the other computes its own from the same two heads."""
        weight = self._config.weight
        if self._config.merge_weights == "fresh":
            weight = fresh_weight(weight, mine.freshness, theirs.freshness)
        await self._heavy.run(lambda: side.mix(weight))

    async def _load(self, side: PairQuantity) -> bool:
        """Take what is ours; False when it can't be given to anybody. Parameters that can't are healed."""
        try:
            await self._heavy.run(side.load)
            return True
        except PoisonedVectorError as error:
            why = str(error)
        if side is not self._parameters:
            # One bad gradient is its learner's business, unless the parameters are bad as well.
            try:
                await self._heavy.run(self._parameters.load)
                return False
            except PoisonedVectorError as error:
                why = str(error)
        self._swarm.heal(f"our own parameters are unusable: {why}")
        return False

    def _met(
        self, side: PairQuantity, peer: str, mine: ExchangeHead, theirs: Summary, report: RoundReport
    ) -> RoundReport:
        """Note an exchange that is done; complete its report, whose outcome says in which role."""
        gradients = side.content == "gradients"
        self._core.exchanged(gradients=gradients)
        self._fresh_steps = max(self._fresh_steps - mine.fresh_steps, 0)
        if not gradients:
            self._outcomes.met(side.step.distance)
        staleness = mine.summary.policy_version - theirs.policy_version
        return pair_report(report, self._swarm.node_id, peer, side.step, staleness)

    def _remember(self, exchange_id: str) -> None:
        self._seen[exchange_id] = None
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
