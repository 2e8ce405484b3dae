"""One model over several peers: who forms a pipeline with whom, through all views of the group."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from p2pdrl.config.strategy import Mode, PipelineConfig
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.group.service import ROUTE as GROUP_ROUTE
from p2pdrl.group.service import ActiveView, Group, GroupView
from p2pdrl.pipeline.order import StageNews
from p2pdrl.strategies.pipeline.backend import BackendFallback
from p2pdrl.strategies.pipeline.calls import Peers, Unformed
from p2pdrl.strategies.pipeline.coordinator import Coordinator
from p2pdrl.strategies.pipeline.events import PipelineEvents, PipelineStatus
from p2pdrl.strategies.pipeline.generation import Generation, LearnerSide, blamed, state_vectors
from p2pdrl.strategies.pipeline.layout import PipelineLayout, PipelineMembers, lay_out, limits, width
from p2pdrl.strategies.pipeline.link_probe import LinkBook, ProbeServer
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
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE, Pipes
from p2pdrl.strategies.pipeline.rank0_gossip import ROUTE as HEADS_ROUTE
from p2pdrl.strategies.pipeline.rank0_gossip import Rank0Gossip
from p2pdrl.strategies.pipeline.rank_setup import FORM_S, RankSetup
from p2pdrl.strategies.protocol import Strategy, StrategyContext
from p2pdrl.strategies.task_runner import TaskRunner
from p2pdrl.transport.codec import decode
from p2pdrl.transport.pipe.ticket import PipeReply
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = [
    "GOSSIP_END_S",
    "LearnerLostError",
    "PipelineStrategy",
    "Tools",
    "ViewWork",
    "finish_s",
    "left_behind",
    "parts_of",
]

ANSWER_S = 2.0
"""The longest that a learner may take to say that it is there, once a pipeline broke."""
FINISH_S = 15.0
"""The longest that the end of an update is waited for; more where the strategy's deadline is longer."""
LONE_S = 1.0
"""The same where somebody else's pipeline has ended already, or a member is gone."""
RENEW_S = 3.0
"""A new view is asked for again after this."""
CALM_S = (0.25, 5.0)
"""Pause after the second failure in a row before a new view is asked for; doubles, up to the greatest."""
BLAMED_AFTER = 3
"""Failures in a row after which a neighbour is left out; twice as many before it is the previous rank."""
GOSSIP_END_S = 0.5
"""The longest that an exchange with another head may take to end."""


class LearnerLostError(WorkerError):
    """Our own learner doesn't answer."""


def parts_of(config: PipelineConfig, context: StrategyContext) -> int:
    """Return into how many parts the learner's longest batch is cut for one microbatch of a minibatch."""
    return context.batches * measured_with(config, context.rows)


def left_behind(context: StrategyContext, generation: Generation) -> bool:
    """Whether this node has adopted another lineage's state since a generation began."""
    summary = context.swarm.summary()
    return summary is not None and summary.lineage != generation.lineage


def finish_s(config: PipelineConfig) -> float:
    """Return the longest that the end of an update is waited for."""
    return max(FINISH_S, config.deadline_s + 5.0)


@dataclass(slots=True)
class Tools:
    """What outlives a view.

    Attributes:
        config: the strategy's options.
        context: what the node gives.
        pipes: opens pipes.
        side: our learner.
        heads: gossip with other heads.
        links: what is known of them.
        events: what people are told.
        fallback: of torch, where that is chosen.
        failures: in a row, since the last state copy.
    """

    config: PipelineConfig
    context: StrategyContext
    pipes: Pipes
    side: LearnerSide
    heads: Rank0Gossip
    links: LinkBook
    events: PipelineEvents
    fallback: BackendFallback
    failures: int = 0


