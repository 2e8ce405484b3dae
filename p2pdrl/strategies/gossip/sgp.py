"""Stochastic gradient push (SGP; Assran 2019, arXiv 1811.10792, Algorithm 1): push-sum over a directed graph.

Node i holds x_i and a weight w_i, at first 1, and trains at z_i = x_i / w_i:

    x_i ← x_i − γ ∇F(z_i; ξ_i)                       its learner, at z_i
    send p·(x_i, w_i) to an out-peer, keep the rest           p is ``share``
    x_i, w_i ← x_i + Σ x_in, w_i + Σ w_in
    z_i ← x_i / w_i

Here the board holds z, a push carries z and its mass m = p·w, and what comes moves z_i by m / (w_i + m)
towards the z that came: the same sums. Mass must be neither lost nor counted twice, so pushes are numbered,
acknowledged, and sent again until their fate is known.

One thing is not the paper's: a learner steps z_i ← z_i − γ ∇F(z_i), by the step of its optimizer, and not by
γ / w_i. So pushes keep the mean, but a node's gradients count w_i times in what the swarm descends. Weights
stay about 1 where all push and hear alike; a node that hears of fewer pushes than it makes counts less.

In this order below: the weights (`PushSum`), the vectors (`PushVectors`), pushes that aren't acknowledged yet
(`Outbox`), the loop (`SgpStrategy`).
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.strategy import SgpConfig
from p2pdrl.errors import (
    P2PDRLError,
    PeerRefusedError,
    PeerUnreachableError,
    PoisonedVectorError,
    TransportError,
)
from p2pdrl.group.compatibility import Summary, Verdict
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.call_timeouts import failed
from p2pdrl.strategies.clipping_radius import ClippingRadius
from p2pdrl.strategies.gossip.asynchronous import AsynchronousStrategy
from p2pdrl.strategies.gossip.pair_average import Bounds, PairUpdate, pair_report, pair_step
from p2pdrl.strategies.gossip.push import BufferPool, PushAnswer, PushCore, PushHead
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import RoundReport, StrategyContext
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.wire import WireDtype, decode, encode, encoded_nbytes
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = [
    "FLOOR",
    "OPEN",
    "ROUTE",
    "Arrival",
    "Outbox",
    "PushInFlight",
    "PushSum",
    "PushVectors",
    "Result",
    "SgpStrategy",
    "UnacknowledgedPush",
]

ROUTE = "push"

# --- weights ----------------------------------------------------------------------------------------

FLOOR = 2.0**-20
"""A node keeps at least this weight: one that only gives would underflow, and with it what it stands for."""

CEILING = 2.0**40
"""No honest swarm has this much weight in one place."""

MOST_MASS = 4.0
"""Weight for each living node: with clipping, no push carries more. All honest weights together are one for
each node that ever began; those of nodes that died may still be about."""

SENDERS = 1024
NUMBERS = 1024
"""How much is remembered of what arrived: (sender, boot) pairs, and numbers of each."""

Result = Literal["new", "taken", "void"]


class Arrival(NamedTuple):
    """What names a push that comes."""

    sender: str
    boot: str
    number: int


class PushInFlight(NamedTuple):
    """A push under way to ``peer``: the weight that it carries, and the weight that the sender kept."""

    number: int
    peer: str
    mass: float
    left: float


class PushSum:
    """One node's weight w and its pushes; the caller moves the vectors by the factors it is given."""

    def __init__(self) -> None:
        self.weight = 1.0
        self._number = 0
        self._open: dict[int, PushInFlight] = {}
        self._seen: OrderedDict[tuple[str, str], _Numbers] = OrderedDict()

    @property
    def under_way(self) -> float:
        """Mass that is set aside."""
        return sum(flight.mass for flight in self._open.values())

    def send(self, peer: str, share: float) -> PushInFlight | None:
        """Set aside ``share`` of the weight, but leave `FLOOR`; None when nothing is left to give."""
        if self.weight < 2 * FLOOR:
            return None
        mass = min(share * self.weight, self.weight - FLOOR)
        self._number += 1
        self.weight -= mass
        flight = PushInFlight(self._number, peer, mass, self.weight)
        self._open[flight.number] = flight
        return flight

    def gone(self, number: int) -> None:
        """The peer has it, or nobody will ever tell what became of it."""
        self._open.pop(number, None)

    def returned(self, number: int) -> float:
        """It came to nothing: have the mass back; return how far z is to move towards the z that was sent."""
        flight = self._open.pop(number, None)
        return 0.0 if flight is None else self._gain(flight.mass)

    def restart(self) -> None:
        """Another vector is in place of ours: begin anew with weight 1, and forget what is under way."""
        self.weight = 1.0
        self._open.clear()

    def result(self, arrival: Arrival) -> Result:
        """What became of a push that comes, if it was here before."""
        numbers = self._seen.get(arrival[:2])
        return "new" if numbers is None else numbers.result(arrival.number)

    def acceptable(self, mass: float) -> bool:
        """Whether an honest peer could send so much."""
        return 0 < mass < CEILING and self.weight + mass < CEILING

    def factor(self, mass: float) -> float:
        """How far z moves towards a z that comes with ``mass``."""
        return mass / (self.weight + mass)

    def take(self, arrival: Arrival, mass: float) -> float:
        """Take a new push; return how far z is to move towards the z that came.

        Raises:
            ValueError: it was here before, or the mass isn't acceptable.
        """
        if self.result(arrival) != "new" or not self.acceptable(mass):
            raise ValueError(f"push {arrival.number} of {arrival.sender} can't be taken")
        self._numbers(arrival).note(arrival.number, "taken")
        return self._gain(mass)

    def refuse(self, arrival: Arrival) -> Result:
        """Never take a push, unless that is done already; return what became of it."""
        if self.result(arrival) == "new":
            self._numbers(arrival).note(arrival.number, "void")
        return self.result(arrival)

    def _gain(self, mass: float) -> float:
        factor = self.factor(mass)
        self.weight += mass
        return factor

    def _numbers(self, arrival: Arrival) -> _Numbers:
        numbers = self._seen.setdefault(arrival[:2], _Numbers())
        self._seen.move_to_end(arrival[:2])
        while len(self._seen) > SENDERS:
            self._seen.popitem(last=False)
        return numbers


