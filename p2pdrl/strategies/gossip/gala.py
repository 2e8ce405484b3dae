"""Gossiping actor-learners (GALA; Assran 2019, arXiv 1906.04585): pushes that nobody waits for."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from p2pdrl.config.strategy import Content, GalaConfig
from p2pdrl.errors import PoisonedVectorError, TensorError, TransportError, WireError
from p2pdrl.group.compatibility import Verdict
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.call_timeouts import outcome_of, unready
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.gossip.asynchronous import AsynchronousStrategy
from p2pdrl.strategies.gossip.pair_average import WireName
from p2pdrl.strategies.gossip.push import (
    Arrivals,
    BufferPool,
    PushAnswer,
    PushCore,
    PushHead,
    decode_push_answer,
    decode_push_head,
)
from p2pdrl.strategies.own_vector import OwnVector
from p2pdrl.strategies.protocol import Merged, RoundReport, StrategyContext
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["MOST", "ROUTE", "GalaInbox", "GalaQuantity", "GalaStrategy", "Letter", "RelayedPushes"]

HUNGRY = 8
"""So many pushes of ours, and nothing that came and was good: we ask."""
LENT = 16
"""So many of our pushes also go to a node that asked; and again so many when it says so in an answer."""
MOST_LENT = 4
"""So many nodes that asked are pushed to at once; more are told no."""


class RelayedPushes:
    """What one node asks for and gives.

    Args:
        me: own node id.
    """

    def __init__(self, me: str) -> None:
        self._me = me
        self._pushes = 0
        self._fed: dict[str, int] = {}
        """How many pushes we had made when a push of each peer came."""
        self._fed_last = 0
        self._asked, self._asked_last = 0, 0
        self._lent: dict[str, int] = {}

    def pushed(self) -> None:
        """We push once more."""
        self._pushes += 1
        self._lent = {peer: left - 1 for peer, left in self._lent.items() if left > 1}
        self._fed = {peer: at for peer, at in self._fed.items() if at + LENT > self._pushes}

    # As the one who takes

    def came(self, peer: str) -> None:
        """A push of ``peer`` came, and was good."""
        self._fed[peer] = self._fed_last = self._pushes
        self._asked = 0

    def only(self, peer: str) -> bool:
        """Whether nobody but ``peer`` gave us anything of late."""
        return not self._fed.keys() - {peer}

    def whom_to_ask(self, alive: Iterable[str]) -> str | None:
        """Whom to ask now for pushes, each time somebody further down the ring of ids; None for nobody."""
        ring = sorted({*alive, self._me})
        if len(ring) < 2 or self._pushes < max(self._fed_last, self._asked_last) + HUNGRY:
            return None
        step = 1 + self._asked % (len(ring) - 1)
        self._asked, self._asked_last = self._asked + 1, self._pushes
        return ring[ring.index(self._me) - step]

    # As the one who gives

    def lend(self, peer: str) -> bool:
        """``peer`` asks for our pushes; whether it gets them."""
        if peer not in self._lent and len(self._lent) >= MOST_LENT:
            return False
        self._lent[peer] = LENT
        return True

    def renew(self, peer: str) -> None:
        """``peer`` gets nothing from anybody else: if it asked, it goes on getting our pushes."""
        if peer in self._lent:
            self._lent[peer] = LENT

    @property
    def lent(self) -> set[str]:
        """Who gets our pushes because it asked."""
        return set(self._lent)


MOST = 16
"""In-peers whose vectors are kept at once; each costs D float32."""


@dataclass(slots=True)
class Letter:
    """An in-peer's latest vector.

    Attributes:
        peer: node id.
        vector: the vector; belongs to the inbox.
        boot: of the peer's strategy.
        number: of the push.
        policy_version: of the vector.
        nbytes: as it travelled.
        fresh: whether it waits to be used.
    """

    peer: str
    vector: Float32Array
    boot: str = ""
    number: int = -1
    policy_version: int = 0
    nbytes: int = 0
    fresh: bool = False


class GalaInbox:
    """The latest vectors.

    Args:
        size: D.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._letters: dict[str, Letter] = {}

    @property
    def any_fresh(self) -> bool:
        """Whether something waits to be used."""
        return any(letter.fresh for letter in self._letters.values())

    def known(self, peer: str, boot: str, number: int) -> bool:
        """Whether this push, or a later one of the peer's boot, was here."""
        letter = self._letters.get(peer)
        return letter is not None and letter.boot == boot and number <= letter.number

    def open(self, peer: str) -> Letter | None:
        """Give the letter to write the peer's vector into; call `seal` when it is good.

        Returns:
            None when there are too many in-peers, all of whose vectors wait to be used.
        """
        letter = self._letters.get(peer)
        if letter is None:
            vector = self._vacant()
            if vector is None:
                return None
            letter = self._letters[peer] = Letter(peer, vector)
        letter.fresh = False
        return letter

    def seal(self, letter: Letter, head: PushHead, nbytes: int) -> None:
        """The vector in ``letter`` is good: it waits to be used."""
        letter.boot, letter.number, letter.nbytes = head.boot, head.number, nbytes
        letter.policy_version = head.summary.policy_version
        letter.fresh = True

    def take(self, policy_version: int, max_lag: int) -> tuple[list[Letter], tuple[str, ...]]:
        """Take all that waits.

        Args:
            policy_version: ours.
            max_lag: τ, policy versions; what is older is left out.

        Returns:
            The letters to use, by peer, and the peers whose vectors are too old. Neither waits any longer.
        """
        waiting = [letter for _, letter in sorted(self._letters.items()) if letter.fresh]
        for letter in waiting:
            letter.fresh = False
        good = [letter for letter in waiting if policy_version - letter.policy_version <= max_lag]
        late = tuple(letter.peer for letter in waiting if policy_version - letter.policy_version > max_lag)
        return good, late

    def clear(self) -> None:
        """Use none of what waits: our own vector was replaced."""
        for letter in self._letters.values():
            letter.fresh = False

    def _vacant(self) -> Float32Array | None:
        if len(self._letters) < MOST:
            return np.zeros(self._size, np.float32)
        for peer, letter in self._letters.items():
            if not letter.fresh:
                return self._letters.pop(peer).vector
        return None


