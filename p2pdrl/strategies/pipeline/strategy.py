"""One model over several peers: a node's pipelines through all views of the group.

    view in force → layout → rank 0 forms, the others take their places → work → broken, over, another view

**A pipeline that is whole goes on** when a view changes for others' sake: its members' notes say so, and its
learners never hear of it. Otherwise its rank 0 has it finished, with the whole state at all ranks, before the
next is formed. Where a member is gone nobody waits: the next order ends what the learner does.

**When something breaks** every member asks the others of its pipeline whether they are alive, doubts those
that aren't, and asks for a new view. A node whose own learner doesn't answer leaves the group until it does.

**Pipelines agree** through their ranks 0 (see `rank0_gossip`); a peer that computes by itself, because a
pipeline would be slower, is its own rank 0.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn

import msgspec

from p2pdrl.config.strategy import Mode, PipelineConfig
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.group.service import ROUTE as GROUP_ROUTE
from p2pdrl.group.service import ActiveView, Group, GroupView
from p2pdrl.pipeline.plan import StageNews
from p2pdrl.strategies.pipeline.backend import BackendFallback
from p2pdrl.strategies.pipeline.connections import Unformed, call_rank
from p2pdrl.strategies.pipeline.events import PipelineEvents, PipelineStatus
from p2pdrl.strategies.pipeline.forming import FORM_S, Coordinator, PipelineParts, RankSetup
from p2pdrl.strategies.pipeline.generation import Generation, LearnerSide, blamed, state_vectors
from p2pdrl.strategies.pipeline.layout import PipelineLayout, PipelineMembers, lay_out, limits, width
from p2pdrl.strategies.pipeline.link_probe import LinkTable, ProbeServer
from p2pdrl.strategies.pipeline.messages import (
    Form,
    Leave,
    PipeHead,
    PipelineDone,
    PipelineNote,
    RankRequest,
    Request,
)
from p2pdrl.strategies.pipeline.planning import measured_with
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.pipeline.rank0_gossip import ROUTE as GOSSIP_ROUTE
from p2pdrl.strategies.pipeline.rank0_gossip import Rank0Gossip
from p2pdrl.strategies.protocol import Strategy, StrategyContext
from p2pdrl.strategies.task_runner import TaskRunner, cancel_and_wait
from p2pdrl.transport.codec import decode
from p2pdrl.transport.pipe.ticket import PipeReply
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["PipelineStrategy"]

ANSWER_S = 2.0
"""The longest that a learner may take to say that it is there, once a pipeline broke."""
FINISH_S = 15.0
"""The longest that the end of an update is waited for; more where the strategy's deadline is longer."""
LONE_S = 1.0
"""The same where the generation has ended at another rank already, or a member is gone."""
RENEW_S = 3.0
"""A new view is asked for this long after a generation that ended as it was asked to."""
CALM_S = (0.25, 5.0)
"""Pause after the second failure in a row before a new view is asked for; doubles, up to the greatest."""
BLAMED_AFTER = 3
"""Failures in a row after which the next rank is doubted; the previous one after twice as many."""
GOSSIP_END_S = 0.5
"""The longest that an exchange with another pipeline's rank 0 may take to end."""


class LearnerLostError(WorkerError):
    """Our own learner doesn't answer."""


def parts_of(config: PipelineConfig, context: StrategyContext) -> int:
    """Return into how many parts the learner's longest batch is cut for one microbatch of a minibatch."""
    return context.batches * measured_with(config, context.rows)


def left_behind(context: StrategyContext, generation: Generation) -> bool:
    """Whether this node has adopted another lineage's state since a generation began."""
    summary = context.swarm.summary()
    return summary is not None and summary.lineage != generation.form.lineage


def finish_s(config: PipelineConfig) -> float:
    """Return the longest that the end of an update is waited for."""
    return max(FINISH_S, config.deadline_s + 5.0)


