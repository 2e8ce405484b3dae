"""Gossiping actor-learners (GALA; Assran 2019, arXiv 1906.04585, Algorithm 1): pushes that nobody waits for.

Node i, with out-peers on a directed graph:

    x_i ← x_i − γ g_i                                      its learner's update
    send x_i to each out-peer, without waiting             each gets the newest
    x_i ← (x_i + Σ_{j ∈ in} x_j) / (1 + |in|)              over the in-peers whose vectors have come since

The paper mixes once every in-peer has sent, and bounds the nodes' distance while no vector is older than τ
updates. Here nobody waits: a node mixes with what has come, and what lags more than τ (``max_lag``) policy
versions is left out; the bound says nothing of a node all of whose in-peers lag that far.

In this order below: the receive buffer (`GalaInbox`), our parameters (`OwnVector`), the average
(`GalaQuantity`), pushes to nodes that have no in-peers (`RelayedPushes`, an extension), the loop
(`GalaStrategy`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np

from p2pdrl.config.strategy import Content, GalaConfig
from p2pdrl.errors import PoisonedVectorError, TransportError, WireError
from p2pdrl.group.compatibility import Verdict
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.call_timeouts import failed
from p2pdrl.strategies.clipping_radius import ClippingRadius
from p2pdrl.strategies.feedback import FeedbackEncoder
from p2pdrl.strategies.gossip.asynchronous import AsynchronousStrategy
from p2pdrl.strategies.gossip.pair_average import WireName
from p2pdrl.strategies.gossip.push import BufferPool, PushAnswer, PushCore, PushHead
from p2pdrl.strategies.neighbours.mixing import round_delta
from p2pdrl.strategies.protocol import Merged, RoundReport, StrategyContext
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.transport import codec
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = [
    "ASK_AFTER",
    "MOST_IN_PEERS",
    "MOST_RELAYED",
    "RELAYED",
    "ROUTE",
    "GalaInbox",
    "GalaQuantity",
    "GalaStrategy",
    "OwnVector",
    "RelayedPushes",
]

ROUTE = "push"

# --- the receive buffer -----------------------------------------------------------------------------

MOST_IN_PEERS = 16
"""In-peers whose vectors are kept at once; each costs D float32."""


@dataclass(slots=True)
class ReceivedVector:
    """An in-peer's latest vector, its push, and its length on the wire."""

    peer: str
    vector: Float32Array
    boot: str = ""
    number: int = -1
    policy_version: int = 0
    nbytes: int = 0
    fresh: bool = False
    """Whether it waits to be averaged."""


class GalaInbox:
    """The receive buffer: the latest vector, of ``size`` entries, of each in-peer."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._received: dict[str, ReceivedVector] = {}

    @property
    def any_fresh(self) -> bool:
        """Whether a vector waits to be averaged."""
        return any(received.fresh for received in self._received.values())

    def known(self, peer: str, boot: str, number: int) -> bool:
        """Whether this push, or a later one of the peer's boot, was here."""
        received = self._received.get(peer)
        return received is not None and received.boot == boot and number <= received.number

    def open(self, peer: str) -> ReceivedVector | None:
        """Return where to write the peer's vector; call `seal` when it is good.

        None when there are too many in-peers, all of whose vectors wait.
        """
        received = self._received.get(peer)
        if received is None:
            vector = self._vacant()
            if vector is None:
                return None
            received = self._received[peer] = ReceivedVector(peer, vector)
        received.fresh = False
        return received

    def seal(self, received: ReceivedVector, head: PushHead, nbytes: int) -> None:
        """What was written is good: it waits to be averaged."""
        received.boot, received.number, received.nbytes = head.boot, head.number, nbytes
        received.policy_version = head.summary.policy_version
        received.fresh = True

    def take(self, policy_version: int, max_lag: int) -> tuple[list[ReceivedVector], tuple[str, ...]]:
        """Take all that waits.

        Args:
            policy_version: ours.
            max_lag: τ, policy versions.

        Returns:
            What to average, by peer, and the peers that lag more than τ. Neither waits any longer.
        """
        good: list[ReceivedVector] = []
        late: list[str] = []
        for peer, received in sorted(self._received.items()):
            if received.fresh and policy_version - received.policy_version <= max_lag:
                good.append(received)
            elif received.fresh:
                late.append(peer)
            received.fresh = False
        return good, tuple(late)

    def clear(self) -> None:
        """Average none of what waits: our own vector was replaced."""
        for received in self._received.values():
            received.fresh = False

    def _vacant(self) -> Float32Array | None:
        if len(self._received) < MOST_IN_PEERS:
            return np.zeros(self._size, np.float32)
        for peer, received in self._received.items():
            if not received.fresh:
                return self._received.pop(peer).vector
        return None


# --- our own parameters -------------------------------------------------------------------------------


