"""Exact averaging in rounds of the whole group: the strategy around an `Averager` and a `RoundQuantity`.

**When the group changes** everybody who waits is let go, and the round is done again in the new view with
the same parts. Members may differ by one round then: some got all pieces of the last one, others didn't.
The notes say so (`history`); those behind fetch that round's result from one who has it, and all go on with
the same bits. Every member keeps its last result for that.

**Who joins** takes the state first (a member's whole state, by adoption, where rounds are synchronous; else
what the quantity keeps), and gives its part from then on. Meanwhile the others stand still, at most
``deadline_s``: that way the state they give is the one after the last round, exactly.

**A learner that asks for nothing** (paused, starting again) holds the others up once, for `GRACE` of the
deadline. Then its daemon goes on without it, giving nothing, until it asks.

**Nobody's vectors mix across lineages**: members of another one adopt first.
"""

from __future__ import annotations

import asyncio

import msgspec

from p2pdrl.config.strategy import GradAverageConfig, Grouped, Mode, ParamAverageConfig
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.group.service import ROUTE as GROUP_ROUTE
from p2pdrl.group.service import ActiveView, Group
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.allreduce.averager import (
    NOTHING,
    ROUTE,
    Average,
    Averager,
    Backend,
    ReduceAnswer,
    ReduceRequest,
    RoundContribution,
    RoundQuantity,
)
from p2pdrl.strategies.allreduce.catch_up import CatchingUp
from p2pdrl.strategies.allreduce.history import AveragingNote, CatchUpPlan, RoundHistory, make_plan
from p2pdrl.strategies.allreduce.reduce_scatter import AverageMemory, OwnBackend
from p2pdrl.strategies.allreduce.torch_averager import TorchBackend
from p2pdrl.strategies.learner_requests import RequestQueue
from p2pdrl.strategies.offload import through
from p2pdrl.strategies.protocol import LearnerRequest, Merged, RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.task_runner import OutcomeMetrics, TaskRunner
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["GRACE", "GroupRounds"]


GRACE = 0.7
"""Share of the deadline after which a daemon goes on without its learner."""
POLL_S = 0.1
LAST_ROUND_S = 0.5
"""How long `stop` waits for the round under way."""
MOST_POISONED = 3
"""Unusable parts in a row after which a member takes another's state."""


