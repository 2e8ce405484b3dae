"""A rank's part in the forming of a pipeline: it says what it holds, and takes the place that it is given."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import NamedTuple

import msgspec
import numpy as np
import psutil

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.errors import ConfigError, TensorError, TransportError, WorkerError
from p2pdrl.group.view import ViewKey
from p2pdrl.pipeline.plan import Meeting, StageOrder, StageSide
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.pipeline.calls import BLAMELESS, Peers
from p2pdrl.strategies.pipeline.connections import RankConnections
from p2pdrl.strategies.pipeline.generation import Generation, LearnerSide
from p2pdrl.strategies.pipeline.layout import PipelineMembers
from p2pdrl.strategies.pipeline.messages import Form, PipeHead, RankOffer
from p2pdrl.strategies.pipeline.planning import schedule_of
from p2pdrl.strategies.pipeline.port import Pipes
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.pipe.ticket import Pipe, PipeReply
from p2pdrl.transport.protocol import Refusal

__all__ = [
    "COME_S",
    "FORM_S",
    "IDLE_S",
    "MEET_S",
    "READY_S",
    "TORCH_S",
    "HeldState",
    "RankSetup",
    "closes_circle",
    "generation_of",
    "newest",
    "offered",
    "read_state",
    "still_holds",
    "usable_bytes",
]

PART = 0.8
"""Of what is available; the rest is for what nobody has counted, and for other processes."""
HOST = "cpu"


def usable_bytes(device: str, on_gpu: int = 0) -> int:
    """Return the bytes that a stage may take on a device now; 0 where nobody knows, which is no limit.

    Nodes that share a machine or a GPU see the same bytes, each of them all.

    Args:
        device: where the learner computes, as torch writes it.
        on_gpu: what it said of its GPU's memory when it was asked last, in bytes; 0 where it knows nothing.
    """
    available = psutil.virtual_memory().available if device == HOST else on_gpu
    return int(PART * available)


DIGEST_BYTES = 16


class HeldState(NamedTuple):
    """What is on a board, with all that was posted to it.

    Args:
        digest: of the parameters.
        policy_version: theirs.
    """

    digest: bytes
    policy_version: int


async def read_state(board: DaemonBoard, size: int) -> HeldState:
    """Read a board.

    Args:
        board: holds the parameters.
        size: D, float32 parameters.

    Raises:
        TensorError: there is nothing on it.
    """

    def work() -> HeldState:
        vector: Float32Array = np.empty(size, np.float32)
        version = board.now(vector).policy_version
        return HeldState(blake2b(vector.data.cast("B"), digest_size=DIGEST_BYTES).digest(), version)

    return await heavy(4 * size, work)


def newest(head: str, offers: Mapping[str, RankOffer]) -> str:
    """Return whose state all are to begin with.

    The lineage with the most environment steps stays, then the lower id, as everywhere (see `judgement`);
    in it the highest policy version; of equals the head, then the lowest node id.

    Args:
        head: node id; among the offers.
        offers: of all ranks.
    """
    steps: dict[str, int] = {}
    for offer in offers.values():
        steps[offer.lineage] = max(steps.get(offer.lineage, 0), offer.lineage_steps)
    lineage = min(steps, key=lambda one: (-steps[one], one))
    candidates = [peer for peer, offer in offers.items() if offer.lineage == lineage]
    return min(candidates, key=lambda peer: (-offers[peer].policy_version, peer != head, peer))


TORCH_S = (10.0, 30.0)
"""Least and longest wait for a neighbour with torch.distributed."""
COME_S = 30.0
"""Longest wait until all ranks have come to where they meet: some may be importing torch.distributed."""
IDLE_S = 600.0
"""Longest wait for the next minibatch, while the head makes experience; that it lives is seen elsewhere."""


def closes_circle(config: PipelineConfig, ranks: int) -> bool:
    """Whether the last rank sends to the first."""
    return schedule_of(config, ranks) == "interleaved"


def generation_of(config: PipelineConfig, form: Form, rank: int, host: str = "") -> Generation:
    """Return the generation in which a learner takes a rank.

    Args:
        config: the strategy's options, the same at all ranks.
        form: what the head ordered.
        rank: ours.
        host: where the store of torch.distributed is; for rank 0 where any other rank is.

    Raises:
        ConfigError: the numbers don't fit each other, or our options.
    """
    ranks = 1 if form.alone else len(form.members)
    if form.alone and form.cuts:
        raise ConfigError("peers that compute by themselves hold all blocks")
    over_torch = form.backend == "torch" and ranks > 1
    if ranks > 1 and config.backend not in ("auto", form.backend):
        raise ConfigError(f"pipelines run over {config.backend} here, not over {form.backend}")
    timeout_s = config.deadline_s
    if over_torch:
        timeout_s = min(max(TORCH_S[0], timeout_s), TORCH_S[1])
    order = StageOrder(
        generation=form.generation,
        rank=0 if form.alone else rank,
        blocks=form.blocks,
        cuts=form.cuts,
        schedule=schedule_of(config, ranks),
        microbatches=form.microbatches,
        ranks=ranks,
        timeout_s=timeout_s,
        idle_timeout_s=IDLE_S,
        state_every=config.state_every,
        tune=config.microbatches == "auto",
        backend=form.backend if ranks > 1 else "stream",
        meeting=Meeting(host, form.port, COME_S) if over_torch else None,
        checkpoint_activations=config.checkpoint_activations,
    )
    _ = order.plan  # raises
    return Generation(
        order,
        form.members,
        rank,
        alone=form.alone,
        why=form.why,
        step_s=form.step_s,
        bubble=form.bubble,
        lineage=form.lineage,
        policy_version=form.policy_version,
    )


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


async def own_state(context: StrategyContext) -> HeldState:
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


async def still_holds(context: StrategyContext, digest: bytes, pipes: Mapping[StageSide, Pipe]) -> None:
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


async def offered(context: StrategyContext, side: LearnerSide) -> RankOffer:
    """Say how we stand.

    Raises:
        Refusal: 503, there is no state yet.
    """
    state = await own_state(context)
    await side.look_again(LOOK_S)
    summary = context.swarm.summary()
    if summary is None:
        raise Refusal(503, "another state is being taken")
    return RankOffer(
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


class RankSetup:
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
        context: StrategyContext,
        config: PipelineConfig,
        *,
        pipes: Pipes,
        side: LearnerSide,
        peers: Peers,
        key: ViewKey,
        place: PipelineMembers,
        doubt: Callable[[str, str], None],
    ) -> None:
        self._context, self._config, self._pipes = context, config, pipes
        self._side, self._peers, self._doubt = side, peers, doubt
        self.key, self.place = key, place
        self.settled = asyncio.Event()
        self.lost = ""
        self._me = context.swarm.node_id
        self._form: Form | None = None
        self._task: asyncio.Task[Generation] | None = None
        self._connections: RankConnections | None = None
        self._turn = asyncio.Lock()
        self._closed = False

    async def offer(self) -> RankOffer:
        """Say how we stand, and, where torch might be chosen, whether we reach all others.

        Raises:
            Refusal: 503, there is no state yet.
        """
        mine = await offered(self._context, self._side)
        if not (mine.trusted and mine.gpu and mine.direct):
            return mine
        others = tuple(member for member in self.place.members if member != self._me)
        return msgspec.structs.replace(mine, direct=not await self._peers.silent(others))

    async def take_place(self, sender: str, form: Form) -> Generation:
        """Do what the head ordered; the same order again is the same.

        Raises:
            Refusal: it isn't for us (409), makes no sense (400), or can't be done now (503).
        """
        asked = msgspec.structs.replace(form, call=0)
        async with self._turn:
            task = self._task
            if task is None or asked != self._form:
                generation = self._check(sender, asked)
                await self._give_up()
                task = self._begin(generation, asked)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError as error:
            if task.cancelled():
                raise Refusal(409, "the group's view has ended") from error
            raise

    def _begin(self, generation: Generation, form: Form) -> asyncio.Task[Generation]:
        if self._closed:
            raise Refusal(409, "the group's view has ended")
        self._form = form
        self._side.drop()
        circle = closes_circle(self._config, len(form.members))
        self._connections = RankConnections(
            self._pipes,
            form.key,
            form.generation,
            (self._me,) if form.alone or form.port else form.members,
            0 if form.alone or form.port else generation.rank,
            circle=circle,
        )
        self._task = asyncio.create_task(self._take(generation, form, self._connections), name="take-place")
        return self._task

    def _check(self, sender: str, form: Form) -> Generation:
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
            return generation_of(self._config, form, rank, host)
        except ConfigError as error:
            raise Refusal(400, f"no such pipeline: {error}") from error
        except TransportError as error:
            raise Refusal(503, str(error)) from error

    async def _take(self, generation: Generation, form: Form, connections: RankConnections) -> Generation:
        try:
            await self._take_state(form)
            pipes = await connections.complete(self._peers.address, FORM_S)
            await still_holds(self._context, form.digest, pipes)
            self._side.begin(generation, pipes)
            await generation.until_ready(MEET_S if form.port else READY_S)
        except Refusal as refusal:
            raise Refusal(BLAMELESS, refusal.reason) from refusal
        except TransportError as error:
            if connections.next is not None:
                self._doubt(connections.next, str(error))
            raise Refusal(BLAMELESS, str(error)) from error
        except WorkerError as error:
            self.lost = str(error)
            self.settled.set()
            raise Refusal(500, str(error)) from error
        finally:
            await connections.close()
        generation.formed = True
        self.settled.set()
        return generation

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
            Refusal: see `RankConnections.accept`; 503, our head hasn't ordered anything yet.
        """
        if self._connections is None:
            raise Refusal(503, "this pipeline isn't being formed here yet")
        return self._connections.accept(sender, head)

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
        if self._connections is not None:
            await self._connections.close()