class ViewWork:
    """One view.

    Args:
        tools: what outlives it.
        group: agreed on it.
        view: which.
        notes: of its members.
        layout: that follows from both.

    Attributes:
        coordinator: forms our pipeline, where we head it.
        setup: takes our place in it, where another does.
    """

    def __init__(
        self,
        tools: Tools,
        group: Group,
        view: GroupView,
        notes: Mapping[str, PipelineNote],
        layout: PipelineLayout,
    ) -> None:
        self._tools, self._group, self._view = tools, group, view
        self._notes, self._layout = notes, layout
        self._side, self._events = tools.side, tools.events
        self._me = tools.context.swarm.node_id
        self._peers = Peers(tools.context, group)
        self.coordinator: Coordinator | None = None
        self.setup: RankSetup | None = None

    async def run(self) -> None:
        """Be in a pipeline until the view ends and we are cancelled; return where there is none for us.

        Raises:
            LearnerLostError: our own learner doesn't answer.
        """
        place = self._layout.place_of(self._me)
        generation = self._side.running
        if generation is None or place is None or not _goes_on(place, generation):
            await self._release()
            if place is None:
                self._events.standing_by(self._layout)
                return
            try:
                generation = await self._form(place)
            except Unformed as error:
                await self._came_to_nothing(place, error)
                return
        news = await self._serve(generation)
        self._ended(generation, news)
        if news.what == "broken":
            await self._still_there()
        elif not left_behind(self._tools.context, generation):
            await asyncio.sleep(RENEW_S)  # who had it finished is about to go
        await self._anew(generation.members, news.why or "it is over")

    async def close(self) -> None:
        """The view ended: give up what isn't done."""
        if self.setup is not None:
            await self.setup.close()

    # The generation before

    async def _release(self) -> None:
        """End it: finished where it works at all its members, else soon or as it is."""
        await self._tools.heads.end(GOSSIP_END_S)
        generation = self._side.running
        if generation is not None and (generation.formed or generation.leads):
            if generation.leads:
                self._side.finish()
            lone = generation.order.ranks == 1
            works = generation.formed and (
                lone or all(_is_in(self._notes.get(one), generation) for one in generation.members)
            )
            patience_s = finish_s(self._tools.config) if works else LONE_S
            await asyncio.wait({generation.ended}, timeout=patience_s)
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

    async def _form(self, place: PipelineMembers) -> Generation:
        """Form a pipeline as its head, or take the place that the head gives us.

        Raises:
            Unformed: it came to nothing.
        """
        tools = self._tools
        if place.head != self._me:
            return await self._set_up(place)
        self.coordinator = Coordinator(
            tools.context,
            tools.config,
            pipes=tools.pipes,
            side=self._side,
            peers=self._peers,
            links=tools.links,
            key=self._view.key,
            place=place,
            offer_s=finish_s(tools.config) + 5.0,
            fallback=tools.fallback,
        )
        generation = await self.coordinator.form()
        self._events.formed(generation, self.coordinator.choice.why)
        return generation

    async def _set_up(self, place: PipelineMembers) -> Generation:
        tools = self._tools
        setup = self.setup = RankSetup(
            tools.context,
            tools.config,
            pipes=tools.pipes,
            side=self._side,
            peers=self._peers,
            key=self._view.key,
            place=place,
            doubt=self._group.doubt,
        )
        try:
            async with asyncio.timeout(finish_s(tools.config) + FORM_S):
                await setup.settled.wait()
        except TimeoutError as error:
            raise Unformed("the head didn't form its pipeline in time", place.head) from error
        generation = self._side.generation
        if setup.lost or generation is None:
            raise Unformed(setup.lost)
        self._events.formed(generation)
        return generation

    async def _came_to_nothing(self, place: PipelineMembers, error: Unformed) -> None:
        self._events.unformed(place, str(error), error.suspect)
        self._tools.failures += 1
        if error.suspect:
            self._group.doubt(error.suspect, str(error))
        else:
            await self._still_there()
        await asyncio.sleep(error.for_s)
        await self._anew(place.members, str(error))

    # Working

    async def _serve(self, generation: Generation) -> StageNews:
        """Wait for the end of a generation; a head meets the others meanwhile."""
        heads = self._tools.heads
        heads.with_whom((*self._layout.heads, *(generation.members if generation.alone else ())))
        gossip = [await heads.begin()] if generation.leads else []
        try:
            waiting: list[asyncio.Future[Any]] = [generation.ended, *gossip]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in gossip:
                if task.done():
                    task.result()
            return await asyncio.shield(generation.ended)
        finally:
            for task in gossip:
                task.cancel()
            await asyncio.gather(*gossip, return_exceptions=True)
            if not generation.running:
                await heads.end(GOSSIP_END_S)

    def _ended(self, generation: Generation, news: StageNews) -> None:
        """Note a generation's end; doubt a neighbour with whom it breaks time and again, though it lives."""
        if not self._events.ended(generation, news) or news.what != "broken":
            return
        self._tools.failures += 1
        self._tools.fallback.ended(generation, news)
        peer = blamed(generation, news)
        if peer and self._tools.failures >= BLAMED_AFTER * (1 if news.side == "next" else 2):
            self._group.doubt(peer, f"pipelines break with it time and again: {news.why}")

    async def _still_there(self) -> None:
        """Make sure that our own learner is.

        Raises:
            LearnerLostError: it isn't.
        """
        try:
            await self._side.measure(parts_of(self._tools.config, self._tools.context), ANSWER_S)
        except WorkerError as error:
            raise LearnerLostError(str(error)) from error

    async def _anew(self, members: tuple[str, ...], why: str) -> None:
        """Doubt who doesn't answer, and ask for a new view until this one ends, and we with it."""
        failures = self._tools.failures
        if failures > 1:
            await asyncio.sleep(min(CALM_S[0] * 2.0 ** min(failures - 2, 16), CALM_S[1]))
        others = tuple(member for member in members if member != self._me)
        while True:
            for peer in await self._peers.silent(others):
                self._group.doubt(peer, "its pipeline broke, and it doesn't answer")
            self._group.renew(self._view.key, why)
            await asyncio.sleep(RENEW_S)