class _Numbers:
    """What became of one sender's pushes; those too old to be remembered count as void."""

    def __init__(self) -> None:
        self._results: dict[int, Result] = {}
        self._forgotten = 0

    def result(self, number: int) -> Result:
        return "void" if number <= self._forgotten else self._results.get(number, "new")

    def note(self, number: int, result: Result) -> None:
        self._results[number] = result
        if len(self._results) > NUMBERS:
            self._forgotten = min(self._results)
            del self._results[self._forgotten]


# --- vectors ----------------------------------------------------------------------------------------


class PushVectors:
    """Reads our vector, writes it for the wire, moves it towards one that came.

    Args:
        size: D, float32 parameters.
    """

    def __init__(self, board: DaemonBoard, size: int, wire: WireDtype, bounds: Bounds) -> None:
        self._board = board
        self._wire: WireDtype = wire
        self._bounds = bounds
        self._mine_D = np.zeros(size, np.float32)
        self._theirs_D = np.zeros(size, np.float32)
        self._version = 0
        self.sets = 0
        """Sets on the board when it was last read."""
        self.nbytes = encoded_nbytes(size, wire)

    def read(self) -> None:
        """Take our vector off the board.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
            TensorError: it can't be read now.
        """
        snapshot = read_now(self._board, self._mine_D, self._bounds.max_abs)
        self.sets, self._version = snapshot.sets, snapshot.policy_version
        if self._bounds.radius is not None:
            self._bounds.radius.read(self._mine_D, self.sets)

    def pack(self, out: memoryview, ratio: float) -> None:
        """Write what was read for the wire.

        What the wire rounds off stays ours: x = w·z loses m·round(z), so that z moves by
        m / (w − m) · (z − round(z)).

        Args:
            out: of `nbytes`.
            ratio: m / (w − m); above 1 it would amplify the rounding, so no more than 1 is applied.

        Raises:
            PoisonedVectorError: rounded, it is beyond the bound: its peer would refuse it and strike us.
        """
        encode(self._mine_D, self._wire, out)
        if self._wire == "float32":
            return
        decode(out, self._wire, self._theirs_D)
        mix.check_finite(self._theirs_D, self._bounds.max_abs)
        mix.pair_delta(self._theirs_D, self._mine_D, min(ratio, 1.0), out=self._theirs_D)
        self._post(self._version)

    def merge(self, message: memoryview, factor: float, policy_version: int, peer: str) -> PairUpdate | None:
        """Move our vector, as it was read, by ``factor`` towards the one that came.

        Returns:
            What was done; None when our vector was replaced since it was read.

        Raises:
            PoisonedVectorError: what came is unusable.
            WireError: it is malformed.
        """
        decode(message, self._wire, self._theirs_D)
        step = pair_step(self._mine_D, self._theirs_D, factor, self._bounds, peer)
        return step if self._post(policy_version) else None

    def regain(self, message: memoryview, factor: float) -> None:
        """Move our vector, as it was read, by ``factor`` towards what we sent in vain."""
        decode(message, self._wire, self._theirs_D)
        mix.pair_delta(self._mine_D, self._theirs_D, factor, out=self._theirs_D)
        self._post(self._version)

    def _post(self, policy_version: int) -> bool:
        posted = self._board.post_delta(self._theirs_D, policy_version, sets=self.sets)
        if posted and self._bounds.radius is not None:
            self._bounds.radius.added(self._theirs_D)
        return posted