class OwnVector:
    """A copy of the parameters on the board."""

    def __init__(self, board: DaemonBoard, size: int) -> None:
        self._board = board
        self.sets = board.sets
        """Sets on the board when it was last read."""
        self._followed = board.sets
        self.vector: Float32Array = np.zeros(size, np.float32)
        self.policy_version = 0

    def read(self) -> None:
        """Copy the vector as it is now.

        Raises:
            TensorError: there is none, or it can't be read now.
        """
        snapshot = self._board.now(self.vector)
        self.sets, self.policy_version = snapshot.sets, snapshot.policy_version

    def add(self, delta: Float32Array, policy_version: int) -> bool:
        """Move the learner's vector by ``delta``; False when it was replaced since `read`."""
        return self._board.post_delta(delta, policy_version, sets=self.sets)

    def replaced(self) -> bool:
        """Whether it was replaced by another since the last time this was asked."""
        before, self._followed = self._followed, self._board.sets
        return before != self._followed


# --- the average ------------------------------------------------------------------------------------

ARRIVING = 4
"""Pushes of one kind that are read at once; more are refused."""


class GalaQuantity:
    """What is averaged, parameters or gradients: its receive buffer, its encoding, its arithmetic."""

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
        self.arrivals = BufferPool(self.encoder.max_nbytes, ARRIVING)
        self._config = config
        self._swarm, self._me = context.swarm, context.swarm.node_id
        self._rule = config.rule(bounded=context.bounded)
        self._radius: ClippingRadius | None = None
        if self._rule == "clipped":
            self._radius = ClippingRadius(
                config.clip_distance, context.clock, gradients=content == "gradients"
            )
        self._max_abs = context.max_abs
        self._delta_D: Float32Array = np.zeros(context.size, np.float32)
        self._own_norm: float | None = None
        self.strikes: list[tuple[str, str]] = []
        """Peers to strike, and why; whoever merged takes them."""

    def check(self, mine_D: Float32Array, sets: int = 0) -> None:
        """Check our own vector, whose norm is the measure of others'.

        Args:
            sets: differs from the last time where it was replaced meanwhile.

        Raises:
            PoisonedVectorError: it holds NaN, infinity or a huge entry.
        """
        mix.check_finite(mine_D, self._max_abs)
        self._own_norm = mix.norm(mine_D)
        if self._radius is not None:
            self._radius.read(mine_D, sets)

    def keep(self, received: ReceivedVector, message: memoryview) -> None:
        """Decode what came.

        Raises:
            WireError: it is malformed.
            PoisonedVectorError: it holds NaN, infinity, a huge entry, or is out of proportion to ours.
        """
        self.encoder.decode(message, received.vector)
        mix.check_finite(received.vector, self._max_abs)
        if self._own_norm is None:
            return
        length, bound = mix.norm(received.vector), self._config.max_distance * (1.0 + self._own_norm)
        if length > bound:
            raise PoisonedVectorError(f"norm {length:.3g} is beyond the bound {bound:.3g}")

    def merge(
        self, mine_D: Float32Array, policy_version: int, write: Callable[[Float32Array, int], bool]
    ) -> RoundReport:
        """Average our vector, which was checked, with what waits.

        Args:
            policy_version: of it.
            write: takes what is to be added, and the newest version in it; False when ours is gone.
        """
        others, late = self.inbox.take(policy_version, self._config.max_lag)
        if not others:
            return RoundReport("stale", missing=late, error="all that came is too old")
        distances = [mix.distance(mine_D, received.vector) for received in others]
        weights = [1.0 / (1 + len(others)) * self._swarm.trust(received.peer) for received in others]
        if self._radius is not None:
            weights = self._clipped(self._radius, mine_D, others, weights)
            pairs = zip((received.vector for received in others), weights, strict=True)
            round_delta(mine_D, list(pairs), out=self._delta_D)
        else:
            combine(
                [mine_D, *(received.vector for received in others)],
                [1.0 - math.fsum(weights), *weights],
                mixing=self._rule,
                trim=self._config.trim,
                out=self._delta_D,
            )
            np.subtract(self._delta_D, mine_D, out=self._delta_D)
        changed = mix.norm(self._delta_D)
        distance = math.sqrt(sum(one**2 for one in distances) / len(distances))
        if not write(self._delta_D, max(policy_version, *(received.policy_version for received in others))):
            return RoundReport("failed", missing=late, error="our vector was replaced meanwhile")
        if self._radius is not None:
            self._radius.added(self._delta_D)
        good = changed > 0 or distance == 0
        parts = [
            Merged(received.peer, weight, policy_version - received.policy_version)
            for received, weight in zip(others, weights, strict=True)
        ]
        return RoundReport(
            "ok" if good else "unchanged",
            merged=(Merged(self._me, 1.0 - math.fsum(weights)), *parts),
            pulls=(0.0, *(weight * apart for weight, apart in zip(weights, distances, strict=True))),
            missing=late,
            bytes_in=sum(received.nbytes for received in others),
            changed=changed,
            distance=distance,
            error="" if good else "they differ, but the step rounds or clips to nothing",
        )

    def _clipped(
        self,
        radius: ClippingRadius,
        mine_D: Float32Array,
        others: Sequence[ReceivedVector],
        weights: Sequence[float],
    ) -> list[float]:
        """Weights after clipping; who is far off again and again is struck once this has ended."""
        counted = []
        for received, weight in zip(others, weights, strict=True):
            apart = mix.distance(mine_D, received.vector)
            figures = mix.PairFigures(self._own_norm or 0.0, 0.0, apart)
            clip = radius.clip(received.peer, mine_D, received.vector, figures)
            counted.append(weight * clip.factor)
            if clip.strike:
                self.strikes.append((received.peer, clip.strike))
        return counted


