"""A rank's part in the forming of a pipeline: it says how it stands, and takes the place that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import msgspec

from p2pdrl.config.pipeline import PipelineConfig
from p2pdrl.errors import ConfigError, TensorError, TransportError, WorkerError
from p2pdrl.pipeline.order import StageSide
from p2pdrl.strategies.group.view import ViewKey
from p2pdrl.strategies.pipeline.calls import BLAMELESS, Peers
from p2pdrl.strategies.pipeline.joints import Joints
from p2pdrl.strategies.pipeline.layout import Place
from p2pdrl.strategies.pipeline.memory import usable_bytes
from p2pdrl.strategies.pipeline.messages import Form, Offered, PipeHead
from p2pdrl.strategies.pipeline.orders import COME_S, TORCH_S, closes_circle, term_of
from p2pdrl.strategies.pipeline.port import Pipes
from p2pdrl.strategies.pipeline.state import State, read_state
from p2pdrl.strategies.pipeline.term import LearnerSide, Term
from p2pdrl.strategies.protocol import Context
from p2pdrl.transport.pipe import Pipe, PipeReply
from p2pdrl.transport.protocol import Refusal

__all__ = ["FORM_S", "MEET_S", "READY_S", "Recruit", "offered", "still_holds"]

FORM_S = 120.0
"""The longest that a rank may take for its place: most of it is for the whole state of a large model."""
READY_S = 10.0
"""The longest that a learner may take for it."""
MEET_S = COME_S + TORCH_S[1]
"""The same with torch.distributed, where it has to meet all others, and tells if that comes to nothing."""
ABSORB_S = 2.0
"""The longest that the learner, which stands still, may take for what was posted to it."""
LOOK_S = 1.0
"""The longest that it may take to say how much of its GPU is free."""
POLL_S = 0.02
TRIES = 3
"""To take over the head's state."""


async def own_state(context: Context) -> State:
    """Read what we hold.

    Raises:
        Refusal: 503, nothing, or not for the moment.
    """
    if context.swarm.summary() is None:
        raise Refusal(503, "no state yet, or another one is being taken")
    board, until_s = context.learner.board, context.clock.monotonic() + ABSORB_S
    # A learner that gets an order takes what lies there for it, and not what waits behind that.
    while board.pending and context.clock.monotonic() < until_s:  # noqa: ASYNC110 - another process takes it
        await asyncio.sleep(POLL_S)
    if board.pending:
        raise Refusal(503, "the learner doesn't take what was posted to it")
    try:
        return await read_state(context.learner.board, context.size)
    except TensorError as error:
        raise Refusal(503, f"no state yet: {error}") from error


async def still_holds(context: Context, digest: bytes, pipes: Mapping[StageSide, Pipe]) -> None:
    """Make sure that a learner begins with what was agreed: the generation before may have moved it since.

    Args:
        context: what the node gives.
        digest: of the parameters.
        pipes: closed where it doesn't.

    Raises:
        Refusal: 503, it doesn't.
    """
    state = None
    try:
        state = await own_state(context)
    finally:
        if state is None or state.digest != digest:
            for pipe in pipes.values():
                pipe.close()
    if state.digest != digest:
        raise Refusal(503, "the learner's parameters changed meanwhile")


async def offered(context: Context, side: LearnerSide) -> Offered:
    """Say how we stand.

    Raises:
        Refusal: 503, there is no state yet.
    """
    state = await own_state(context)
    await side.look_again(LOOK_S)
    summary = context.swarm.summary()
    if summary is None:
        raise Refusal(503, "another state is being taken")
    return Offered(
        summary.lineage,
        summary.lineage_steps,
        state.policy_version,
        state.digest,
        side.last,
        side.seconds,
        len(side.layers),
        side.device[:64],
        context.trusted_network,
        usable_bytes(side.device, side.gpu_bytes),
        side.gpu[:64],
        context.direct,
    )