class ViewWork:
    """What a node does in one view.

    Attributes:
        coordinator: forms our pipeline, where we are its rank 0.
        setup: takes our part in it, where another is.
    """

    def __init__(
        self,
        parts: PipelineParts,
        group: Group,
        view: GroupView,
        notes: Mapping[str, PipelineNote],
        layout: PipelineLayout,
    ) -> None:
        self._parts, self._group, self._view = parts, group, view
        self._notes, self._layout = notes, layout
        self._side, self._events = parts.side, parts.events
        self._me = parts.context.swarm.node_id
        self.coordinator: Coordinator | None = None
        self.setup: RankSetup | None = None

    async def run(self) -> None:
        """Be in a pipeline until the view ends and we are cancelled; return where there is none for us.

        Raises:
            LearnerLostError: our own learner doesn't answer.
        """
        pipeline = self._layout.pipeline_of(self._me)
        generation = self._side.running
        if generation is None or not _is_in(pipeline, generation):
            await self._release()
            if pipeline is None:
                self._events.standing_by(self._layout)
                return
            try:
                generation = await self._form(pipeline)
            except Unformed as error:
                await self._form_failed(pipeline, error)
                return
        news = await self._serve(generation)
        self._ended(generation, news)
        if news.what == "broken":
            await self._still_there()
        elif not left_behind(self._parts.context, generation):
            await asyncio.sleep(RENEW_S)  # who had it finished is about to go
        await self._renew(generation.members, news.why or "it is over")

    async def close(self) -> None:
        """Give up what isn't done, at the view's end."""
        if self.setup is not None:
            await self.setup.close()

    # The generation before

    async def _release(self) -> None:
        """End it: after its update where it works at all its members, else soon or as it is."""
        await self._parts.gossip.end(GOSSIP_END_S)
        generation = self._side.running
        if generation is not None and (generation.formed or generation.leads):
            if generation.leads:
                self._side.finish()
            lone = generation.order.ranks == 1
            works = generation.formed and (
                lone or all(_is_in(self._notes.get(one), generation) for one in generation.members)
            )
            limit_s = finish_s(self._parts.config) if works else LONE_S
            await asyncio.wait({generation.ended}, timeout=limit_s)
            gone = not set(generation.members) <= set(self._view.members)
            if generation.running and generation.formed and not works and not gone:
                await self._still_there()  # it ended at others, so that it should have here, too
        generation = self._side.generation
        self._side.drop()
        if generation is not None and generation.ended.done():
            news = generation.ended.result()
            self._ended(generation, news)
            if news.what == "broken":
                await self._still_there()

    # Forming

    async def _form(self, pipeline: PipelineMembers) -> Generation:
        """Form a pipeline as its coordinator, or take the part that its coordinator gives us.

        Raises:
            Unformed: it came to nothing.
        """
        parts = self._parts
        if pipeline.rank0 != self._me:
            return await self._set_up(pipeline)
        self.coordinator = Coordinator(
            parts, self._group, self._view.key, pipeline, offer_s=finish_s(parts.config) + 5.0
        )
        generation = await self.coordinator.form()
        self._events.formed(generation, self.coordinator.choice.why)
        return generation

    async def _set_up(self, pipeline: PipelineMembers) -> Generation:
        setup = self.setup = RankSetup(self._parts, self._group, self._view.key, pipeline)
        try:
            async with asyncio.timeout(finish_s(self._parts.config) + FORM_S):
                await setup.settled.wait()
        except TimeoutError as error:
            raise Unformed("rank 0 didn't form its pipeline in time", pipeline.rank0) from error
        generation = self._side.generation
        if setup.lost or generation is None:
            raise Unformed(setup.lost)
        self._events.formed(generation)
        return generation

    async def _form_failed(self, pipeline: PipelineMembers, error: Unformed) -> None:
        self._events.unformed(pipeline, str(error), error.suspect)
        self._parts.failures += 1
        if error.suspect:
            self._group.doubt(error.suspect, str(error))
        else:
            await self._still_there()
        await asyncio.sleep(error.for_s)
        await self._renew(pipeline.members, str(error))

    # Working

    async def _serve(self, generation: Generation) -> StageNews:
        """Wait for the end of a generation; rank 0 exchanges with the other pipelines' meanwhile."""
        gossip = self._parts.gossip
        gossip.set_peers((*self._layout.rank0s, *(generation.members if generation.alone else ())))
        exchanging = [await gossip.begin()] if generation.leads else []
        try:
            waiting: list[asyncio.Future[Any]] = [generation.ended, *exchanging]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in exchanging:
                if task.done():
                    task.result()
            return await asyncio.shield(generation.ended)
        finally:
            await cancel_and_wait(*exchanging)
            if not generation.running:
                await gossip.end(GOSSIP_END_S)

    def _ended(self, generation: Generation, news: StageNews) -> None:
        """Note a generation's end; doubt a neighbour with whom they break time and again, though it lives."""
        if not self._events.ended(generation, news) or news.what != "broken":
            return
        self._parts.failures += 1
        self._parts.fallback.ended(generation, news)
        peer = blamed(generation, news)
        if peer and self._parts.failures >= BLAMED_AFTER * (1 if news.side == "next" else 2):
            self._group.doubt(peer, f"pipelines break with it time and again: {news.why}")

    async def _still_there(self) -> None:
        """Make sure that our own learner answers.

        Raises:
            LearnerLostError: it doesn't.
        """
        try:
            await self._side.measure(parts_of(self._parts.config, self._parts.context), ANSWER_S)
        except WorkerError as error:
            raise LearnerLostError(str(error)) from error

    async def _renew(self, members: tuple[str, ...], why: str) -> NoReturn:
        """Ask for a new view until this one ends, and we with it; pause longer the more failed in a row."""
        failures = self._parts.failures
        if failures > 1:
            await asyncio.sleep(min(CALM_S[0] * 2.0 ** min(failures - 2, 16), CALM_S[1]))
        await self._group.break_up(GroupView(self._view.key, members), why)