def _goes_on(place: PipelineMembers, generation: Generation) -> bool:
    return (place.generation, place.head) == (generation.generation, generation.head)


def _is_in(note: PipelineNote | None, generation: Generation) -> bool:
    """Whether a member said that it works in a generation."""
    return note is not None and (note.generation, note.head) == (generation.generation, generation.head)


MEASURE_S = 120.0
"""The longest that a learner may take to measure its blocks, or to come up before."""
POLL_S = 0.1
UNCUT_S = 30.0
"""A policy that can't be cut is asked again after this."""
LEAVE_S = 1.0


class PipelineStrategy(Strategy):
    """See `Strategy`.

    Args:
        config: the strategy's options.
        context: what the node gives.

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
            self._heard,
            over_torch=config.backend == "torch",
            may_nccl=config.backend == "auto" and context.trusted_network and context.direct,
            vectors=lambda: state_vectors(context.learner.board.spec),
        )
        self._heads = Rank0Gossip(config, context)
        self._desk = ProbeServer()
        self._events = PipelineEvents(context)
        fallback = BackendFallback(context.swarm, counts=config.backend == "auto")
        self._tools = Tools(
            config, context, context.pipes, self._side, self._heads, LinkBook(context), self._events, fallback
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
        """Between heads; 0 within the only pipeline, after its first state copy."""
        if self._heads.distance is not None:
            return self._heads.distance
        return 0.0 if self._events.count("ok") else None

    @property
    def outcomes(self) -> dict[str, int]:
        """State copies (``ok``), what ended badly (``broken``, ``unformed``), and heads' exchanges."""
        return dict(Counter(self._events.outcomes) + self._heads.outcomes)

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
        """The same for people."""
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
        await self._heads.end(min(timeout_s, GOSSIP_END_S))
        generation = self._side.running
        if generation is not None and generation.formed and timeout_s > 0:
            await self._finish(generation, max(0.0, until_s - self._clock.monotonic()))
        await self._runner.stop(0.0)
        await self._heads.end(0.0)
        if self._group is not None:
            await self._group.stop()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended it before: a bug of ours."""
        await self._runner.watch()

    def updated(self, updates: int) -> None:
        """Pipelines follow orders, not updates."""

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
        given = self._context
        group = self._group = Group(given.swarm, given.transport, given.clock, given.epoch, self._note)
        await group.start()
        key = None
        try:
            while not self._runner.stopping:
                active = await group.active(after=key)
                key = active.view.key
                await self._in_view(group, active)
        except Refusal:
            await group.watch()  # raises what ended it: a bug
        finally:
            await self._heads.end(0.0)
            await group.stop()

    async def _in_view(self, group: Group, active: ActiveView) -> None:
        """Work until the view ends."""
        view = active.view
        notes = {member: PipelineNote.read(active.notes.get(member)) for member in view.members}
        most = width(notes, self._config.stages, self._config.chunks)
        layout = self._layout = lay_out(view.members, notes, most)
        self._events.limited(limits(self._config, notes, layout.place_of(self._me)))
        self._heads.with_whom(layout.heads)
        work = self._work = ViewWork(self._tools, group, view, notes, layout)
        running = asyncio.create_task(work.run(), name="pipeline")
        ended = asyncio.create_task(group.ended(view.key), name="view-ended")
        try:
            await asyncio.wait({running, ended}, return_when=asyncio.FIRST_COMPLETED)
            if running.done():
                running.result()
                await ended  # who stands by has nothing to do
        finally:
            self._work = None
            for task in (running, ended):
                task.cancel()
            await asyncio.gather(running, ended, return_exceptions=True)
            await work.close()

    async def _finish(self, generation: Generation, timeout_s: float) -> None:
        """Have the generation end after its update; a rank asks its head to."""
        asking: asyncio.Task[None] | None = None
        if generation.leads:
            self._side.finish()
        else:
            asking = asyncio.create_task(self._ask_to_finish(generation), name="leave")
        await asyncio.wait({generation.ended}, timeout=timeout_s)
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if generation.ended.done():
            self._events.ended(generation, generation.ended.result())

    async def _ask_to_finish(self, generation: Generation) -> None:
        """Tell the head that we go."""
        group = self._group
        if group is None or group.view is None:
            return
        leave = Leave(group.view.key, generation.generation)
        with contextlib.suppress(Unformed):
            await Peers(self._context, group).call(
                generation.head, leave, PipelineDone, "leave", deadline_s=LEAVE_S
            )

    def _heard(self, generation: Generation, news: StageNews) -> None:
        """The learner told something of its present generation."""
        if news.what == "copied":
            self._tools.failures = 0
            self._events.copied(generation)
            if generation.leads and generation.order.ranks > 1 and left_behind(self._context, generation):
                self._side.finish()  # and the ranks come along when the next one is formed

    # What others hear and ask

    def _note(self) -> bytes:
        """What we say when a view is acknowledged."""
        note = PipelineNote(blocks=len(self._side.layers))
        generation = self._side.running
        if generation is not None and generation.formed and not self._runner.stopping:
            note = PipelineNote(
                blocks=len(self._side.layers),
                generation=generation.generation,
                head=generation.head,
                rank=generation.rank,
                ranks=len(generation.members),
                alone=generation.alone,
            )
        return note.encode()

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a member's call; see `Strategy`."""
        if incoming.route == HEADS_ROUTE:
            return await self._heads.answer(incoming)
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
            return await self._desk.serve_probe(incoming)
        group.check(message.key)
        work = self._answer(incoming.sender, message)
        return await group.hold(incoming.sender, message.call, work)

    async def _answer(self, sender: str, message: RankRequest | Form | Leave) -> Reply:
        if isinstance(message, Leave):
            self._left(sender, message)
            return Reply(msgspec.msgpack.encode(PipelineDone(message.generation)))
        setup = None if self._work is None else self._work.setup
        if setup is None or setup.key != message.key or setup.place.head != sender:
            raise Refusal(409, "this node isn't ready for a pipeline of yours")
        if isinstance(message, RankRequest):
            return Reply(msgspec.msgpack.encode(await setup.offer()))
        await setup.take_place(sender, message)
        return Reply(msgspec.msgpack.encode(PipelineDone(message.generation)))

    def _left(self, sender: str, leave: Leave) -> None:
        """A rank of our pipeline goes: finish.

        Raises:
            Refusal: 409, we head no such pipeline.
        """
        generation = self._side.running
        if (
            generation is None
            or not generation.leads
            or generation.generation != leave.generation
            or sender not in generation.members
        ):
            raise Refusal(409, f"this node heads no generation {leave.generation} with you")
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
        if forming is None:
            raise Refusal(503, "no pipeline is being formed here yet")
        return forming.accept(incoming.sender, head)