ARRIVING = 4
"""Pushes of one kind that are read at once; more are refused."""


class GalaQuantity:
    """Buffers and arithmetic of one kind.

    Args:
        content: the kind.
        config: the strategy's options.
        context: what the node gives.
    """

    def __init__(self, content: Content, config: GalaConfig, context: StrategyContext) -> None:
        kind = config.compression
        if content == "parameters" and kind != "none":
            kind = "bf16"
        self.content = content
        self.wire: WireName = "float32" if kind == "none" else kind
        self.encoder = FeedbackEncoder(
            kind, context.size, keep=config.keep, threshold=config.threshold, max_abs=context.max_abs
        )
        self.inbox = GalaInbox(context.size)
        self.arrivals = Arrivals(self.encoder.max_nbytes, ARRIVING)
        self._config = config
        self._me = context.swarm.node_id
        self._max_abs = context.max_abs
        self._delta_D: Float32Array = np.zeros(context.size, np.float32)
        self._own_norm: float | None = None

    def check(self, mine_D: Float32Array) -> None:
        """Check our own vector, whose norm is the measure of others'.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """
        mix.check_finite(mine_D, self._max_abs)
        self._own_norm = mix.norm(mine_D)

    def keep(self, letter: Letter, message: memoryview) -> None:
        """Read what came into ``letter``.

        Raises:
            WireError: it is malformed.
            PoisonedVectorError: it holds NaN, infinity, a huge entry, or is out of proportion to ours.
        """
        self.encoder.decode(message, letter.vector)
        mix.check_finite(letter.vector, self._max_abs)
        if self._own_norm is None:
            return
        length, bound = mix.norm(letter.vector), self._config.max_distance * (1.0 + self._own_norm)
        if length > bound:
            raise PoisonedVectorError(f"norm {length:.3g} is beyond the bound {bound:.3g}")

    def merge(
        self, mine_D: Float32Array, policy_version: int, write: Callable[[Float32Array, int], bool]
    ) -> RoundReport:
        """Average our vector with what waits.

        Args:
            mine_D: ours, checked.
            policy_version: of it.
            write: takes what is to be added, and the newest version in it; False when ours is gone.
        """
        letters, late = self.inbox.take(policy_version, self._config.max_lag)
        if not letters:
            return RoundReport("stale", missing=late, error="all that came is too old")
        self._average(mine_D, letters)
        changed = mix.norm(self._delta_D)
        squares = [mix.distance(mine_D, letter.vector) ** 2 for letter in letters]
        distance = math.sqrt(sum(squares) / len(squares))
        if not write(self._delta_D, max(policy_version, *(letter.policy_version for letter in letters))):
            return RoundReport("failed", missing=late, error="our vector was replaced meanwhile")
        good, weight = changed > 0 or distance == 0, 1.0 / (1 + len(letters))
        parts = [Merged(letter.peer, weight, policy_version - letter.policy_version) for letter in letters]
        return RoundReport(
            "ok" if good else "unchanged",
            merged=(Merged(self._me, weight), *parts),
            missing=late,
            bytes_in=sum(letter.nbytes for letter in letters),
            changed=changed,
            distance=distance,
            error="" if good else "they differ, but the step rounds or clips to nothing",
        )

    def _average(self, mine_D: Float32Array, letters: list[Letter]) -> None:
        """Put what our vector is to move into the scratch."""
        config = self._config
        combine(
            [mine_D, *(letter.vector for letter in letters)],
            [1.0] * (1 + len(letters)),
            mixing=config.mixing,
            clip_distance=config.clip_distance,
            trim=config.trim,
            reference=mine_D,
            out=self._delta_D,
        )
        np.subtract(self._delta_D, mine_D, out=self._delta_D)


