"""One model over several peers: who forms a pipeline with whom, through all views of the group.

    view in force → layout → the head forms, the others take their places → work → broken, over, another view

**A pipeline that is whole goes on** when a view changes for others' sake: its members' notes say so, and its
learners never hear of it. Otherwise its head has it finished, with the whole state at all ranks, before the
next is formed. Where a member is gone nobody waits: the next order ends what the learner does.

**When something breaks** every member asks the others of its pipeline whether they are alive, doubts those
that aren't, and asks for a new view. A node whose own learner doesn't answer leaves the group until it does.

**Pipelines agree** through their heads (see `heads`); peers that compute by themselves because a pipeline
would be slower are heads of nothing but themselves.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter

import msgspec

from p2pdrl.config.pipeline import PipelineConfig
from p2pdrl.config.strategy import Mode
from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.pipeline.order import StageNews
from p2pdrl.strategies.group.service import ROUTE as GROUP_ROUTE
from p2pdrl.strategies.group.service import ActiveView, Group
from p2pdrl.strategies.pipeline.calls import Peers, Unformed
from p2pdrl.strategies.pipeline.copies import state_vectors
from p2pdrl.strategies.pipeline.figures import Figures
from p2pdrl.strategies.pipeline.heads import ROUTE as HEADS_ROUTE
from p2pdrl.strategies.pipeline.heads import Heads
from p2pdrl.strategies.pipeline.layout import Layout, lay_out, width
from p2pdrl.strategies.pipeline.limits import limits
from p2pdrl.strategies.pipeline.links import LinkBook
from p2pdrl.strategies.pipeline.messages import Done, Form, Leave, Note, Offer, PipeHead, Request
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.pipeline.probe import ProbeDesk
from p2pdrl.strategies.pipeline.telling import Telling
from p2pdrl.strategies.pipeline.term import LearnerSide, Term
from p2pdrl.strategies.pipeline.trial import Trial
from p2pdrl.strategies.pipeline.view_work import (
    GOSSIP_END_S,
    LearnerLostError,
    Tools,
    ViewWork,
    finish_s,
    left_behind,
    parts_of,
)
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.runner import Runner
from p2pdrl.transport.codec import decode
from p2pdrl.transport.pipe import PipeReply
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = ["PipelineStrategy"]

MEASURE_S = 120.0
"""The longest that a learner may take to measure its blocks, or to come up before."""
POLL_S = 0.1
UNCUT_S = 30.0
"""A policy that can't be cut is asked again after this."""
LEAVE_S = 1.0


