"""AD-PSGD (Lian 2018, arXiv 1710.06952, Algorithm 1): two nodes average at a time, asynchronously.

Node i, with learning rate γ, never waiting for the others:

    x_i ← x_i − γ ∇F(x̂_i; ξ_i)             its learner; x̂_i is x_i as it was when the gradient was begun
    choose j at random among the neighbours
    x_i, x_j ← x_i + α (x_j − x_i), x_j + α (x_i − x_j)          α = ½ in the paper, ``weight`` here

The average is atomic: each of the two takes its exchange lock, and refuses third parties until both sides are
committed. One call carries x_i there and x_j back; both sides compute with the same two vectors, as the wire
rounded them, so that x_i + x_j is kept.

In this order below: when and with whom (`AdpsgdCore`); how far each side moves (`fresh_weight`, an
extension); what is averaged (`ParameterQuantity` or `GradientQuantity`); the exchange (`AdpsgdStrategy`).
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Iterable, Sized
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.strategy import AdpsgdConfig, Content
from p2pdrl.errors import PoisonedVectorError, TensorError, TransportError, WireError
from p2pdrl.group.compatibility import Natural, Short, Summary, Verdict
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.call_timeouts import failed
from p2pdrl.strategies.clipping_radius import ClippingRadius
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.gossip.asynchronous import AsynchronousStrategy, ExchangeTimer
from p2pdrl.strategies.gossip.pair_average import (
    Bounds,
    PairUpdate,
    WireName,
    pair_report,
    pair_step,
    wire_step,
)
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import LearnerHandle, LearnerRequest, RoundReport, StrategyContext
from p2pdrl.strategies.topology import candidates
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import WireDtype, encoded_nbytes
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Answer, Incoming, Refusal, Reply

__all__ = [
    "ROUTE",
    "AdpsgdCore",
    "AdpsgdStrategy",
    "ExchangeHead",
    "Freshness",
    "GradientQuantity",
    "PairQuantity",
    "ParameterQuantity",
    "fresh_weight",
]

ROUTE = "exchange"
REMEMBERED = 1024
"""Exchange ids that are remembered, so that a replay is refused."""


# --- when, with whom, and about what ----------------------------------------------------------------


class AdpsgdCore(ExchangeTimer):
    """Timing (see `ExchangeTimer`), choice of partners, and what the next exchange is about."""

    def __init__(self, config: AdpsgdConfig, me: str, rng: random.Random) -> None:
        super().__init__(config, rng)
        self._options = config
        self._me = me
        self._gradients_in_a_row = 0

    def choose(self, alive: Iterable[str], now_s: float) -> str | None:
        """Return the partner of the exchange that is due among all that are ``alive``."""
        return self.choose_among(candidates(self._options.partners, self._me, alive), now_s)

    def choose_among(self, peers: Iterable[str], now_s: float) -> str | None:
        """Return the partner of the exchange that is due; None for none now: all rest after failures.

        What chooses otherwise overrides this; to leave one out it calls `skipped` and returns None.

        Args:
            peers: ids that the topology allows.
            now_s: monotonic time.
        """
        fit = self.fit(peers, now_s)
        return self._rng.choice(fit) if fit else None

    @property
    def gradients_next(self) -> bool:
        """Whether the next exchange that we begin averages gradients."""
        config = self._options
        return config.exchanges == "gradients" and self._gradients_in_a_row < config.parameters_every

    def exchanged(self, peer: str, *, gradients: bool) -> None:
        """Note what an exchange with ``peer`` averaged, whoever began it; parameters keep us together."""
        del peer
        self._gradients_in_a_row = self._gradients_in_a_row + 1 if gradients else 0


# --- how far each side moves ------------------------------------------------------------------------

LAG_HALVES = 100.0
"""Policy versions of lag that halve the trust."""
LEAST_SHARE = 0.1
"""Neither side gives up more than nine tenths of its own, whatever the other claims."""


class Freshness(NamedTuple):
    """What one side claims.

    Args:
        steps: environment steps since its last exchange.
        policy_version: of its vector.
    """

    steps: int
    policy_version: int


def fresh_weight(weight: float, mine: Freshness, theirs: Freshness) -> float:
    """Return how far our side moves with ``merge_weights = "fresh"``, in [0.2, 1.8] · ``weight``.

    Args:
        weight: half of what both sides' weights add up to, in (0, ½].
    """

    def trust(side: Freshness) -> float:
        return (1.0 + side.steps) / (1.0 + (newest - side.policy_version) / LAG_HALVES)

    newest = max(mine.policy_version, theirs.policy_version)
    my_trust, their_trust = trust(mine), trust(theirs)
    share = their_trust / (my_trust + their_trust)
    return 2.0 * weight * min(max(share, LEAST_SHARE), 1.0 - LEAST_SHARE)


class ExchangeHead(msgspec.Struct, frozen=True):
    """What goes before the vector, in both directions."""

    exchange_id: Short
    wire: WireName
    summary: Summary
    verdict: str = "mix"
    """In an answer: what the responder does (a `Verdict`); a vector follows only for ``mix``."""
    content: Content = "parameters"
    fresh_steps: Natural = 0
    """Environment steps of this side since its last exchange."""

    @property
    def freshness(self) -> Freshness:
        """What this side claims of its experience."""
        return Freshness(self.fresh_steps, self.summary.policy_version)


# --- what is averaged -------------------------------------------------------------------------------


class PairQuantity(ABC):
    """This node's side of an exchange: what goes out, where the peer's goes, and what is then added.

    Attributes:
        content: parameters or gradients.
        step: what our side does, once mixed.
    """

    content: Content
    wire: WireName
    step = PairUpdate(0.0, 0.0, 0.0)

    @property
    @abstractmethod
    def outgoing(self) -> memoryview:
        """What goes to the peer, once loaded."""

    def begin(self) -> bool:
        """Take part with what there is; False when there is nothing."""
        return True

    def end(self, *, done: bool) -> None:
        """The exchange is over; ``done`` when our side was committed."""
        del done

    @abstractmethod
    def load(self) -> None:
        """Write what is ours into ``outgoing``.

        Raises:
            PoisonedVectorError: ours holds NaN, infinity or a huge entry; peers would strike us for it.
        """

    @abstractmethod
    def room(self, nbytes: int) -> memoryview | None:
        """Where the peer's ``nbytes`` go; None when that length can't be right."""

    @abstractmethod
    def mix(self, weight: float, peer: str) -> Float32Array:
        """Return what our side adds, ``weight`` · (theirs − ours); valid until the next `load`.

        Raises:
            PoisonedVectorError: the peer's is unusable.
            WireError: it can't be read.
        """

    @abstractmethod
    def commit(self, policy_version: int) -> bool:
        """Add it; False when what it belongs to is gone."""


class ParameterQuantity(PairQuantity):
    """The vector on the board, and buffers for one exchange at a time.

    Args:
        size: D, float32 parameters.
    """

    content = "parameters"

    def __init__(self, board: DaemonBoard, size: int, wire: WireDtype, bounds: Bounds) -> None:
        self.wire: WireDtype = wire
        self._board = board
        self._bounds = bounds
        self._mine_D = np.zeros(size, np.float32)
        self._theirs_D = np.zeros(size, np.float32)
        if wire == "float32":  # as they lie in memory, so nothing is copied
            self._outgoing = self._mine_D.data.cast("B")
            self._incoming = self._theirs_D.data.cast("B")
        else:
            self._outgoing = memoryview(bytearray(encoded_nbytes(size, wire)))
            self._incoming = memoryview(bytearray(encoded_nbytes(size, wire)))
        self._sets = 0

    @property
    def outgoing(self) -> memoryview:
        """Our vector, as the wire rounds it."""
        return self._outgoing

    def load(self) -> None:
        """Read our vector off the board."""
        message = None if self.wire == "float32" else self._outgoing
        self._sets = read_now(self._board, self._mine_D, self._bounds.max_abs, self.wire, message).sets
        if self._bounds.radius is not None:
            self._bounds.radius.read(self._mine_D, self._sets)

    def room(self, nbytes: int) -> memoryview | None:
        """The peer's vector is as long as ours."""
        return self._incoming if nbytes == len(self._incoming) else None

    def mix(self, weight: float, peer: str) -> Float32Array:
        """Return what the learner's vector is to move by."""
        self.step = wire_step(
            self._mine_D, self._incoming, self.wire, weight, self._bounds, peer=peer, out_D=self._theirs_D
        )
        return self._theirs_D

    def commit(self, policy_version: int) -> bool:
        """Post it to the learner; False when the learner's vector was replaced since `load`."""
        posted = self._board.post_delta(self._theirs_D, policy_version, sets=self._sets)
        if posted and self._bounds.radius is not None:
            self._bounds.radius.added(self._theirs_D)
        return posted