# --- nodes without in-peers -------------------------------------------------------------------------

ASK_AFTER = 8
"""So many pushes of ours, and nothing that came and was good: we ask."""
RELAYED = 16
"""So many of our pushes also go to a node that asked; and so many more when its answer asks for that."""
MOST_RELAYED = 4
"""So many nodes that asked are pushed to at once; more are refused."""


class RelayedPushes:
    """Pushes beyond the graph: a node that no in-peer pushes to asks others for theirs."""

    def __init__(self, me: str) -> None:
        self._me = me
        self._pushes = 0
        self._came_at: dict[str, int] = {}
        """How many pushes we had made when a push of each peer came."""
        self._came_last = 0
        self._asked, self._asked_last = 0, 0
        self._left: dict[str, int] = {}
        """How many more pushes each node that asked gets."""

    def pushed(self) -> None:
        """We push once more."""
        self._pushes += 1
        self._left = {peer: left - 1 for peer, left in self._left.items() if left > 1}
        self._came_at = {peer: at for peer, at in self._came_at.items() if at + RELAYED > self._pushes}

    def came(self, peer: str) -> None:
        """A push of ``peer`` came, and was good."""
        self._came_at[peer] = self._came_last = self._pushes
        self._asked = 0

    def only(self, peer: str) -> bool:
        """Whether nobody but ``peer`` gave us anything of late."""
        return not self._came_at.keys() - {peer}

    def whom_to_ask(self, alive: Iterable[str]) -> str | None:
        """Whom to ask now for pushes, each time somebody further down the ring of ids; None for nobody."""
        ring = sorted({*alive, self._me})
        if len(ring) < 2 or self._pushes < max(self._came_last, self._asked_last) + ASK_AFTER:
            return None
        step = 1 + self._asked % (len(ring) - 1)
        self._asked, self._asked_last = self._asked + 1, self._pushes
        return ring[ring.index(self._me) - step]

    def accept(self, peer: str) -> bool:
        """``peer`` asks for our pushes; whether it gets them."""
        if peer not in self._left and len(self._left) >= MOST_RELAYED:
            return False
        self._left[peer] = RELAYED
        return True

    def renew(self, peer: str) -> None:
        """``peer`` gets nothing from anybody else: if it asked, it goes on getting our pushes."""
        if peer in self._left:
            self._left[peer] = RELAYED

    @property
    def peers(self) -> set[str]:
        """Who gets our pushes because it asked."""
        return set(self._left)


# --- the loop ---------------------------------------------------------------------------------------

UNDER_WAY = 3
"""Vectors that may be under way at once: a silent out-peer holds one until its deadline."""

_UNUSABLE = RoundReport("failed", error="our own numbers are unusable")