class PipelineStrategy:
    """See `Strategy`.

    Args:
        config: the strategy's options.
        context: what the node gives.

    Raises:
        ConfigError: this node can't be in a pipeline.
    """

    mode: Mode = "pipeline"

    def __init__(self, config: PipelineConfig, context: Context) -> None:
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
        self._heads = Heads(config, context)
        self._desk = ProbeDesk()
        self._telling = Telling(context)
        trial = Trial(context.swarm, counts=config.backend == "auto")
        self._tools = Tools(
            config, context, context.pipes, self._side, self._heads, LinkBook(context), self._telling, trial
        )
        self._runner = Runner()
        self._group: Group | None = None
        self._layout: Layout | None = None
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
        return 0.0 if self._telling.count("ok") else None

    @property
    def outcomes(self) -> dict[str, int]:
        """State copies (``ok``), what ended badly (``broken``, ``unformed``), and heads' exchanges."""
        return dict(Counter(self._telling.outcomes) + self._heads.outcomes)

    @property
    def ends_within_s(self) -> float:
        """How long `stop` may take: an update is finished first."""
        return finish_s(self._config)

    @property
    def figures(self) -> Figures:
        """Where this node stands."""
        return self._telling.figures(self._layout, self._me, self._side.running)

    @property
    def facts(self) -> dict[str, float | str]:
        """The same for people."""
        return self._telling.facts(self.figures)

    @property
    def members(self) -> tuple[str, ...]:
        """Node ids of our pipeline's ranks, in their order; empty without one."""
        term = self._side.running
        return () if term is None or not term.formed or term.alone else term.members

    async def start(self) -> None:
        """Begin."""
        self._runner.start(self._run(), self._side.listen())

    async def stop(self, timeout_s: float) -> None:
        """Have the update under way finished, with the whole state at all ranks, and end everything."""
        until_s = self._clock.monotonic() + timeout_s
        self._runner.stopping = True
        await self._heads.end(min(timeout_s, GOSSIP_END_S))
        term = self._side.running
        if term is not None and term.formed and timeout_s > 0:
            await self._finish(term, max(0.0, until_s - self._clock.monotonic()))
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
                self._telling.learner_lost(str(error))
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
        group = self._group = Group(self._context, self._note)
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
        notes = {member: Note.read(active.notes.get(member)) for member in view.members}
        most = width(notes, self._config.stages, self._config.chunks)
        layout = self._layout = lay_out(view.members, notes, most)
        self._telling.limited(limits(self._config, notes, layout.place_of(self._me)))
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

    async def _finish(self, term: Term, timeout_s: float) -> None:
        """Have the generation end after its update; a rank asks its head to."""
        asking: asyncio.Task[None] | None = None
        if term.leads:
            self._side.finish()
        else:
            asking = asyncio.create_task(self._ask_to_finish(term), name="leave")
        await asyncio.wait({term.ended}, timeout=timeout_s)
        if asking is not None:
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        if term.ended.done():
            self._telling.ended(term, term.ended.result())

    async def _ask_to_finish(self, term: Term) -> None:
        """Tell the head that we go."""
        group = self._group
        if group is None or group.view is None:
            return
        leave = Leave(group.view.key, term.generation)
        with contextlib.suppress(Unformed):
            await Peers(self._context, group).call(term.head, leave, Done, "leave", deadline_s=LEAVE_S)

    def _heard(self, term: Term, news: StageNews) -> None:
        """The learner told something of its present generation."""
        if news.what == "copied":
            self._tools.failures = 0
            self._telling.copied(term)
            if term.leads and term.order.ranks > 1 and left_behind(self._context, term):
                self._side.finish()  # and the ranks come along when the next one is formed

    # What others hear and ask

    def _note(self) -> bytes:
        """What we say when a view is acknowledged."""
        note = Note(blocks=len(self._side.layers))
        term = self._side.running
        if term is not None and term.formed and not self._runner.stopping:
            note = Note(
                blocks=len(self._side.layers),
                generation=term.generation,
                head=term.head,
                rank=term.rank,
                ranks=len(term.members),
                alone=term.alone,
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
        if not isinstance(message, Offer | Form | Leave):
            return await self._desk.serve_probe(incoming)
        group.check(message.key)
        work = self._answer(incoming.sender, message)
        return await group.hold(incoming.sender, message.call, work)

    async def _answer(self, sender: str, message: Offer | Form | Leave) -> Reply:
        if isinstance(message, Leave):
            self._left(sender, message)
            return Reply(msgspec.msgpack.encode(Done(message.generation)))
        recruit = None if self._work is None else self._work.recruit
        if recruit is None or recruit.key != message.key or recruit.place.head != sender:
            raise Refusal(409, "this node isn't ready for a pipeline of yours")
        if isinstance(message, Offer):
            return Reply(msgspec.msgpack.encode(await recruit.offer()))
        await recruit.take_place(sender, message)
        return Reply(msgspec.msgpack.encode(Done(message.generation)))

    def _left(self, sender: str, leave: Leave) -> None:
        """A rank of our pipeline goes: finish.

        Raises:
            Refusal: 409, we head no such pipeline.
        """
        term = self._side.running
        if (
            term is None
            or not term.leads
            or term.generation != leave.generation
            or sender not in term.members
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
        forming = None if work is None else work.lead or work.recruit
        if forming is None:
            raise Refusal(503, "no pipeline is being formed here yet")
        return forming.accept(incoming.sender, head)