# --- pushes that aren't acknowledged yet -------------------------------------------------------------

OPEN = 4
"""Pushes whose fate may be unknown at once: each holds its bytes, and a part of our weight."""

AGAIN_FIRST_S = 0.25
AGAIN_MAX_S = 5.0
ABSENT_S = 10.0
"""A peer that nobody counted among the living for so long is taken for dead; suspects come back sooner."""


@dataclass(slots=True)
class UnacknowledgedPush:
    """A push whose fate isn't known yet. Times are monotonic.

    Attributes:
        flight: its number, peer and mass.
        summary: what this node said of itself when its vector was read.
        message: the vector as it travels; the same each time.
        attempts: how often it was sent.
        next_s: it isn't sent again before.
        missed_s: since when its peer isn't among the living; None while it is.
    """

    flight: PushInFlight
    summary: Summary
    message: memoryview
    attempts: int = 0
    next_s: float = float("-inf")
    missed_s: float | None = None


class Outbox:
    """The pushes under way, each a message of ``nbytes``.

    Attributes:
        buffers: for new ones; a push that was added gives its own back at its end.
    """

    def __init__(self, nbytes: int) -> None:
        self.buffers = BufferPool(nbytes, OPEN)
        self._pushes: dict[int, UnacknowledgedPush] = {}

    @property
    def peers(self) -> set[str]:
        """To whom something is under way."""
        return {push.flight.peer for push in self._pushes.values()}

    def add(self, push: UnacknowledgedPush) -> None:
        """A push begins."""
        self._pushes[push.flight.number] = push

    def remove(self, push: UnacknowledgedPush) -> None:
        """The fate of a push is known."""
        if self._pushes.pop(push.flight.number, None) is not None:
            self.buffers.give(push.message)

    def retry(self, push: UnacknowledgedPush, now_s: float) -> None:
        """Nothing was heard of a push: it goes out again after a while that doubles."""
        push.next_s = now_s + min(AGAIN_FIRST_S * 2.0 ** min(push.attempts - 1, 16), AGAIN_MAX_S)

    def due(self, alive: Collection[str], now_s: float) -> UnacknowledgedPush | None:
        """The push to send again now, if there is one."""
        for push in self._pushes.values():
            if push.attempts and push.next_s <= now_s and push.flight.peer in alive:
                return push
        return None

    def dead(self, alive: Collection[str], now_s: float) -> list[UnacknowledgedPush]:
        """Pushes whose peer hasn't been among the living for `ABSENT_S`."""
        gone = []
        for push in self._pushes.values():
            if push.flight.peer in alive:
                push.missed_s = None
            elif push.missed_s is None:
                push.missed_s = now_s
            elif now_s - push.missed_s >= ABSENT_S:
                gone.append(push)
        return gone

    def clear(self) -> None:
        """Forget all."""
        for push in list(self._pushes.values()):
            self.remove(push)


# --- the loop ---------------------------------------------------------------------------------------

ARRIVING = 2
"""Pushes that are read at once; more are refused."""