class GalaStrategy(AsynchronousStrategy[PushCore]):
    """GALA over the transport; see `Strategy`.

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
        self._lock = asyncio.Lock()

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        self._unmixed_updates += updates
        super().updated(updates)

    def _beside(self) -> list[Coroutine[Any, Any, None]]:
        requests = [] if self._gradients is None else [self._answer_requests(self._gradients)]
        return [self._average(), *requests]

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
            async with self._lock:
                if await self._read():
                    report = await self._arithmetic.run(
                        lambda: side.merge(own.vector, own.policy_version, own.add)
                    )
            self._strike(side)
            self._averaged(report, began_s)
            if report.distance is not None:
                self._outcomes.met(report.distance)

    async def _answer_requests(self, side: GalaQuantity) -> None:
        """Answer each gradient as it comes; push it when one is wanted."""
        while True:
            request = await self._learner.next_request()
            outcome = "none"
            if request.vector is not None:
                async with self._lock:
                    outcome = await self._average_gradient(side, request.vector, request.policy_version)
            self._learner.answer(request, "add" if outcome == "ok" else "none")

    async def _average_gradient(
        self, side: GalaQuantity, gradient_D: Float32Array, policy_version: int
    ) -> str:
        """Put what in-peers' gradients add to ours in its place; return how that went."""

        def correct(delta_D: Float32Array, _newest: int) -> bool:
            np.copyto(gradient_D, delta_D)
            return True

        began_s = self._clock.monotonic()
        try:
            await self._arithmetic.run(lambda: side.check(gradient_D))
            if self._gradient_wanted:
                await self._arithmetic.run(lambda: side.encoder.encode(gradient_D))
                self._gradient_wanted, self._gradient_ready = False, True
                self._runner.news.set()
        except PoisonedVectorError:
            await self._read()  # one bad gradient is its learner's business, unless the parameters are bad
            return "failed"
        if not side.inbox.any_fresh:
            return "none"
        report = await self._arithmetic.run(lambda: side.merge(gradient_D, policy_version, correct))
        self._strike(side)
        self._averaged(report, began_s)
        return report.outcome

    def _strike(self, side: GalaQuantity) -> None:
        """Strike whom the last average found too far off."""
        strikes, side.strikes = side.strikes, []
        for peer, why in strikes:
            self._swarm.strike(peer, why)

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
        asked = self._core.fit(self._relayed.peers & alive.keys(), now_s)
        peers = {*self._core.choose_all(alive, now_s), *asked}
        if not peers:
            self._gradient_ready = False  # it would be old when somebody is there
        peers -= self._flights.keys()
        if not peers or not self._messages.any_free:
            return False
        self._core.began(now_s)
        await self._push(side, {peer: alive[peer] for peer in sorted(peers)})
        asked_next = None if self._config.partners == "random" else self._relayed.whom_to_ask(alive)
        if asked_next is not None:
            self._runner.beside(self._ask(asked_next, alive[asked_next]))
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
        self._runner.beside(self._give_back(flights, buffer))

    async def _give_back(self, flights: list[asyncio.Task[None]], buffer: memoryview) -> None:
        """Have the buffer back when the last push of it has ended."""
        await asyncio.wait(flights)
        self._messages.give(buffer)

    async def _load(self) -> bool:
        """Encode our parameters; False when they can't be given to anybody."""
        async with self._lock:
            if not await self._read():
                return False
            await self._arithmetic.run(lambda: self._parameters.encoder.encode(self._own.vector))
            return True

    async def _push_to(self, head: PushHead, message: memoryview, peer: str, address: Address) -> None:
        """Push to one peer."""
        began_s = self._clock.monotonic()
        report = RoundReport("unsure", missing=(peer,), bytes_out=len(message), round_trips=1)
        try:
            got = await self._call(address, peer, ROUTE, head, vector=message)
            report = self._pushed(peer, head, codec.decode(got.meta, PushAnswer, "push's answer"), report)
        except TransportError as error:
            report = failed(report, error)
        finally:
            del self._flights[peer]
        self._ended(peer, report, began_s, busy_again=False)

    async def _ask(self, peer: str, address: Address) -> None:
        """Ask for a peer's pushes; when nothing comes of it, the next is asked."""
        summary = self._swarm.summary()
        if summary is None:
            return
        head = PushHead(self._boot, self._number, self._parameters.wire, summary, asks=True)
        meta = msgspec.msgpack.encode(head)
        with contextlib.suppress(TransportError):
            await self._transport.call(address, peer, ROUTE, meta, deadline_s=self._deadline.seconds)

    def _pushed(self, peer: str, head: PushHead, answer: PushAnswer, report: RoundReport) -> RoundReport:
        if answer.number != head.number:
            return replace(report, error="it answered another push")
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
            WireError: the head is malformed.
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is gala, which has no {incoming.route}")
        head: PushHead = codec.decode(incoming.meta, PushHead, "push's head")
        mine = self._admission.admit(incoming.sender, stopping=self._runner.stopping)
        verdict = self._admission.judge(incoming.sender, mine, head.summary)
        if head.asks:
            accepted = verdict is Verdict.MIX and self._relayed.accept(incoming.sender)
            result = PushAnswer(head.number, "taken" if accepted else "void", mine, verdict.value)
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
            async with self._lock:
                if side.inbox.known(sender, head.boot, head.number):
                    return None
                received = side.inbox.open(sender)
                if received is None:
                    return Refusal(BUSY, "too many peers push to this node")
                await self._arithmetic.run(lambda: side.keep(received, message[:nbytes]))
                side.inbox.seal(received, head, nbytes)
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
            self._parameters.check(self._own.vector, self._own.sets)

        if not await self._usable(work):
            return False
        self._follow()
        return True

    def _follow(self) -> None:
        """When our vector was replaced by another, use nothing that came before."""
        if self._own.replaced():
            self._parameters.inbox.clear()
            if self._gradients is not None:
                self._gradients.inbox.clear()