class Recruit:
    """Our place in a pipeline that another node heads, in one view.

    Args:
        context: what the node gives.
        config: the strategy's options.
        pipes: opens pipes.
        side: our learner.
        peers: the other members.
        key: of the view; what comes from others' is for another one.
        place: the pipeline as everybody computes it.
        doubt: told who is to blame, and why.

    Attributes:
        settled: set once our learner has taken its place, or can't.
        lost: why our own learner can't; empty otherwise.
    """

    def __init__(
        self,
        context: Context,
        config: PipelineConfig,
        *,
        pipes: Pipes,
        side: LearnerSide,
        peers: Peers,
        key: ViewKey,
        place: Place,
        doubt: Callable[[str, str], None],
    ) -> None:
        self._context, self._config, self._pipes = context, config, pipes
        self._side, self._peers, self._doubt = side, peers, doubt
        self.key, self.place = key, place
        self.settled = asyncio.Event()
        self.lost = ""
        self._me = context.swarm.node_id
        self._form: Form | None = None
        self._task: asyncio.Task[Term] | None = None
        self._joints: Joints | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def offer(self) -> Offered:
        """Say how we stand, and, where torch might be chosen, whether we reach all others.

        Raises:
            Refusal: 503, there is no state yet.
        """
        mine = await offered(self._context, self._side)
        if not (mine.trusted and mine.gpu and mine.direct):
            return mine
        others = tuple(member for member in self.place.members if member != self._me)
        return msgspec.structs.replace(mine, direct=not await self._peers.silent(others))

    async def take_place(self, sender: str, form: Form) -> Term:
        """Do what the head ordered; the same order again is the same.

        Raises:
            Refusal: it isn't for us (409), makes no sense (400), or can't be done now (503).
        """
        asked = msgspec.structs.replace(form, call=0)
        async with self._turn:
            task = self._task
            if task is None or asked != self._form:
                term = self._check(sender, asked)
                await self._give_up()
                task = self._begin(term, asked)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise Refusal(409, "the group's view has ended") from error
            raise

    def _begin(self, term: Term, form: Form) -> asyncio.Task[Term]:
        if self._closed:
            raise Refusal(409, "the group's view has ended")
        self._form = form
        self._side.drop()
        circle = closes_circle(self._config, len(form.members))
        self._joints = Joints(
            self._pipes,
            form.key,
            form.generation,
            (self._me,) if form.alone or form.port else form.members,
            0 if form.alone or form.port else term.rank,
            circle=circle,
        )
        self._task = asyncio.create_task(self._take(term, form, self._joints), name="take-place")
        return self._task

    def _check(self, sender: str, form: Form) -> Term:
        """The generation that a head's order is about.

        Raises:
            Refusal: see `take_place`.
        """
        if sender != self.place.head or form.members[0] != sender:
            raise Refusal(409, "another node heads this pipeline")
        if sorted(form.members) != sorted(self.place.members):
            raise Refusal(409, "this pipeline has other members")
        last = self._side.last if self._form is None else max(self._side.last, self._form.generation)
        if form.generation <= last:
            raise Refusal(409, f"generation {form.generation} is over: {last} was here")
        if form.blocks != len(self._side.layers):
            raise Refusal(409, f"this node's policy has {len(self._side.layers)} blocks, not {form.blocks}")
        if form.port and not self._context.trusted_network:
            raise Refusal(409, "torch.distributed isn't allowed on this node: node.trusted_network is false")
        if bool(form.port) != (form.backend == "torch" and not form.alone):
            raise Refusal(400, f"a pipeline over {form.backend} has no ranks that meet at port {form.port}")
        try:
            rank = form.members.index(self._me)
            host = self._peers.address(sender).host if form.port else ""
            return term_of(self._config, form, rank, host)
        except ConfigError as error:
            raise Refusal(400, f"no such pipeline: {error}") from error
        except TransportError as error:
            raise Refusal(503, str(error)) from error

    async def _take(self, term: Term, form: Form, joints: Joints) -> Term:
        try:
            await self._take_state(form)
            pipes = await joints.complete(self._peers.address, FORM_S)
            await still_holds(self._context, form.digest, pipes)
            self._side.begin(term, pipes)
            await term.until_ready(MEET_S if form.port else READY_S)
        except Refusal as refusal:
            raise Refusal(BLAMELESS, refusal.reason) from refusal
        except TransportError as error:
            if joints.next is not None:
                self._doubt(joints.next, str(error))
            raise Refusal(BLAMELESS, str(error)) from error
        except WorkerError as error:
            self.lost = str(error)
            self.settled.set()
            raise Refusal(500, str(error)) from error
        finally:
            await joints.close()
        term.formed = True
        self.settled.set()
        return term

    async def _take_state(self, form: Form) -> None:
        """Hold exactly what the head holds."""
        for _ in range(TRIES):
            if await self._holds(form):
                return
            why = "a pipeline begins with its head's state"
            await self._context.swarm.adopted(form.members[0], form.lineage, why)
        if not await self._holds(form):
            raise Refusal(503, "the state that was taken isn't the head's")

    async def _holds(self, form: Form) -> bool:
        """Whether we have the head's parameters, and count as being of its lineage."""
        state, summary = await own_state(self._context), self._context.swarm.summary()
        return state.digest == form.digest and summary is not None and summary.lineage == form.lineage

    def accept(self, sender: str, head: PipeHead) -> PipeReply:
        """Take the previous rank's pipe.

        Raises:
            Refusal: see `Joints.accept`; 503, our head hasn't ordered anything yet.
        """
        if self._joints is None:
            raise Refusal(503, "this pipeline isn't being formed here yet")
        return self._joints.accept(sender, head)

    async def close(self) -> None:
        """The view ended: give up what isn't done."""
        self._closed = True
        await self._give_up()

    async def _give_up(self) -> None:
        task = self._task
        if task is not None and not task.done():
            task.cancel()
        if task is not None:
            await asyncio.gather(task, return_exceptions=True)
        if self._joints is not None:
            await self._joints.close()
