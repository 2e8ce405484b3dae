"""Strom's thresholded updates (Strom 2015, Interspeech) over the transport: pushes to all others.

A push names what its sender wants acknowledged, and the answer what the receiver has (`log`). Up to
`DIRECT_MEMBERS` nodes push straight to all others; more pass messages on along a sparse graph. A node without
a base, or that lacks messages which nobody keeps, takes a member's base first.

In this order below: the messages, bases (`StromSync`), the loop and its pushes (`StromStrategy`).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from p2pdrl.config.strategy import Mode, StromConfig
from p2pdrl.errors import PeerTimeoutError, PoisonedVectorError, TensorError, TransportError, WireError
from p2pdrl.group.compatibility import Natural, Short, Summary, Verdict
from p2pdrl.strategies.admission import ExchangeAdmission
from p2pdrl.strategies.call_timeouts import failed
from p2pdrl.strategies.offload import Arithmetic
from p2pdrl.strategies.protocol import Merged, RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.relay.log import MAX_ORIGINS, History, MessageRun, UpdateOrigin
from p2pdrl.strategies.relay.state import Absorbed, GivenBase, StromMember
from p2pdrl.strategies.task_runner import OutcomeMetrics, TaskRunner
from p2pdrl.strategies.topology import neighbours
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Answer, Incoming, Refusal, Reply, VectorBuffer

__all__ = ["DIRECT_MEMBERS", "RelayPush", "RunHead", "StromStrategy", "StromSync", "cut_runs"]

# --- messages --------------------------------------------------------------------------------------

ROUTE = "relay"
MAX_MESSAGES = 256
"""Messages of one push, over all origins."""

Id = Annotated[str, Meta(max_length=32)]
Known = Annotated[list[tuple[Id, Id, Natural]], Meta(max_length=MAX_ORIGINS + 1)]
"""(node, boot, last number that one's parameters contain)."""


class RunHead(msgspec.Struct, frozen=True, array_like=True):
    """Messages of one origin in a row."""

    node: Id
    boot: Id
    first: Natural
    oldest: Natural
    sizes: Annotated[tuple[Natural, ...], Meta(max_length=MAX_MESSAGES)]
    """Bytes of each; none says that the sender has lost what comes before ``oldest``."""


class RelayPush(msgspec.Struct, frozen=True, tag="push"):
    """Goes before the messages that a vector carries, one after another; there may be none."""

    summary: Summary
    history: History
    tau: float
    runs: Annotated[tuple[RunHead, ...], Meta(max_length=MAX_ORIGINS + 1)] = ()
    asks: Annotated[tuple[tuple[Id, Id], ...], Meta(max_length=MAX_ORIGINS + 1)] = ()
    """Origins of which the sender wants to know what the receiver has."""


class BaseRequest(msgspec.Struct, frozen=True, tag="ask"):
    """Give me your base."""

    summary: Summary
    boot: Id
    oldest: Natural
    """The oldest message of its own that the sender keeps."""
    history: History | None = None
    have: Known = []
    urgent: bool = False
    """It has asked for a while: a member that lacks what the sender has begins a greater history."""
    probe: bool = False
    """Only say which history you have."""


Call = RelayPush | BaseRequest


class RelayPushed(msgspec.Struct, frozen=True, tag="pushed"):
    """What became of a push."""

    summary: Summary
    verdict: Short = "mix"
    history: History | None = None
    """None: the receiver has no base yet."""
    have: Known = []


class BaseState(msgspec.Struct, frozen=True, tag="state"):
    """Goes before a base, as float32."""

    summary: Summary
    history: History
    have: Known


class Asked(msgspec.Struct, frozen=True, tag="asked"):
    """No base, or not now."""

    summary: Summary
    verdict: Short = "mix"
    history: History | None = None
    """None: there is none here."""


def run_head(run: MessageRun) -> RunHead:
    """What goes before a run's messages."""
    sizes = tuple(len(message) for message in run.messages)
    return RunHead(run.origin.node, run.origin.boot, run.first, run.oldest, sizes)


def cut_runs(heads: tuple[RunHead, ...], vector: memoryview) -> list[MessageRun] | None:
    """Cut a push's vector into its messages; None when the lengths don't fit."""
    runs, at = [], 0
    for head in heads:
        messages = []
        for size in head.sizes:
            messages.append(bytes(vector[at : at + size]))
            at += size
        runs.append(MessageRun(UpdateOrigin(head.node, head.boot), head.first, tuple(messages), head.oldest))
    return runs if at == len(vector) else None


def known_of(have: Mapping[UpdateOrigin, int]) -> Known:
    """As messages carry it."""
    return [(origin.node, origin.boot, number) for origin, number in have.items()]


def origins_of(known: Known) -> dict[UpdateOrigin, int]:
    """What a message says that a member has."""
    return {UpdateOrigin(node, boot): number for node, boot, number in known}


async def call_member(
    context: StrategyContext,
    address: Address,
    peer: str,
    call: Call,
    *,
    vector: memoryview | None = None,
    into: VectorBuffer | None = None,
    deadline_s: float,
) -> Answer:
    """Make one call."""
    meta = msgspec.msgpack.encode(call)
    return await context.transport.call(
        address, peer, ROUTE, meta, vector=vector, into=into, deadline_s=deadline_s, lane="bulk"
    )


# --- bases -----------------------------------------------------------------------------------------

FIRST_PAUSE_S = 0.05
MOST_PAUSE_S = 1.0
URGENT_AFTER = 6
"""Rounds of asking, with growing pauses: about two seconds."""
SILENT_AFTER = 3
"""Rounds of asking after which those who don't answer are no longer waited for."""
STATE_DEADLINE_S = 30.0
"""Longest time for a base; it begins with the strategy's deadline and doubles when that wasn't enough."""

Heard = Literal["taken", "wait", "failed"]


class StromSync:
    """Asks for bases, and gives them.

    Attributes:
        hint: who is known to have a base that we need.
        taken: bases so far.
    """

    def __init__(
        self, config: StromConfig, context: StrategyContext, member: StromMember, admission: ExchangeAdmission
    ) -> None:
        self._context, self._member, self._admission = context, member, admission
        self._swarm, self._rng = context.swarm, random.Random(context.rng.getrandbits(64))
        self._first_deadline_s = self._deadline_s = config.deadline_s
        self.hint = ""
        self.taken = 0

    async def run(self) -> None:
        """Ask until we are in step."""
        rounds = 0
        while not self._member.in_step:
            if self._swarm.summary() is not None and await self._round(rounds):
                return
            rounds += 1
            pause_s = min(FIRST_PAUSE_S * 2.0**rounds, MOST_PAUSE_S)
            await asyncio.sleep(self._rng.uniform(0.5, 1.0) * pause_s)

    async def _round(self, rounds: int) -> bool:
        """Ask everybody who has a base, then one of them for it."""
        living = self._swarm.alive()
        peers = sorted(living)
        answers = await asyncio.gather(*(self._probe(peer, living[peer]) for peer in peers))
        got = dict(zip(peers, answers, strict=True))
        histories = {peer: one.history for peer, one in got.items() if one is not None and one.history}
        if histories:
            best = [peer for peer in peers if histories.get(peer) == max(histories.values())]
            giver = self.hint if self.hint in best else self._rng.choice(best)
            heard = await self._ask(giver, living[giver], urgent=rounds >= URGENT_AFTER)
            self.hint = giver if heard == "wait" else ""
            return heard == "taken"
        silent = [peer for peer in peers if got[peer] is None]
        if silent and rounds < SILENT_AFTER:
            return False
        if any(peer < self._swarm.node_id for peer in peers if got[peer] is not None):
            return False
        history = self._member.log.history
        await self._member.found(era=0 if history is None else history.era + 1)
        return True

    async def _probe(self, peer: str, address: Address) -> Asked | None:
        """Ask which history a peer has; None when it doesn't say, or can't be mixed with."""
        mine = self._swarm.summary()
        if mine is None:
            return None
        try:
            probe = BaseRequest(mine, self._member.log.own.boot, 0, probe=True)
            answer = await call_member(self._context, address, peer, probe, deadline_s=self._first_deadline_s)
            got: Asked = decode(answer.meta, Asked, "answer of a member")
        except (TransportError, TensorError):
            return None
        return got if self._admission.heard(peer, mine, got.summary, got.verdict) == "ok" else None

    async def _ask(self, peer: str, address: Address, *, urgent: bool) -> Heard:
        """Ask a peer for its base, and take it."""
        mine, log = self._swarm.summary(), self._member.log
        if mine is None:
            return "failed"
        ask = BaseRequest(mine, log.own.boot, log.oldest_own, log.history, known_of(log.have), urgent)
        base: Float32Array = np.empty(self._context.size, np.float32)
        room = base.data.cast("B")
        try:
            answer = await call_member(
                self._context,
                address,
                peer,
                ask,
                into=lambda _, nbytes: room if nbytes == len(room) else None,
                deadline_s=self._deadline_s,
            )
            got: BaseState | Asked = decode(answer.meta, BaseState | Asked, "answer of a member")
            if isinstance(got, Asked):
                return "wait" if got.history is not None else "failed"
            if answer.vector_nbytes != len(room):
                return "failed"
            version = max(mine.policy_version, got.summary.policy_version)
            done = await self._member.take(GivenBase(got.history, origins_of(got.have), base), version)
        except (PoisonedVectorError, WireError) as error:
            self._swarm.strike(peer, str(error))
            return "failed"
        except (TransportError, TensorError) as error:
            if isinstance(error, PeerTimeoutError):
                self._deadline_s = min(2 * self._deadline_s, max(STATE_DEADLINE_S, self._deadline_s))
            return "failed"
        self.taken += 1
        return "taken" if done else "failed"

    async def answer(self, sender: str, ask: BaseRequest) -> Reply:
        """Give our base.

        Raises:
            Refusal: see `ExchangeAdmission`; our own numbers are unusable (503).
        """
        mine = self._admission.admit(sender, stopping=False)
        verdict = self._admission.judge(sender, mine, ask.summary)
        log = self._member.log
        if ask.probe or verdict is not Verdict.MIX or not self._member.in_step or log.history is None:
            history = log.history if self._member.in_step else None
            return Reply(msgspec.msgpack.encode(Asked(mine, verdict.value, history)))
        if not log.contains(ask.history, origins_of(ask.have), UpdateOrigin(sender, ask.boot), ask.oldest):
            if not ask.urgent:
                return Reply(msgspec.msgpack.encode(Asked(mine, history=log.history)))
            await self._member.found(era=log.history.era + 1)
        try:
            given = await self._member.give()
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")
            raise Refusal(503, "our own numbers are unusable") from error
        if given is None:
            return Reply(msgspec.msgpack.encode(Asked(mine)))
        state = BaseState(mine, given.history, known_of(given.have))
        return Reply(msgspec.msgpack.encode(state), vector=given.base.data.cast("B"))


# --- the loop --------------------------------------------------------------------------------------

DIRECT_MEMBERS = 16
DEGREE = 4
POLL_S = 0.1
LEAST_SLEEP_S = 1e-3
ALONE_S = 2.0
GAP_S = 1.0
"""With relays, messages that one neighbour has lost may come from another one within this time."""
BATCH_BYTES = 1 << 20
FIRST_REST_S = 0.1
MOST_DOUBLINGS = 5


class StromStrategy(Strategy):
    """Strom's updates over the transport; see `Strategy`.

    Args:
        direct_members: up to so many nodes push straight to all others.
        window_bytes: see `StromMember`.
    """

    mode: Mode = "gossip"

    def __init__(
        self,
        config: StromConfig,
        context: StrategyContext,
        *,
        direct_members: int = DIRECT_MEMBERS,
        window_bytes: int | None = None,
    ) -> None:
        self._direct_members = direct_members
        self._config, self._context = config, context
        self._me, self._swarm, self._clock = context.swarm.node_id, context.swarm, context.clock
        self._arithmetic = Arithmetic(4 * context.size)
        self._member = StromMember(config, context, self._arithmetic, window_bytes)
        self._admission = ExchangeAdmission(context.swarm, context.epoch, config.max_staleness)
        self._sync = StromSync(config, context, self._member, self._admission)
        self._outcomes, self._runner = OutcomeMetrics(context.swarm), TaskRunner()
        self._most_bytes = max(BATCH_BYTES, self._member.state.max_nbytes)
        self._gaps_s: dict[str, float] = {}
        """Since when messages are missing that a peer has lost, too."""
        self._updates = self._all_updates = 0
        self._next_s = 0.0
        self._met_s: float | None = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._rests: dict[str, tuple[int, float]] = {}
        self._start_at_members = context.start_at_members

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²), as if all residuals were as long as ours."""
        nodes = len(self._swarm.alive()) + 1
        if not self._member.messages or nodes < 2:
            return None
        return self._member.state.residual_norm * math.sqrt(1.0 - 1.0 / nodes)

    @property
    def residual(self) -> Float32Array:
        """What of our learner's progress was told to nobody yet; the rest of its vector is the base."""
        return self._member.state.residual

    @property
    def history(self) -> History | None:
        """The history that our base belongs to; None before we have one."""
        return self._member.log.history

    @property
    def outcomes(self) -> dict[str, int]:
        """Messages so far: ``pushed`` and ``answered`` (came and were new); ``known`` (nothing was new).

        Failed: ``timeout refused failed unsure busy poisoned``; ``behind`` and ``ahead``: one side's
        state or base is being taken by the other.
        """
        return self._outcomes.outcomes

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures for people; the compression ratio is that of a float32 vector for each update."""
        member, updates = self._member, max(self._all_updates, 1)
        per_update = member.sent_bytes / updates
        vector_bytes = 4 * self._context.size
        return {
            "tau": member.state.tau,
            "residual_norm": member.state.residual_norm,
            "messages": member.messages,
            "entries_per_message": member.entries / max(member.messages, 1),
            "bytes_per_update": per_update,
            "compression_ratio": vector_bytes / per_update if per_update else 0.0,
            "kept_bytes": member.log.kept_bytes,
            "in_step": "yes" if member.in_step else "no",
            "bases_taken": self._sync.taken,
            "relay": "yes" if self._relay else "no",
        }

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run())

    async def stop(self, timeout_s: float) -> None:
        """End everything; messages under way may or may not count, by what the receivers say."""
        self._runner.stopping = True
        if timeout_s > 0 and self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=min(timeout_s, 0.5))
        await self._runner.stop(timeout_s)
        await self._arithmetic.close()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    def updated(self, updates: int) -> None:
        """The learner made ``updates`` more updates."""
        self._updates += updates
        self._all_updates += updates
        self._runner.news.set()

    @property
    def _relay(self) -> bool:
        return len(self._swarm.alive()) + 1 > self._direct_members

    async def _run(self) -> None:
        while not self._runner.stopping:
            living, now_s = self._swarm.alive(), self._clock.monotonic()
            ready = len(living) + 1 >= self._start_at_members and self._swarm.summary() is not None
            if ready:
                self._start_at_members = 0
                await self._turn(living, now_s)
            wait_s = self._next_s - now_s if self._updates >= self._config.every_updates else POLL_S
            if 0 < wait_s < POLL_S:
                await asyncio.sleep(max(wait_s, LEAST_SLEEP_S))  # updates meanwhile don't make it earlier
            else:
                await self._runner.rest(POLL_S)

    async def _turn(self, living: dict[str, Address], now_s: float) -> None:
        if living or self._met_s is None:
            self._met_s = now_s
        alone = not living and now_s - self._met_s > ALONE_S
        if self._updates >= self._config.every_updates and now_s >= self._next_s:
            self._updates, self._next_s = 0, now_s + self._config.min_interval_s
            try:
                await self._member.contribute(tell=bool(living), fold=alone)
            except PoisonedVectorError as error:
                self._swarm.heal(f"our own parameters are unusable: {error}")
                return
        if not self._member.in_step:
            self._spawn("", self._take_base())
            return
        log, relay = self._member.log, self._relay
        targets = set(living)
        if relay:
            targets = set(neighbours("random_regular", self._me, {*living, self._me}, degree=DEGREE))
        log.forget(living)
        for peer in sorted(targets):
            rested = self._rests.get(peer, (0, 0.0))[1] <= now_s
            if rested and peer not in self._tasks and log.has_for(peer, relay=relay):
                self._spawn(peer, self._push(peer, living[peer], relay=relay))

    def _spawn(self, name: str, work: Coroutine[None, None, None]) -> None:
        """Do one thing at a time with each peer; and take one base at a time."""
        if name in self._tasks or self._runner.stopping:
            work.close()
            return
        task = self._tasks[name] = self._runner.beside(work)

        def ended(_: asyncio.Task[None]) -> None:
            del self._tasks[name]
            self._runner.news.set()

        task.add_done_callback(ended)

    async def _take_base(self) -> None:
        try:
            await self._sync.run()
        except PoisonedVectorError as error:
            self._swarm.heal(f"our own parameters are unusable: {error}")

    async def _push(self, peer: str, address: Address, *, relay: bool) -> None:
        went_well = await self._send(peer, address, relay=relay)
        failures = 0 if went_well else self._rests.get(peer, (0, 0.0))[0] + 1
        rest_s = self._config.min_interval_s
        if failures:
            rest_s = max(rest_s, FIRST_REST_S * 2.0 ** min(failures, MOST_DOUBLINGS))
        self._rests[peer] = (failures, self._clock.monotonic() + rest_s)

    # Pushes

    async def _send(self, peer: str, address: Address, *, relay: bool) -> bool:
        """Send a peer what it lacks; False when it is better left alone for a while."""
        mine, log, began_s = self._swarm.summary(), self._member.log, self._clock.monotonic()
        if mine is None or log.history is None:
            return False
        runs = log.runs_for(peer, relay=relay, most_bytes=self._most_bytes, most=MAX_MESSAGES)
        vector = memoryview(b"".join(message for run in runs for message in run.messages))
        asks = tuple((origin.node, origin.boot) for origin in log.origins(relay=relay))
        head = RelayPush(
            mine, log.history, self._member.state.tau, tuple(run_head(run) for run in runs), asks
        )
        report = RoundReport("failed", missing=(peer,), bytes_out=len(vector), round_trips=1)
        try:
            answer = await call_member(
                self._context, address, peer, head, vector=vector or None, deadline_s=self._config.deadline_s
            )
            pushed: RelayPushed = decode(answer.meta, RelayPushed, "answer of a member")
            report = self._heard(peer, mine, head, pushed, report)
        except (TransportError, TensorError) as error:
            report = failed(report, error)
        if report.outcome != "pushed" or vector:
            self._outcomes.ended(replace(report, seconds=self._clock.monotonic() - began_s))
        return report.outcome == "pushed"

    def _heard(
        self, peer: str, mine: Summary, head: RelayPush, pushed: RelayPushed, report: RoundReport
    ) -> RoundReport:
        """Say what an answer means."""
        heard = self._admission.heard(peer, mine, pushed.summary, pushed.verdict)
        if heard != "ok":
            return replace(report, outcome=heard, error=f"it answered {pushed.verdict}")
        if pushed.history is None:
            return replace(report, outcome="ahead", error="it has no base yet")
        if pushed.history != head.history:
            if pushed.history > head.history:
                self._outranked(peer, pushed.history)
                return replace(report, outcome="behind", error="it has a greater history")
            return replace(report, outcome="ahead", error="it takes a base of our history first")
        self._member.log.known(peer, origins_of(pushed.have))
        staleness = mine.policy_version - pushed.summary.policy_version
        merged = (Merged(self._me, 0.5), Merged(peer, 0.5, staleness))  # both count alike
        return replace(report, outcome="pushed", merged=merged, missing=())

    def _outranked(self, peer: str, history: History) -> None:
        """Somebody has a greater history: take its base."""
        log = self._member.log
        if log.history is None or history > log.history:
            self._member.in_step, self._sync.hint = False, peer

    async def _take_push(self, incoming: Incoming, push: RelayPush) -> Reply:
        """Add what is new to our parameters."""
        sender, member, relay, began_s = incoming.sender, self._member, self._relay, self._clock.monotonic()
        mine = self._admission.admit(sender, stopping=False)
        verdict = self._admission.judge(sender, mine, push.summary)
        if verdict is not Verdict.MIX:
            return Reply(msgspec.msgpack.encode(RelayPushed(mine, verdict.value)))
        if push.tau != member.state.tau:
            raise Refusal(409, f"this node's tau is {member.state.tau:g}, not {push.tau:g}")
        self._outranked(sender, push.history)
        history = member.log.history if member.in_step else None
        if history is None or push.history < history:
            return Reply(msgspec.msgpack.encode(RelayPushed(mine, history=history)))
        absorbed = await self._absorb(incoming, push, relay=relay)
        self._note_gap(sender, absorbed.gap, relay=relay)
        if incoming.vector_nbytes:
            merged = Merged(sender, 0.5, mine.policy_version - push.summary.policy_version)
            report = RoundReport(
                "answered" if absorbed.messages else "known",
                merged=(Merged(self._me, 0.5), merged) if absorbed.messages else (),
                bytes_in=incoming.vector_nbytes,
                changed=absorbed.changed,
                seconds=self._clock.monotonic() - began_s,
            )
            self._outcomes.ended(report, ours=False)
        history = member.log.history if member.in_step else None
        asked = member.log.covers(UpdateOrigin(node, boot) for node, boot in push.asks)
        return Reply(msgspec.msgpack.encode(RelayPushed(mine, history=history, have=known_of(asked))))

    async def _absorb(self, incoming: Incoming, push: RelayPush, *, relay: bool) -> Absorbed:
        if incoming.vector_nbytes > self._most_bytes:
            raise Refusal(422, f"more than {self._most_bytes} bytes at once")
        vector = memoryview(bytearray(incoming.vector_nbytes))
        if vector:
            await incoming.read_vector_into(vector)
        runs = cut_runs(push.runs, vector)
        if runs is None:
            raise Refusal(400, "the messages' lengths don't add up")
        try:
            return await self._member.absorb(runs, push.summary.policy_version, relay=relay)
        except WireError as error:
            self._swarm.strike(incoming.sender, str(error))
            raise Refusal(422, f"a message can't be: {error}") from error

    def _note_gap(self, sender: str, gap: bool, *, relay: bool) -> None:
        """Messages that nobody keeps are missing: take a base."""
        if not gap:
            self._gaps_s.pop(sender, None)
            return
        now_s = self._clock.monotonic()
        since_s = self._gaps_s.setdefault(sender, now_s)
        if not relay or now_s - since_s > GAP_S:
            self._gaps_s.clear()
            self._member.in_step, self._sync.hint = False, sender

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a member's call.

        Raises:
            Refusal: another mode epoch, route or τ (409), no state (503), malformed (400), messages that
                can't be (422), quarantined (403).
        """
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node's strategy is strom, which has no {incoming.route}")
        call: Call = decode(incoming.meta, Call, "call of a member")
        if self._runner.stopping:
            raise Refusal(503, "the strategy stops")
        if isinstance(call, BaseRequest):
            return await self._sync.answer(incoming.sender, call)
        return await self._take_push(incoming, call)