def _is_in(said: PipelineMembers | PipelineNote | None, generation: Generation) -> bool:
    """Whether what a member said, or a pipeline that goes on, is of a generation."""
    return said is not None and (said.generation, said.rank0) == (generation.number, generation.rank0)


MEASURE_S = 120.0
"""The longest that a learner may take to measure its blocks, or to come up before."""
POLL_S = 0.1
UNCUT_S = 30.0
"""A policy that can't be cut is asked again after this."""
LEAVE_S = 1.0


class PipelineStrategy(Strategy):
    """See `Strategy`.

    Raises:
        ConfigError: this node can't be in a pipeline.
    """

    mode: Mode = "pipeline"

    def __init__(self, config: PipelineConfig, context: StrategyContext) -> None:
        if context.stages is None or context.pipes is None:
            raise ConfigError("this node has no learner that could hold a stage of a pipeline")
        if config.backend == "torch" and not context.trusted_network:
            raise ConfigError(
                "torch.distributed listens without authentication; where everybody who reaches this machine "
                "may be trusted set node.trusted_network = true on each node, else take backend = stream"
            )
        self._config, self._context = config, context
        self._me, self._swarm, self._clock = context.swarm.node_id, context.swarm, context.clock
        self._side = LearnerSide(
            context.stages,
            self._on_news,
            over_torch=config.backend == "torch",
            may_nccl=config.backend == "auto" and context.trusted_network and context.direct,
            vectors=lambda: state_vectors(context.learner.board.spec),
        )
        self._gossip = Rank0Gossip(config, context)
        self._probes = ProbeServer()
        self._events = PipelineEvents(context)
        fallback = BackendFallback(context.swarm, counts=config.backend == "auto")
        self._parts = PipelineParts(
            config,
            context,
            context.pipes,
            self._side,
            self._gossip,
            LinkTable(context),
            self._events,
            fallback,
        )
        self._runner = TaskRunner()
        self._group: Group | None = None
        self._layout: PipelineLayout | None = None
        self._work: ViewWork | None = None

    @property
    def group(self) -> Group | None:
        """In which views are agreed on; None until it begins."""
        return self._group

    @property
    def consensus_distance(self) -> float | None:
        """Between pipelines' rank 0; 0 within the only pipeline, after its first state copy."""
        if self._gossip.distance is not None:
            return self._gossip.distance
        return 0.0 if self._events.rounds.count("ok") else None

    @property
    def outcomes(self) -> dict[str, int]:
        """State copies (``ok``), what ended badly (``broken``, ``unformed``), and rank 0's exchanges."""
        return dict(Counter(self._events.rounds.outcomes) + self._gossip.outcomes)

    @property
    def ends_within_s(self) -> float:
        """How long `stop` may take: an update is finished first."""
        return finish_s(self._config)

    @property
    def figures(self) -> PipelineStatus:
        """Where this node stands."""
        return self._events.figures(self._layout, self._me, self._side.running)

    @property
    def facts(self) -> dict[str, float | str]:
        """Where this node stands, for people."""
        return self._events.facts(self.figures)

    @property
    def members(self) -> tuple[str, ...]:
        """Node ids of our pipeline's ranks, in their order; empty without one."""
        generation = self._side.running
        return () if generation is None or not generation.formed or generation.alone else generation.members

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run(), self._side.listen())

    async def stop(self, timeout_s: float) -> None:
        """Have the update under way finished, with the whole state at all ranks, and end everything."""
        until_s = self._clock.monotonic() + timeout_s
        self._runner.stopping = True
        await self._gossip.end(min(timeout_s, GOSSIP_END_S))
        generation = self._side.running
        if generation is not None and generation.formed and timeout_s > 0:
            await self._finish(generation, max(0.0, until_s - self._clock.monotonic()))
        await self._runner.stop(0.0)
        await self._gossip.end(0.0)
        if self._group is not None:
            await self._group.stop()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    # From view to view

    async def _run(self) -> None:
        while not self._runner.stopping:
            await self._until_fit()
            try:
                await self._in_group()
            except LearnerLostError as error:
                self._events.learner_lost(str(error))
                self._side.drop()

    async def _until_fit(self) -> None:
        """Wait for a state, for members enough, and for a learner that says what its blocks cost."""
        while True:
            members = len(self._swarm.alive()) + 1
            if self._swarm.summary() is None or members < self._context.start_at_members:
                await asyncio.sleep(POLL_S)
                continue
            try:
                await self._side.measure(parts_of(self._config, self._context), MEASURE_S)
                return
            except WorkerError:
                await asyncio.sleep(POLL_S)
            except ConfigError as error:
                self._swarm.tell("pipeline-refused", f"this policy can't be cut: {error}", warning=True)
                await asyncio.sleep(UNCUT_S)

    async def _in_group(self) -> None:
        context = self._context
        group = self._group = Group(
            context.swarm, context.transport, context.clock, context.epoch, self._note
        )
        await group.start()
        try:
            await group.run(self._in_view, done=lambda: self._runner.stopping)
        finally:
            await self._gossip.end(0.0)
            await group.stop()

    async def _in_view(self, active: ActiveView) -> None:
        """Work until the view ends, and we are cancelled."""
        view, group = active.view, self._group
        assert group is not None  # noqa: S101 - it calls us
        notes = {member: PipelineNote.read(active.notes.get(member)) for member in view.members}
        most = width(notes, self._config.stages, self._config.chunks)
        layout = self._layout = lay_out(view.members, notes, most)
        self._events.limited(limits(self._config, notes, layout.pipeline_of(self._me)))
        self._gossip.set_peers(layout.rank0s)
        work = self._work = ViewWork(self._parts, group, view, notes, layout)
        try:
            await work.run()
        finally:
            self._work = None
            await work.close()

    async def _finish(self, generation: Generation, timeout_s: float) -> None:
        """Have the generation end after its update; another rank asks rank 0 to."""
        asking: asyncio.Task[None] | None = None
        if generation.leads:
            self._side.finish()
        else:
            asking = asyncio.create_task(self._ask_to_finish(generation), name="leave")
        await asyncio.wait({generation.ended}, timeout=timeout_s)
        if asking is not None:
            await cancel_and_wait(asking)
        if generation.ended.done():
            self._events.ended(generation, generation.ended.result())

    async def _ask_to_finish(self, generation: Generation) -> None:
        """Tell rank 0 that we go."""
        group = self._group
        if group is None or group.view is None:
            return
        leave = Leave(group.view.key, generation.number)
        with contextlib.suppress(Unformed):
            await call_rank(
                self._context, group, generation.rank0, leave, PipelineDone, what="leave", deadline_s=LEAVE_S
            )

    def _on_news(self, generation: Generation, news: StageNews) -> None:
        """Take in what the learner tells of its present generation."""
        if news.what == "copied":
            self._parts.failures = 0
            self._events.copied(generation)
            if generation.leads and generation.order.ranks > 1 and left_behind(self._context, generation):
                self._side.finish()  # and the ranks come along when the next one is formed

    # What others hear and ask

    def _note(self) -> bytes:
        """What we say when a view is acknowledged."""
        generation, blocks = self._side.running, len(self._side.layers)
        if generation is None or not generation.formed or self._runner.stopping:
            return PipelineNote(blocks).encode()
        return PipelineNote(
            blocks,
            generation.number,
            generation.rank0,
            generation.rank,
            len(generation.members),
            generation.alone,
        ).encode()

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a member's call; see `Strategy`."""
        if incoming.route == GOSSIP_ROUTE:
            return await self._gossip.answer(incoming)
        if incoming.route not in (GROUP_ROUTE, PIPE_ROUTE):
            raise Refusal(409, f"this node's mode is pipeline, which has no {incoming.route}")
        group = self._group
        if group is None:
            raise Refusal(409, "this node is in no group yet")
        if incoming.route == GROUP_ROUTE:
            return await group.answer(incoming)
        if self._swarm.quarantined(incoming.sender):
            raise Refusal(403, "quarantined after poisoned vectors")
        message: Request = decode(incoming.meta, Request, "request")
        if not isinstance(message, RankRequest | Form | Leave):
            return await self._probes.serve_probe(incoming)
        group.check(message.key)
        work = self._answer(incoming.sender, message)
        return await group.hold(incoming.sender, message.call, work)

    async def _answer(self, sender: str, message: RankRequest | Form | Leave) -> Reply:
        if isinstance(message, Leave):
            self._left(sender, message)
            return Reply(msgspec.msgpack.encode(PipelineDone(message.generation)))
        setup = None if self._work is None else self._work.setup
        if setup is None or setup.key != message.key or setup.pipeline.rank0 != sender:
            raise Refusal(409, "this node isn't ready for a pipeline of yours")
        if isinstance(message, RankRequest):
            return Reply(msgspec.msgpack.encode(await setup.offer()))
        await setup.follow(sender, message)
        return Reply(msgspec.msgpack.encode(PipelineDone(message.generation)))

    def _left(self, sender: str, leave: Leave) -> None:
        """End our generation after its update: one of its ranks leaves.

        Raises:
            Refusal: 409, we are rank 0 of no such generation.
        """
        generation = self._side.running
        if (
            generation is None
            or not generation.leads
            or generation.number != leave.generation
            or sender not in generation.members
        ):
            raise Refusal(409, f"this node is rank 0 of no generation {leave.generation} with you")
        self._side.finish()

    async def accept(self, incoming: Incoming) -> PipeReply:
        """Take a pipe of the rank before ours.

        Raises:
            Refusal: it isn't for a pipeline that is being formed here (409), or not yet (503).
        """
        if self._swarm.quarantined(incoming.sender):
            raise Refusal(403, "quarantined after poisoned vectors")
        head: PipeHead = decode(incoming.meta, PipeHead, "pipe")
        if self._group is None:
            raise Refusal(409, "this node is in no group yet")
        self._group.check(head.key)
        work = self._work
        forming = None if work is None else work.coordinator or work.setup
        if forming is None or forming.connections is None:
            raise Refusal(503, "no pipeline is being formed here yet")
        return forming.connections.accept(incoming.sender, head)