class GradientQuantity(PairQuantity):
    """The learner's newest gradient; both sides answer ``add`` with ``weight · (theirs − mine)``.

    Compressed gradients are subtracted as the other side decoded them, so what one side's step gains the
    other's loses; what the compression left out is kept for our next exchange (`feedback`).

    Args:
        size: D, float32 parameters.
    """

    content = "gradients"

    def __init__(self, config: AdpsgdConfig, learner: LearnerHandle, size: int, bounds: Bounds) -> None:
        self.wire = "float32" if config.compression == "none" else config.compression
        self._bounds = bounds
        self._learner = learner
        self._encoder = FeedbackEncoder(
            config.compression, size, keep=config.keep, threshold=config.threshold, max_abs=bounds.max_abs
        )
        self._theirs_D = np.zeros(size, np.float32)
        self._incoming = memoryview(bytearray(self._encoder.max_nbytes))
        self._in = 0
        self._waiting: LearnerRequest | None = None
        """Waits for an exchange."""
        self._request: LearnerRequest | None = None
        """Is in one."""

    @property
    def waiting(self) -> bool:
        """Whether there is a gradient to exchange."""
        return self._waiting is not None

    async def follow(self, alive: Callable[[], Sized], on_post: Callable[[], None]) -> None:
        """Take each gradient as it comes, for ever; while nobody is alive its answer comes at once.

        Args:
            alive: the peers that there are.
            on_post: called after each.
        """
        while True:
            self.put(await self._learner.next_request())
            if not alive():
                self._skip()
            on_post()

    def put(self, request: LearnerRequest) -> None:
        """Have a newer gradient wait for an exchange."""
        self._skip()
        if request.vector is None:
            self._learner.answer(request, "none")
        else:
            self._waiting = request

    def _skip(self) -> None:
        """Let the learner go on with the gradient that waits."""
        request, self._waiting = self._waiting, None
        if request is not None:
            self._learner.answer(request, "none")

    @property
    def outgoing(self) -> memoryview:
        """Our compressed gradient."""
        return self._encoder.message

    def begin(self) -> bool:
        """Take the gradient that waits."""
        self._request, self._waiting = self._waiting, None
        return self._request is not None

    def load(self) -> None:
        """Compress the gradient, and read it as the peer will."""
        request = self._request
        if request is None or request.vector is None:
            raise PoisonedVectorError("there is no gradient to send")
        self._encoder.encode(request.vector)

    def room(self, nbytes: int) -> memoryview | None:
        """The peer's may be shorter or longer than ours, but not than the codec's longest."""
        if not 0 < nbytes <= len(self._incoming):
            return None
        self._in = nbytes
        return self._incoming[:nbytes]

    def mix(self, weight: float, peer: str) -> Float32Array:
        """Return what the learner's next step is to be corrected by."""
        self._encoder.decode(self._incoming[: self._in], self._theirs_D)
        self.step = pair_step(self._encoder.sent_D, self._theirs_D, weight, self._bounds, peer)
        return self._theirs_D

    def commit(self, policy_version: int) -> bool:
        """Put it into the slot of the learner's gradient."""
        del policy_version
        if self._request is None or self._request.vector is None:
            return False
        np.copyto(self._request.vector, self._theirs_D)
        return True

    def end(self, *, done: bool) -> None:
        """Let the learner have it; else its gradient waits again, unless there is a newer one."""
        request, self._request = self._request, None
        if request is None:
            return
        if done:
            self._encoder.delivered()
            self._learner.answer(request, "add")
        elif self._waiting is None:
            self._waiting = request
        else:
            self._learner.answer(request, "none")


