"""Stochastic gradient push over the transport: the I/O around `push_sum` and `core`.

The board holds z; this node stands for w·z. A push is one-sided: it needs no answer but the receipt, so
directed graphs do, and nobody waits for a partner. Its mass is set aside until its fate is known: a push
that wasn't answered goes out again under its number, the same bytes, until it is acknowledged or refused
for good, or its peer is dead.

What isn't kept: a node that dies takes its w·z along, and what is under way to it; one that joins brings
w = 1 and the z it adopted, and so does one that adopts a state later. A learner's update counts as made at
z: Σ w·z moves by w times the update. With ``mixing = "clipped"`` the part of a step that is cut off is lost.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec

from p2pdrl.config.strategy import SgpConfig
from p2pdrl.errors import (
    P2PDRLError,
    PeerRefusedError,
    PeerUnreachableError,
    PoisonedVectorError,
    TensorError,
    TransportError,
)
from p2pdrl.ids import new_exchange_id
from p2pdrl.strategies.asynchronous import AsynchronousStrategy
from p2pdrl.strategies.calling import outcome_of, unready
from p2pdrl.strategies.judgement import Summary, Verdict
from p2pdrl.strategies.pairwise.pair import Bounds, Step, pair_report
from p2pdrl.strategies.protocol import Context, RoundReport
from p2pdrl.strategies.push.arrivals import Arrivals
from p2pdrl.strategies.push.core import PushCore
from p2pdrl.strategies.push.messages import PushAnswer, PushHead, decode_push_answer, decode_push_head
from p2pdrl.strategies.push.outbox import Outbox, Unsettled
from p2pdrl.strategies.push.push_sum import Arrival, Parcel, PushSum
from p2pdrl.strategies.push.vectors import PushVectors
from p2pdrl.tensors.wire import WireDtype
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["ROUTE", "SgpStrategy"]

ROUTE = "push"
ARRIVING = 2
"""Pushes that are read at once; more are refused."""


class SgpStrategy(AsynchronousStrategy[PushCore]):
    """Push-sum gossip; see `Strategy`.

    Outcomes of our pushes: ``pushed`` (arrived), ``busy refused failed`` (taken back), ``behind`` and
    ``ahead`` (somebody adopts), ``timeout unsure`` (sent again later), ``lost`` (the peer died first). Of
    those that came: ``ok``, ``unchanged``, ``poisoned``.
    """

    DONE = "pushed"

    def __init__(self, config: SgpConfig, context: Context) -> None:
        self._wire: WireDtype = "float32" if config.compression == "none" else "bf16"
        clip = config.clip_distance if config.mixing == "clipped" else None
        bounds = Bounds(context.max_abs, config.max_distance, clip)
        self._vectors = PushVectors(context.learner.board, context.size, self._wire, bounds)
        core = PushCore(config, context.swarm.node_id, context.rng)
        super().__init__(config, context, core, self._vectors.nbytes)
        self._config = config
        self._sum = PushSum()
        self._boot = new_exchange_id()
        self._sets = self._board.sets
        self._outbox = Outbox(self._vectors.nbytes)
        self._arriving = Arrivals(self._vectors.nbytes, ARRIVING)
        self._books = asyncio.Lock()

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
        await self._deliver(push_due, alive[push_due.parcel.peer])
        return True

    async def _new_push(self, alive: dict[str, Address], now_s: float) -> Unsettled | None:
        """Begin a push if one is due; None when there is none to begin."""
        summary = self._swarm.summary()
        if summary is None or not self._outbox.room or not self._may_begin(now_s, len(alive) + 1):
            return None
        peer = self._core.choose(alive, now_s, without=self._outbox.peers)
        if peer is None:
            return None
        self._core.began(now_s)
        buffer = self._outbox.buffer()
        async with self._books:
            readable = await self._read()
            parcel = self._sum.send(peer, self._config.share) if readable else None
            if parcel is not None and not await self._pack(parcel, buffer):
                self._sum.returned(parcel.number)
                readable = False
            if not readable:
                self._tally.ended(RoundReport("failed", error="our own parameters are unusable"))
            if parcel is None or not readable:
                self._outbox.give_back(buffer)
                return None
            push = Unsettled(parcel, summary, buffer)
            self._outbox.add(push)
        return push

    async def _pack(self, parcel: Parcel, buffer: memoryview) -> bool:
        """Write what was read for a peer; False when no peer would take it (then it is healed)."""
        try:
            await self._heavy.run(lambda: self._vectors.pack(buffer, parcel.mass / parcel.left))
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            return False
        return True

    async def _deliver(self, push: Unsettled, address: Address) -> None:
        """Send a push once, and do what its answer asks for."""
        began_s = self._clock.monotonic()
        peer, attempts = push.parcel.peer, push.attempts
        push.attempts += 1
        report = RoundReport("unsure", missing=(peer,), bytes_out=self._vectors.nbytes, round_trips=1)
        known = False
        try:
            answer = await self._call(push, address)
            if answer is None or answer.number != push.parcel.number:
                report = replace(report, error="the answer can't be read")
            else:
                known = True
                report = await self._answered(push, answer, report)
        except TransportError as error:
            report = replace(report, outcome=outcome_of(error), error=str(error), unready=unready(error))
            if not attempts and _never_arrived(error):
                known = True
                await self._take_back(push)
        if known:
            self._outbox.settle(push)
        else:
            self._outbox.unknown(push, self._clock.monotonic())
        self._ended(peer, report, began_s)

    async def _call(self, push: Unsettled, address: Address) -> PushAnswer | None:
        head = PushHead(
            boot=self._boot,
            number=push.parcel.number,
            wire=self._wire,
            summary=push.summary,
            mass=push.parcel.mass,
        )
        answer = await self._transport.call(
            address,
            push.parcel.peer,
            ROUTE,
            msgspec.msgpack.encode(head),
            vector=push.message,
            deadline_s=self._deadline.seconds,
            lane="bulk",
        )
        return decode_push_answer(answer.meta)

    async def _answered(self, push: Unsettled, answer: PushAnswer, report: RoundReport) -> RoundReport:
        """The peer says what became of a push."""
        if answer.result == "taken":
            self._sum.acknowledged(push.parcel.number)
            return replace(report, outcome="pushed", missing=())
        await self._take_back(push)
        heard = self._door.heard(push.parcel.peer, push.summary, answer.summary, answer.verdict)
        outcome = "refused" if heard in ("ok", "failed") else heard
        return replace(report, outcome=outcome, error="it didn't take the push")

    async def _take_back(self, push: Unsettled) -> None:
        """A push came to nothing: its mass and what it stands for are ours again."""
        async with self._books:
            readable = await self._read()
            factor = self._sum.returned(push.parcel.number)
            if readable and factor:
                await self._heavy.run(lambda: self._vectors.regain(push.message, factor))

    def _lose(self, push: Unsettled) -> None:
        self._sum.lost(push.parcel.number)
        self._outbox.settle(push)
        error = "the peer died before it answered"
        self._tally.ended(RoundReport("lost", missing=(push.parcel.peer,), error=error))

    # --- what comes -------------------------------------------------------------------------------

    async def answer(self, incoming: Incoming) -> Reply:
        """Take a peer's push, once.

        Raises:
            Refusal: too many at once (423), no state yet (503), another task or mode (409), poisoned (422),
                quarantined (403), malformed (400), late (408). The push is void then, whenever it comes.
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is sgp, which has no {incoming.route}")
        head = decode_push_head(incoming.meta)
        if head is None:
            raise Refusal(400, "the push's head can't be read")
        arrival = Arrival(incoming.sender, head.boot, head.number)
        try:
            return await self._receive(incoming, head, arrival)
        except P2PDRLError:  # a refusal, or a vector that was cut off
            self._sum.refuse(arrival)
            raise

    async def _receive(self, incoming: Incoming, head: PushHead, arrival: Arrival) -> Reply:
        mine = self._door.admit(incoming.sender, stopping=self._runner.stopping)
        if self._sum.result(arrival) != "new":
            return self._reply(mine, arrival)
        verdict = self._door.judge(incoming.sender, mine, head.summary)
        if verdict is not Verdict.MIX:
            return self._reply(mine, arrival, verdict)
        same = head.wire == self._wire and head.content == "parameters"
        if not same or incoming.vector_nbytes != self._vectors.nbytes or not self._sum.acceptable(head.mass):
            raise Refusal(422, "the push has another format, length or weight than can be")
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
            async with self._books:
                if self._sum.result(arrival) != "new":
                    return None  # another copy of it was quicker
                if not await self._read():
                    return Refusal(503, "our own parameters are unusable; taking a donor's")
                factor = self._sum.factor(head.mass)
                version = max(mine.policy_version, head.summary.policy_version)
                step = await self._heavy.run(lambda: self._vectors.merge(message, factor, version))
                if step is None:
                    return Refusal(503, "our vector was replaced meanwhile")
                self._sum.take(arrival, head.mass)
        except PoisonedVectorError as error:
            self._swarm.strike(arrival.sender, str(error))
            return Refusal(422, f"poisoned vector: {error}")
        except Refusal as refusal:
            return refusal
        finally:
            self._arriving.give(message)
        self._merged(step, arrival.sender, mine.policy_version - head.summary.policy_version, began_s)
        return None

    def _merged(self, step: Step, peer: str, staleness: int, began_s: float) -> None:
        self._tally.met(step.distance)
        took_s = self._clock.monotonic() - began_s
        report = RoundReport("ok", seconds=took_s, bytes_in=self._vectors.nbytes)
        self._tally.ended(pair_report(report, self._swarm.node_id, peer, step, staleness), ours=False)

    # --- what we hold -----------------------------------------------------------------------------

    async def _read(self) -> bool:
        """Take our vector off the board; False when it can't be given to anybody (then it is healed)."""
        try:
            await self._heavy.run(self._vectors.read)
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            return False
        except TensorError:
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