ROUTE = "push"
UNDER_WAY = 3
"""Vectors that may be under way at once: a silent out-peer holds one until its deadline."""

_UNUSABLE = RoundReport("failed", error="our own numbers are unusable")


class GalaStrategy(AsynchronousStrategy[PushCore]):
    """Non-blocking push gossip; see `Strategy`.

    Outcomes of averages: ``ok``, ``unchanged``, ``stale`` (all that came was too old), ``failed``. Of our
    pushes: ``pushed busy refused failed timeout unsure``, ``behind`` and ``ahead`` (somebody adopts).
    """

    DONE = "pushed"

    def __init__(self, config: GalaConfig, context: StrategyContext) -> None:
        me = context.swarm.node_id
        super().__init__(config, context, PushCore(config, me, context.rng), 4 * context.size)
        self._config = config
        self._learner = context.learner
        self._parameters = GalaQuantity("parameters", config, context)
        self._gradients = (
            GalaQuantity("gradients", config, context) if config.exchanges == "gradients" else None
        )
        self._own = OwnVector(self._board, context.size)
        self._boot = new_exchange_id()
        self._number = 0
        self._flights: dict[str, asyncio.Task[None]] = {}
        longest = max(side.encoder.max_nbytes for side in (self._parameters, self._gradients) if side)
        self._messages = BufferPool(longest, UNDER_WAY)
        self._relayed = RelayedPushes(me)
        self._gradients_in_a_row = 0
        self._gradient_wanted = False
        self._gradient_ready = False
        self._unmixed_updates = 0
        self._books = asyncio.Lock()

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        self._unmixed_updates += updates
        super().updated(updates)

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        posts = [] if self._gradients is None else [self._answer_posts(self._gradients)]
        return [self._average(), *posts]

    # --- averaging --------------------------------------------------------------------------------

    async def _average(self) -> None:
        """Average our parameters with what came, once after each update of the learner."""
        side, own = self._parameters, self._own
        while True:
            self._follow()
            if not self._unmixed_updates or not side.inbox.any_fresh or self._swarm.summary() is None:
                await self._runner.rest(self._core.rest_s(self._clock.monotonic()))
                continue
            self._unmixed_updates = 0
            began_s, report = self._clock.monotonic(), _UNUSABLE
            async with self._books:
                if await self._read():
                    report = await self._heavy.run(
                        lambda: side.merge(own.vector, own.policy_version, own.add)
                    )
            self._averaged(report, began_s)
            if report.distance is not None:
                self._outcomes.met(report.distance)

    async def _answer_posts(self, side: GalaQuantity) -> None:
        """Answer each gradient as it comes; push it when one is wanted."""
        while True:
            post = await self._learner.next_post()
            outcome = "none"
            if post.vector is not None:
                async with self._books:
                    outcome = await self._average_gradient(side, post.vector, post.policy_version)
            self._learner.answer(post, "add" if outcome == "ok" else "none")

    async def _average_gradient(
        self, side: GalaQuantity, gradient_D: Float32Array, policy_version: int
    ) -> str:
        """Put what in-peers' gradients add to ours in its place; return how that went."""

        def correct(delta_D: Float32Array, _newest: int) -> bool:
            np.copyto(gradient_D, delta_D)
            return True

        began_s = self._clock.monotonic()
        try:
            await self._heavy.run(lambda: side.check(gradient_D))
            if self._gradient_wanted:
                await self._heavy.run(lambda: side.encoder.encode(gradient_D))
                self._gradient_wanted, self._gradient_ready = False, True
                self._runner.news.set()
        except PoisonedVectorError:
            await self._read()  # one bad gradient is its learner's business, unless the parameters are bad
            return "failed"
        if not side.inbox.any_fresh:
            return "none"
        report = await self._heavy.run(lambda: side.merge(gradient_D, policy_version, correct))
        self._averaged(report, began_s)
        return report.outcome

    def _averaged(self, report: RoundReport, began_s: float) -> None:
        self._outcomes.ended(replace(report, seconds=self._clock.monotonic() - began_s), ours=False)

    # --- pushing ----------------------------------------------------------------------------------

    async def _run(self) -> None:
        await super()._run()
        if self._flights:
            await asyncio.wait(self._flights.values())

    async def _turn(self) -> bool:
        now_s, alive = self._clock.monotonic(), self._swarm.alive()
        side = self._due(now_s, len(alive) + 1)
        if side is None:
            return False
        lent = self._core.fit(self._relayed.lent & alive.keys(), now_s)
        peers = {*self._core.choose_all(alive, now_s), *lent}
        if not peers:
            self._gradient_ready = False  # it would be old when somebody is there
        peers -= self._flights.keys()
        if not peers or not self._messages.any_free:
            return False
        self._core.began(now_s)
        await self._push(side, {peer: alive[peer] for peer in sorted(peers)})
        hungry_for = None if self._config.partners == "random" else self._relayed.whom_to_ask(alive)
        if hungry_for is not None:
            self._runner.beside(self._ask(hungry_for, alive[hungry_for]))
        return True

    def _due(self, now_s: float, members: int) -> GalaQuantity | None:
        """What is to be pushed now; a gradient is asked for first."""
        if not self._may_begin(now_s, members):
            return None
        if self._gradients is None or self._gradients_in_a_row >= self._config.parameters_every:
            return self._parameters
        self._gradient_wanted = not self._gradient_ready
        return self._gradients if self._gradient_ready else None

    async def _push(self, side: GalaQuantity, peers: dict[str, Address]) -> None:
        """Push to all of ``peers`` at once, and wait for none."""
        summary = self._swarm.summary()
        if side is self._parameters and not await self._load():
            self._averaged(_UNUSABLE, self._clock.monotonic())
            return
        buffer = self._messages.take()
        if summary is None or buffer is None:
            return
        message = buffer[: len(side.encoder.message)]
        message[:] = side.encoder.message
        side.encoder.delivered()  # what a lost push carried is lost
        self._gradient_ready = self._gradient_ready and side is self._parameters
        self._gradients_in_a_row = 0 if side is self._parameters else self._gradients_in_a_row + 1
        self._number += 1
        self._relayed.pushed()
        head = PushHead(self._boot, self._number, side.wire, summary, side.content)
        for peer, address in peers.items():
            self._flights[peer] = self._runner.beside(self._push_to(head, message, peer, address))
        flights = [self._flights[peer] for peer in peers]
        self._runner.beside(self._land(flights, buffer))

    async def _land(self, flights: list[asyncio.Task[None]], buffer: memoryview) -> None:
        """Have the buffer back when the last push of it has ended."""
        await asyncio.wait(flights)
        self._messages.give(buffer)

    async def _load(self) -> bool:
        """Encode our parameters; False when they can't be given to anybody."""
        async with self._books:
            if not await self._read():
                return False
            await self._heavy.run(lambda: self._parameters.encoder.encode(self._own.vector))
            return True

    async def _push_to(self, head: PushHead, message: memoryview, peer: str, address: Address) -> None:
        """Push to one peer."""
        began_s = self._clock.monotonic()
        meta, deadline_s = msgspec.msgpack.encode(head), self._deadline.seconds
        report = RoundReport("unsure", missing=(peer,), bytes_out=len(message), round_trips=1)
        try:
            got = await self._transport.call(
                address, peer, ROUTE, meta, vector=message, deadline_s=deadline_s, lane="bulk"
            )
            report = self._pushed(peer, head, decode_push_answer(got.meta), report)
        except TransportError as error:
            report = replace(report, outcome=outcome_of(error), error=str(error), unready=unready(error))
        finally:
            del self._flights[peer]
        now_s = self._clock.monotonic()
        self._deadline.note("ok" if report.outcome == "pushed" else report.outcome, now_s - began_s)
        self._outcomes.ended(replace(report, seconds=now_s - began_s))
        if report.outcome == "pushed":
            self._core.mixed(peer)
        elif report.outcome != "busy":
            self._core.failed(peer, now_s, unready=report.unready)

    async def _ask(self, peer: str, address: Address) -> None:
        """Ask for a peer's pushes; when nothing comes of it, the next is asked."""
        summary = self._swarm.summary()
        if summary is None:
            return
        head = PushHead(self._boot, self._number, self._parameters.wire, summary, asks=True)
        meta = msgspec.msgpack.encode(head)
        with contextlib.suppress(TransportError):
            await self._transport.call(address, peer, ROUTE, meta, deadline_s=self._deadline.seconds)

    def _pushed(
        self, peer: str, head: PushHead, answer: PushAnswer | None, report: RoundReport
    ) -> RoundReport:
        if answer is None or answer.number != head.number:
            return replace(report, error="the answer can't be read")
        heard = self._admission.heard(peer, head.summary, answer.summary, answer.verdict)
        if heard != "ok":
            return replace(report, outcome=heard, error=f"it answered {answer.verdict}")
        if answer.more:
            self._relayed.renew(peer)
        return replace(report, outcome="pushed", missing=())

    # --- what comes -------------------------------------------------------------------------------

    async def answer(self, incoming: Incoming) -> Reply:
        """Keep what a peer pushes for the next average.

        Raises:
            Refusal: too many at once (423), no state yet (503), another task or mode (409), poisoned (422),
                quarantined (403), malformed (400), late (408).
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is gala, which has no {incoming.route}")
        head = decode_push_head(incoming.meta)
        if head is None:
            raise Refusal(400, "the push's head can't be read")
        mine = self._admission.admit(incoming.sender, stopping=self._runner.stopping)
        verdict = self._admission.judge(incoming.sender, mine, head.summary)
        if head.asks:
            lent = verdict is Verdict.MIX and self._relayed.lend(incoming.sender)
            result = PushAnswer(head.number, "taken" if lent else "void", mine, verdict.value)
            return Reply(msgspec.msgpack.encode(result))
        side = self._parameters if head.content == "parameters" else self._gradients
        if side is None:
            raise Refusal(409, f"this node pushes parameters, not {head.content}")
        if verdict is Verdict.MIX and not side.inbox.known(incoming.sender, head.boot, head.number):
            if head.wire != side.wire or not 0 < incoming.vector_nbytes <= side.encoder.max_nbytes:
                raise Refusal(422, "the vector has another format or length than ours")
            message = await side.arrivals.read(incoming, self._config.deadline_s)
            keeping = self._keep(side, head, message, incoming.vector_nbytes, incoming.sender)
            refusal = await asyncio.shield(self._runner.briefly(keeping))
            if refusal is not None:
                raise refusal
        result = PushAnswer(head.number, "taken" if verdict is Verdict.MIX else "void", mine, verdict.value)
        result = msgspec.structs.replace(result, more=self._relayed.only(incoming.sender))
        return Reply(msgspec.msgpack.encode(result))

    async def _keep(
        self, side: GalaQuantity, head: PushHead, message: memoryview, nbytes: int, sender: str
    ) -> Refusal | None:
        """Keep what came; return why not, if it is refused."""
        try:
            async with self._books:
                if side.inbox.known(sender, head.boot, head.number):
                    return None
                letter = side.inbox.open(sender)
                if letter is None:
                    return Refusal(BUSY, "too many peers push to this node")
                await self._heavy.run(lambda: side.keep(letter, message[:nbytes]))
                side.inbox.seal(letter, head, nbytes)
                self._relayed.came(sender)
        except PoisonedVectorError as error:
            self._swarm.strike(sender, str(error))
            return Refusal(422, f"poisoned vector: {error}")
        except WireError as error:
            return Refusal(400, str(error))
        except Refusal as refusal:
            return refusal
        finally:
            side.arrivals.give(message)
        self._runner.news.set()
        return None

    async def _read(self) -> bool:
        """Take our parameters off the board; False when they can't be used (then they are healed)."""

        def work() -> None:
            self._own.read()
            self._parameters.check(self._own.vector)

        try:
            await self._heavy.run(work)
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            return False
        except TensorError:
            return False
        self._follow()
        return True

    def _follow(self) -> None:
        """When our vector was replaced by another, use nothing that came before."""
        if self._own.replaced():
            self._parameters.inbox.clear()
            if self._gradients is not None:
                self._gradients.inbox.clear()