# --- the exchange -----------------------------------------------------------------------------------


class _PeersExchange(NamedTuple):
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

    Args:
        config: the strategy's options.
        context: what the node gives.
        core: when to exchange and with whom, for strategies that average pairwise in another order.
    """

    DONE = "ok"

    def __init__(
        self, config: AdpsgdConfig, context: StrategyContext, core: AdpsgdCore | None = None
    ) -> None:
        wire: WireDtype = "float32" if config.compression == "none" else "bf16"
        if core is None:
            core = AdpsgdCore(config, context.swarm.node_id, context.rng)
        super().__init__(config, context, core, encoded_nbytes(context.size, wire))
        clipped = config.rule(bounded=context.bounded) == "clipped"
        radius = ClippingRadius(config.clip_distance, context.clock) if clipped else None
        bounds = Bounds(context.max_abs, config.max_distance, radius)
        self._config = config
        self._parameters = ParameterQuantity(self._board, context.size, wire, bounds)
        self._gradients: GradientQuantity | None = None
        if config.exchanges == "gradients":
            radius = ClippingRadius(config.clip_distance, context.clock, gradients=True) if clipped else None
            bounds = bounds._replace(radius=radius)
            self._gradients = GradientQuantity(config, context.learner, context.size, bounds)
        self._fresh_steps = 0
        self._lock = asyncio.Lock()
        """Held while an exchange has the buffers; whoever finds it held doesn't wait, but refuses."""
        self._seen: OrderedDict[str, None] = OrderedDict()

    async def stop(self, timeout_s: float) -> None:
        """Finish the exchange in flight, in either role, waiting at most ``timeout_s``."""
        until_s = self._clock.monotonic() + timeout_s
        await self._runner.stop(timeout_s)
        left_s = until_s - self._clock.monotonic()
        if self._lock.locked() and left_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s), self._lock:
                    pass
        await self._arithmetic.close()

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        if self._gradients is None:
            return []
        return [self._gradients.follow(self._swarm.alive, self._runner.news.set)]

    async def _turn(self) -> bool:
        now_s, alive = self._clock.monotonic(), self._swarm.alive()
        if self._lock.locked() or not self._may_begin(now_s, len(alive) + 1):
            return False
        gradients = self._gradients if self._core.gradients_next else None
        if gradients is not None and not gradients.waiting:
            return False
        peer = self._core.choose(alive, now_s)
        if peer is None:
            return False
        self._core.began(now_s)
        side: PairQuantity = self._parameters if gradients is None else gradients
        report = RoundReport("failed", missing=(peer,), error="given up")
        async with self._lock:
            try:
                report = await self._exchange(side, peer, alive[peer])
            finally:
                side.end(done=report.outcome in ("ok", "unchanged"))
        self._ended(peer, report, now_s)
        return True

    # --- as the one that calls ------------------------------------------------------------------

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
            answer = await self._call(
                address, peer, ROUTE, head, vector=side.outgoing, into=lambda _, nbytes: side.room(nbytes)
            )
            report = replace(report, bytes_in=answer.vector_nbytes)
            theirs = _answered_head(answer)
            if theirs is None or theirs.exchange_id != head.exchange_id:
                return replace(report, error="the answer's head can't be read")
            heard = self._admission.heard(peer, mine, theirs.summary, theirs.verdict)
            if heard != "ok" or theirs.content != side.content or not answer.vector_nbytes:
                outcome = "failed" if heard == "ok" else heard
                return replace(report, outcome=outcome, error=f"it answered {theirs.verdict} without numbers")
            await self._mix(side, peer, head, theirs)
            version = max(mine.policy_version, theirs.summary.policy_version)
            if not await self._arithmetic.run(lambda: side.commit(version)):
                return replace(report, outcome="unsure", error="our vector was replaced meanwhile")
        except (TransportError, TensorError) as error:
            if isinstance(error, PoisonedVectorError):
                self._swarm.strike(peer, str(error))
            return failed(report, error)
        return self._exchanged(side, peer, head, theirs.summary, report)

    # --- as the one that is called ---------------------------------------------------------------

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's exchange.

        Raises:
            Refusal: locked (423), no state yet (503), another task or mode (409), a replay (409),
                poisoned (422), quarantined (403).
            WireError: the head is malformed.
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node averages pairwise, which has no {incoming.route}")
        head: ExchangeHead = codec.decode(incoming.meta, ExchangeHead, "exchange's head")
        mine = self._admission.admit(incoming.sender, stopping=self._runner.stopping)
        if self._lock.locked():
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
        exchange = _PeersExchange(incoming, side, head, reply, self._clock.monotonic())
        return await self._mix_with_caller(exchange, room)

    async def _mix_with_caller(self, exchange: _PeersExchange, room: memoryview) -> Reply:
        """Read the caller's vector and answer with ours; the lock is held until our side is committed."""
        incoming, side = exchange.incoming, exchange.side
        await self._lock.acquire()  # at once, for it is free
        handed_over = False
        try:
            async with asyncio.timeout(self._config.deadline_s):
                await incoming.read_vector_into(room)
                if not await self._load(side):
                    raise Refusal(503, "our own numbers are unusable")
                await self._mix(side, incoming.sender, exchange.ours, exchange.theirs)

            def ended(sent: bool) -> None:
                self._runner.briefly(self._commit(exchange, sent=sent and not self._arithmetic.closed))

            handed_over = True
            return Reply(msgspec.msgpack.encode(exchange.ours), vector=side.outgoing, on_end=ended)
        except PoisonedVectorError as error:
            self._swarm.strike(incoming.sender, str(error))
            raise Refusal(422, f"poisoned vector: {error}") from error
        except TimeoutError as error:
            raise Refusal(408, "the vector didn't arrive in time") from error
        finally:
            if not handed_over:
                side.end(done=False)
                self._lock.release()

    async def _commit(self, exchange: _PeersExchange, *, sent: bool) -> None:
        """End an exchange that a peer began: our side counts once the answer is written."""
        side, nbytes = exchange.side, exchange.incoming.vector_nbytes
        ours, theirs, peer = exchange.ours, exchange.theirs.summary, exchange.incoming.sender
        version = max(ours.summary.policy_version, theirs.policy_version)
        report = RoundReport("unsure", missing=(peer,), bytes_in=nbytes, error="cut off")
        try:
            if sent and await self._arithmetic.run(lambda: side.commit(version)):
                report = RoundReport("answered", bytes_in=nbytes, bytes_out=len(side.outgoing))
                report = self._exchanged(side, peer, ours, theirs, report)
        finally:
            side.end(done=report.outcome == "answered")
            self._lock.release()
        took_s = self._clock.monotonic() - exchange.began_s
        self._outcomes.ended(replace(report, seconds=took_s), ours=False)

    # --- in both roles ----------------------------------------------------------------------------

    def _head(
        self, exchange_id: str, side: PairQuantity, mine: Summary, verdict: Verdict = Verdict.MIX
    ) -> ExchangeHead:
        if self._config.merge_weights == "fresh":
            self._fresh_steps += self._swarm.steps_since()
        return ExchangeHead(exchange_id, side.wire, mine, verdict.value, side.content, self._fresh_steps)

    async def _mix(self, side: PairQuantity, peer: str, mine: ExchangeHead, theirs: ExchangeHead) -> None:
        """Compute how far our side moves; the other computes its own from the same two heads."""
        weight = self._config.weight
        if self._config.merge_weights == "fresh":
            weight = fresh_weight(weight, mine.freshness, theirs.freshness)
        weight *= self._swarm.trust(peer)
        await self._arithmetic.run(lambda: side.mix(weight, peer))
        if side.step.strike:
            self._swarm.strike(peer, side.step.strike)

    async def _load(self, side: PairQuantity) -> bool:
        """Take what is ours; False when it can't be given to anybody. Parameters that can't are healed."""
        try:
            await self._arithmetic.run(side.load)
            return True
        except PoisonedVectorError as error:
            why = str(error)
        if side is not self._parameters:
            # One bad gradient is its learner's business, unless the parameters are bad as well.
            try:
                await self._arithmetic.run(self._parameters.load)
                return False
            except PoisonedVectorError as error:
                why = str(error)
        self._swarm.heal(f"our own parameters are unusable: {why}")
        return False

    def _exchanged(
        self, side: PairQuantity, peer: str, mine: ExchangeHead, theirs: Summary, report: RoundReport
    ) -> RoundReport:
        """Note an exchange that is done; complete its report, whose outcome says in which role."""
        gradients = side.content == "gradients"
        self._core.exchanged(peer, gradients=gradients)
        self._fresh_steps = max(self._fresh_steps - mine.fresh_steps, 0)
        if not gradients:
            self._outcomes.met(side.step.distance)
        staleness = mine.summary.policy_version - theirs.policy_version
        return pair_report(report, self._swarm.node_id, peer, side.step, staleness)

    def _remember(self, exchange_id: str) -> None:
        self._seen[exchange_id] = None
        while len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)


def _answered_head(answer: Answer) -> ExchangeHead | None:
    try:
        head: ExchangeHead = codec.decode(answer.meta, ExchangeHead)
    except WireError:
        return None
    return head