class SgpStrategy(AsynchronousStrategy[PushCore]):
    """SGP over the transport; see `Strategy`.

    Outcomes of our pushes: ``pushed`` (arrived), ``busy refused failed`` (taken back), ``behind`` and
    ``ahead`` (somebody adopts), ``timeout unsure`` (sent again later), ``lost`` (the peer died first). Of
    those that came: ``ok``, ``unchanged``, ``poisoned``.
    """

    DONE = "pushed"

    def __init__(self, config: SgpConfig, context: StrategyContext) -> None:
        self._wire: WireDtype = "float32" if config.compression == "none" else "bf16"
        self._clipped = config.rule(bounded=context.bounded) == "clipped"
        radius = ClippingRadius(config.clip_distance, context.clock) if self._clipped else None
        bounds = Bounds(context.max_abs, config.max_distance, radius)
        self._vectors = PushVectors(context.learner.board, context.size, self._wire, bounds)
        core = PushCore(config, context.swarm.node_id, context.rng)
        super().__init__(config, context, core, self._vectors.nbytes)
        self._config = config
        self._sum = PushSum()
        self._boot = new_exchange_id()
        self._sets = self._board.sets
        self._outbox = Outbox(self._vectors.nbytes)
        self._arriving = BufferPool(self._vectors.nbytes, ARRIVING)
        self._lock = asyncio.Lock()

    @property
    def weight(self) -> float:
        """Our w, without what is under way."""
        return self._sum.weight

    @property
    def under_way(self) -> float:
        """Weight that is under way."""
        return self._sum.under_way

    # --- pushing ----------------------------------------------------------------------------------

    async def _turn(self) -> bool:
        self._follow(self._board.sets)
        alive, now_s = self._swarm.alive(), self._clock.monotonic()
        for push in self._outbox.dead(alive, now_s):
            self._lose(push)
        push_due = self._outbox.due(alive, now_s) or await self._new_push(alive, now_s)
        if push_due is None:
            return False
        await self._deliver(push_due, alive[push_due.flight.peer])
        return True

    async def _new_push(self, alive: dict[str, Address], now_s: float) -> UnacknowledgedPush | None:
        """Begin a push if one is due; None when there is none to begin."""
        summary = self._swarm.summary()
        if summary is None or not self._outbox.buffers.any_free or not self._may_begin(now_s, len(alive) + 1):
            return None
        peer = self._core.choose(alive, now_s, without=self._outbox.peers)
        buffer = None if peer is None else self._outbox.buffers.take()
        if peer is None or buffer is None:
            return None
        self._core.began(now_s)
        async with self._lock:
            readable = await self._read()
            flight = self._sum.send(peer, self._config.share) if readable else None
            if flight is not None:
                ratio = flight.mass / flight.left
                readable = await self._usable(lambda: self._vectors.pack(buffer, ratio))
                if not readable:
                    self._sum.returned(flight.number)
            if not readable:
                self._outcomes.ended(RoundReport("failed", error="our own parameters are unusable"))
            if flight is None or not readable:
                self._outbox.buffers.give(buffer)
                return None
            push = UnacknowledgedPush(flight, summary, buffer)
            self._outbox.add(push)
        return push

    async def _deliver(self, push: UnacknowledgedPush, address: Address) -> None:
        """Send a push once, and do what its answer asks for."""
        began_s = self._clock.monotonic()
        peer, attempts = push.flight.peer, push.attempts
        push.attempts += 1
        report = RoundReport("unsure", missing=(peer,), bytes_out=self._vectors.nbytes, round_trips=1)
        known = False
        try:
            answer = await self._send(push, address)
            if answer.number != push.flight.number:
                report = replace(report, error="it answered another push")
            else:
                known = True
                report = await self._answered(push, answer, report)
        except TransportError as error:
            report = failed(report, error)
            if not attempts and _never_arrived(error):
                known = True
                await self._take_back(push)
        if known:
            self._outbox.remove(push)
        else:
            self._outbox.retry(push, self._clock.monotonic())
        self._ended(peer, report, began_s)

    async def _send(self, push: UnacknowledgedPush, address: Address) -> PushAnswer:
        head = PushHead(
            boot=self._boot,
            number=push.flight.number,
            wire=self._wire,
            summary=push.summary,
            mass=push.flight.mass,
        )
        got = await self._call(address, push.flight.peer, ROUTE, head, vector=push.message)
        answer: PushAnswer = codec.decode(got.meta, PushAnswer, "push's answer")
        return answer

    async def _answered(
        self, push: UnacknowledgedPush, answer: PushAnswer, report: RoundReport
    ) -> RoundReport:
        """The peer says what became of a push."""
        if answer.result == "taken":
            self._sum.gone(push.flight.number)
            return replace(report, outcome="pushed", missing=())
        await self._take_back(push)
        heard = self._admission.heard(push.flight.peer, push.summary, answer.summary, answer.verdict)
        outcome = "refused" if heard in ("ok", "failed") else heard
        return replace(report, outcome=outcome, error="it didn't take the push")

    async def _take_back(self, push: UnacknowledgedPush) -> None:
        """A push came to nothing: its mass and what it stands for are ours again."""
        async with self._lock:
            readable = await self._read()
            factor = self._sum.returned(push.flight.number)
            if readable and factor:
                await self._arithmetic.run(lambda: self._vectors.regain(push.message, factor))

    def _lose(self, push: UnacknowledgedPush) -> None:
        self._sum.gone(push.flight.number)
        self._outbox.remove(push)
        error = "the peer died before it answered"
        self._outcomes.ended(RoundReport("lost", missing=(push.flight.peer,), error=error))

    # --- what comes -------------------------------------------------------------------------------

    async def answer(self, incoming: Incoming) -> Reply:
        """Take a peer's push, once.

        Raises:
            Refusal: too many at once (423), no state yet (503), another task or mode (409), poisoned (422),
                quarantined (403), late (408). The push is void then, whenever it comes.
            WireError: the head is malformed.
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is sgp, which has no {incoming.route}")
        head: PushHead = codec.decode(incoming.meta, PushHead, "push's head")
        arrival = Arrival(incoming.sender, head.boot, head.number)
        try:
            return await self._receive(incoming, head, arrival)
        except P2PDRLError:  # a refusal, or a vector that was cut off
            self._sum.refuse(arrival)
            raise

    async def _receive(self, incoming: Incoming, head: PushHead, arrival: Arrival) -> Reply:
        mine = self._admission.admit(incoming.sender, stopping=self._runner.stopping)
        if self._sum.result(arrival) != "new":
            return self._reply(mine, arrival)
        verdict = self._admission.judge(incoming.sender, mine, head.summary)
        if verdict is not Verdict.MIX:
            return self._reply(mine, arrival, verdict)
        same = head.wire == self._wire and head.content == "parameters"
        if not same or incoming.vector_nbytes != self._vectors.nbytes or not self._sum.acceptable(head.mass):
            raise Refusal(422, "the push has another format, length or weight than can be")
        if self._clipped and head.mass > MOST_MASS * (len(self._swarm.alive()) + 1):
            self._swarm.strike(incoming.sender, f"a push of weight {head.mass:.3g}, more than all nodes have")
            raise Refusal(422, "the push carries more weight than the whole swarm has")
        began_s = self._clock.monotonic()
        message = await self._arriving.read(incoming, self._config.deadline_s)
        # From here on it is taken or refused for good, whether or not the caller still waits.
        merging = self._runner.briefly(self._merge(message, head, arrival, mine, began_s))
        refusal = await asyncio.shield(merging)
        if refusal is not None:
            raise refusal
        return self._reply(mine, arrival)

    def _reply(self, mine: Summary, arrival: Arrival, verdict: Verdict = Verdict.MIX) -> Reply:
        """Say what became of a push; one that wasn't taken by now never will be."""
        result = self._sum.refuse(arrival)
        said = PushAnswer(arrival.number, "taken" if result == "taken" else "void", mine, verdict.value)
        return Reply(msgspec.msgpack.encode(said))

    async def _merge(
        self, message: memoryview, head: PushHead, arrival: Arrival, mine: Summary, began_s: float
    ) -> Refusal | None:
        """Take a push that has arrived; return why not, if it is refused."""
        try:
            async with self._lock:
                if self._sum.result(arrival) != "new":
                    return None  # another copy of it was quicker
                if not await self._read():
                    return Refusal(503, "our own parameters are unusable; taking a donor's")
                factor = self._sum.factor(head.mass)
                version = max(mine.policy_version, head.summary.policy_version)
                factor *= self._swarm.trust(arrival.sender)
                step = await self._arithmetic.run(
                    lambda: self._vectors.merge(message, factor, version, arrival.sender)
                )
                if step is None:
                    return Refusal(503, "our vector was replaced meanwhile")
                if step.strike:
                    self._swarm.strike(arrival.sender, step.strike)
                self._sum.take(arrival, head.mass)
        except PoisonedVectorError as error:
            self._swarm.strike(arrival.sender, str(error))
            return Refusal(422, f"poisoned vector: {error}")
        except Refusal as refusal:
            return refusal
        finally:
            self._arriving.give(message)
        self._outcomes.met(step.distance)
        staleness = mine.policy_version - head.summary.policy_version
        report = RoundReport("ok", seconds=self._clock.monotonic() - began_s, bytes_in=self._vectors.nbytes)
        report = pair_report(report, self._swarm.node_id, arrival.sender, step, staleness)
        self._outcomes.ended(report, ours=False)
        return None

    # --- what we hold -----------------------------------------------------------------------------

    async def _read(self) -> bool:
        """Take our vector off the board; False when it can't be given to anybody (then it is healed)."""
        if not await self._usable(self._vectors.read):
            return False
        self._follow(self._vectors.sets)
        return True

    def _follow(self, sets: int) -> None:
        """When our vector was replaced by another, begin anew with it."""
        if sets != self._sets:
            self._sets = sets
            self._sum.restart()
            self._outbox.clear()


def _never_arrived(error: TransportError) -> bool:
    """Whether a push that was sent once, and never before, is known not to have been taken."""
    return isinstance(error, PeerRefusedError) or (isinstance(error, PeerUnreachableError) and not error.sent)