class GroupRounds(Strategy):
    """A strategy whose rounds take the whole group.

    Raises:
        ConfigError: this node can't average over what the options name.
    """

    mode: Mode = "allreduce"

    def __init__(self, config: Grouped, context: StrategyContext, work: RoundQuantity) -> None:
        config = msgspec.structs.replace(config, mixing=config.rule(bounded=context.bounded))
        self._config, self._context, self._work = config, context, work
        self._me, self._swarm, self._clock = context.swarm.node_id, context.swarm, context.clock
        self._group = Group(context.swarm, context.transport, context.clock, context.epoch, self._note)
        self._requests = RequestQueue(context.learner, context.clock, grace_s=GRACE * config.deadline_s)
        self._memory = AverageMemory(config, context.size)
        over_torch = isinstance(config, GradAverageConfig | ParamAverageConfig) and config.backend == "torch"
        make: type[TorchBackend | OwnBackend] = TorchBackend if over_torch else OwnBackend
        self._backend: Backend = make(context, config, self._memory)
        self._history = RoundHistory()
        self._catching_up = CatchingUp(
            context, config, work, history=self._history, requests=self._requests, group=self._group
        )
        self._averager: Averager | None = None
        self._said = AveragingNote()
        self._distance: float | None = None
        self._poisoned = 0
        self._given_in: tuple[ViewKey, int] | None = None
        """View and number of the last round that we gave a part to, if we gave one to the last."""
        self._outcomes = OutcomeMetrics(context.swarm)
        self._runner = TaskRunner()

    @property
    def group(self) -> Group:
        """In which views are agreed on."""
        return self._group

    @property
    def consensus_distance(self) -> float | None:
        """Before the last round: 0 for gradients, whose replicas are equal; None before the first."""
        return self._distance

    @property
    def outcomes(self) -> dict[str, int]:
        """``ok``, ``regrouped`` (done again in a new view) and ``empty`` (nobody gave a part) so far."""
        return self._outcomes.outcomes

    @property
    def facts(self) -> dict[str, float | str]:
        """Rounds completed, the group's size, and what the quantity adds."""
        view = self._group.view
        members = 0 if view is None else len(view.members)
        return {"round": self._history.number, "members": members, **self._work.facts}

    async def start(self) -> None:
        """Begin.

        Raises:
            ConfigError: this node can't.
        """
        await self._backend.start()
        self._runner.start(self._run(), self._requests.follow())

    async def stop(self, timeout_s: float) -> None:
        """Let the round under way end, `LAST_ROUND_S` at most, and end everything."""
        under_way = self._averager is not None and self._averager.busy
        self._runner.stopping = True
        await self._runner.stop(min(timeout_s, LAST_ROUND_S) if under_way else 0.0)
        self._requests.close()
        await self._group.stop()
        await self._backend.stop()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    def updated(self, updates: int) -> None:
        """Rounds follow requests, not updates."""

    # Rounds

    async def _run(self) -> None:
        await self._until_ready()
        await self._group.start()
        try:
            await self._group.run(self._in_view, done=lambda: self._runner.stopping or self._enough)
        finally:
            await self._group.stop()
        while not self._runner.stopping:
            await self._alone()

    @property
    def _enough(self) -> bool:
        return 0 < self._context.max_exchanges <= self._outcomes.count("ok")

    async def _until_ready(self) -> None:
        """Wait for a state of ours, and for members enough; the learner steps alone meanwhile."""
        while self._swarm.summary() is None or len(self._swarm.alive()) + 1 < self._context.start_at_members:
            await self._alone(POLL_S)

    async def _alone(self, timeout_s: float | None = None) -> None:
        """Let the learner step with its own gradient, should it ask in time."""
        self._requests.excuse(False)  # nobody waits for us: else `next` would give nothing, at once, for ever
        request = await self._requests.next(timeout_s)
        if request is not None:
            self._requests.answer(request, "none")

    async def _in_view(self, active: ActiveView) -> None:
        """Do rounds until the view ends."""
        view = active.view
        notes = {member: AveragingNote.read(active.notes.get(member)) for member in view.members}
        plan = make_plan(view.key, view.members, notes, led=self._work.led)
        seeds = plan.fresh and self._work.seeded and len(view.members) > 1
        averager = self._backend.averager(
            self._group,
            view,
            first=plan.number - seeds,
            raw=seeds or (plan.fresh and not self._work.led),
            spread=not self._work.synchronous,
        )
        self._averager = averager
        try:
            await self._rounds(plan, averager)
        finally:
            self._averager = None
            averager.close()
            await averager.closed()

    async def _rounds(self, plan: CatchUpPlan, averager: Averager) -> None:
        await self._begin(plan, averager)
        number = plan.number
        # Where a view has ended an owner's round does so again at once: only by returning do we see the end.
        while averager.in_force and not self._runner.stopping and not self._enough:
            if await self._round(plan, averager, number):
                number += 1

    async def _begin(self, plan: CatchUpPlan, averager: Averager) -> None:
        """Stand where the plan says."""
        standing = plan.standing[self._me]
        if plan.fresh and self._work.led:
            await self._catching_up.found(plan, averager)
        if standing == "behind":
            await self._catch_up_one(plan, averager)
        else:
            self._catching_up.in_step = standing == "same"

    async def _catch_up_one(self, plan: CatchUpPlan, averager: Averager) -> None:
        """Take the result of the round that others completed and we didn't."""
        request = self._requests.open
        result = self._memory.results[(plan.number - 1) % 2]
        if self._work.synchronous and (request is None or self._requests.restarted):
            self._catching_up.in_step = False
            return
        average = await self._catching_up.result(plan, averager, result)
        self._catching_up.in_step = average is not None
        if average is not None:  # from here on it is in our history
            if self._given_in is not None and self._history.ended_in(*self._given_in):
                self._memory.writer.counted()
            await through(self._take(request, average, plan.number - 1, self._clock.monotonic()))

    async def _round(self, plan: CatchUpPlan, averager: Averager, number: int) -> bool:
        """Do one round; False when there was none yet."""
        request = await self._requests.next() if self._work.synchronous or self._catching_up.in_step else None
        self._catching_up.check(request)
        if not self._catching_up.in_step and (request is not None or not self._work.synchronous):
            if not await self._catching_up.state(plan, averager, number):
                await asyncio.sleep(POLL_S)
            elif request is not None and self._work.synchronous:
                self._memory.writer.reset()
                self._requests.answer(request, "set")
            return False
        part = NOTHING if request is None else await self._part(request, averager, number)
        self._given_in = None if part.vector is None else (averager.view.key, number)
        began_s = self._clock.monotonic()
        try:
            average = await averager.average(number, part)
        except asyncio.CancelledError:
            if not self._runner.stopping:
                seconds = self._clock.monotonic() - began_s
                self._outcomes.ended(RoundReport("regrouped", seconds=seconds, error="the group changed"))
            raise
        if not averager.in_force:
            return False
        if part.vector is not None:
            self._memory.writer.counted()
        if self._catching_up.in_step:
            self._history.completed(averager.view.key, number)
            # Alone a learner steps with its gradient as it is, and as fast as it likes: not with the result.
            exact = not self._work.synchronous or len(averager.view.members) > 1
            self._catching_up.kept = average if exact else None
        if request is None and self._catching_up.in_step and not self._requests.restarted:
            request = self._requests.open  # it came too late to give, but not too late to take
        await through(self._take(request, average, number, began_s))
        if not average.total:
            self._requests.excuse(False)
        return True

    async def _part(self, request: LearnerRequest, averager: Averager, number: int) -> RoundContribution:
        """What we give; nothing, and in the end another's state, when ours is unusable."""
        try:
            part = await self._work.part(request, number, averager.view.members)
        except PoisonedVectorError as error:
            self._poisoned += 1
            self._swarm.tell("poisoned", f"our own part isn't given to the group: {error}", warning=True)
            if self._poisoned >= MOST_POISONED and len(averager.view.members) > 1:
                self._catching_up.in_step = False
            return NOTHING
        self._poisoned = 0
        return part

    async def _take(
        self, request: LearnerRequest | None, average: Average, number: int, began_s: float
    ) -> None:
        """Apply a result that counts, let the learner go on, and report."""
        kind, changed = await self._work.apply(request, average, number)
        now_s = self._clock.monotonic()
        waited_s = 0.0 if request is None else now_s - self._requests.since_s
        if request is not None:
            rate = average.learning_rate if kind == "replace" else None
            self._requests.answer(request, kind, rate, end_update=average.ends_update and request.left > 0)
        self._catching_up.stepped(request)
        self._distance = average.spread**0.5
        self._outcomes.ended(self._report(average, request, now_s - began_s, waited_s, changed))

    def _report(
        self,
        average: Average,
        request: LearnerRequest | None,
        seconds: float,
        waited_s: float,
        changed: float,
    ) -> RoundReport:
        view = self._group.view
        members = () if view is None or len(view.members) != len(average.weights) else view.members
        total = average.total or 1.0
        mine = 0 if request is None else request.policy_version
        return RoundReport(
            outcome="ok" if average.total else "empty",
            merged=tuple(
                Merged(member, weight / total, mine - version)
                for member, weight, version in zip(members, average.weights, average.versions, strict=False)
                if weight
            ),
            missing=tuple(m for m, weight in zip(members, average.weights, strict=False) if not weight),
            seconds=seconds,
            waited_s=waited_s,
            bytes_out=average.bytes_out,
            bytes_in=average.bytes_in,
            round_trips=average.round_trips,
            changed=changed,
            distance=average.spread**0.5,
        )

    # What others hear and ask

    def _note(self) -> bytes:
        """What we say when a view is acknowledged; from then on no round of the old view ends."""
        summary = self._swarm.summary()
        if summary is not None:
            self._said = AveragingNote(
                lineage=summary.lineage, steps=summary.lineage_steps, policy_version=summary.policy_version
            )
        note = self._said
        if self._catching_up.in_step:
            history = self._history
            note = msgspec.structs.replace(
                note, number=history.number, digest=history.digest, before=history.before
            )
        return note.encode()

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a member's call; see `Strategy`."""
        if incoming.route == GROUP_ROUTE:
            return await self._group.answer(incoming)
        if incoming.route != ROUTE:
            raise Refusal(409, f"this node averages in a group and has no {incoming.route}")
        if self._swarm.quarantined(incoming.sender):
            raise Refusal(403, "quarantined after poisoned vectors")
        ask: ReduceRequest = decode(incoming.meta, ReduceRequest, "request")
        self._group.check(ask.key)
        averager = self._averager
        if averager is None or averager.view.key != ask.key:
            raise Refusal(409, "this node hasn't begun with that view yet")
        if incoming.sender not in averager.view.members:
            raise Refusal(409, "not a member of this group")
        if ask.what == "alive":
            if averager.given < ask.number:
                self._requests.expected()
            return Reply(msgspec.msgpack.encode(ReduceAnswer(ask.number)))
        if ask.what == "preempt":
            averager.preempted(ask.number)
            return Reply(msgspec.msgpack.encode(ReduceAnswer(ask.number)))
        if ask.what in ("part", "store"):
            work = averager.serve(incoming, ask)
        else:
            work = self._catching_up.serve(ask, lambda: self._group.check(ask.key))
        return await self._group.hold(incoming.sender, ask.call, work)
