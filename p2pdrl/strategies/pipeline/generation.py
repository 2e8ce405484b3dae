"""One generation of a pipeline as one of its nodes sees it, and the bytes that its state copies move."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.pipeline.layers import Layer
from p2pdrl.pipeline.plan import StageNews, StageOrder, StageSide
from p2pdrl.strategies.pipeline.messages import Form
from p2pdrl.strategies.pipeline.port import Stages
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.transport.pipe.ticket import Pipe

__all__ = ["CopyBytes", "Generation", "LearnerSide", "blamed", "copy_bytes", "state_vectors"]


class CopyBytes(NamedTuple):
    """What a state copy moves at one rank: to both neighbours, and from both."""

    bytes_out: int = 0
    bytes_in: int = 0


def state_vectors(spec: BoardSpec) -> int:
    """Return how many vectors as long as the parameters the state has: they and the optimizer's."""
    whole = (spec.layout.size,)
    return 1 + sum(item.name.startswith("optimizer.") and item.shape == whole for item in spec.sidecar.items)


def copy_bytes(order: StageOrder, layers: Sequence[Layer], vectors: int) -> CopyBytes:
    """Return what one state copy moves at the rank of an order, without headers.

    Each rank sends its own slice to the previous one, and behind it those of the next ones; the whole passes
    back from rank to rank. Each slice has as many ``vectors`` as the state.
    """
    plan, rank = order.plan, order.rank
    slices = [
        vectors * sum(layers[number].parameter_bytes for number in plan.numbers(one))
        for one in range(plan.ranks)
    ]
    below, whole = sum(slices[rank + 1 :]), sum(slices)
    up = slices[rank] + below if rank > 0 else 0.0
    down_out, down_in = (whole if rank < plan.ranks - 1 else 0.0), (whole if rank > 0 else 0.0)
    return CopyBytes(int(up + down_out), int(below + down_in))


class Generation:
    """One generation of a pipeline, as one of its nodes sees it.

    Args:
        order: that our learner has.
        form: the coordinator's, to all ranks.
        rank: ours among its members.

    Attributes:
        members: node ids by rank; or all who compute by themselves.
        alone: whether they compute by themselves.
        formed: whether all is done, as far as we know, that comes before the work.
        copies: state copies so far.
        moves: bytes that each of them moves here.
        ended: with the last news of it, ``over`` or ``broken``.
    """

    def __init__(self, order: StageOrder, form: Form, rank: int) -> None:
        self.order, self.form, self.rank = order, form, rank
        self.members, self.alone = form.members, form.alone
        self.formed = False
        self.copies = 0
        self.moves = CopyBytes()
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[StageNews] = loop.create_future()
        self._ready: asyncio.Future[None] = loop.create_future()
        self._port: asyncio.Future[int] = loop.create_future()
        self._began_with: int | None = None

    @property
    def number(self) -> int:
        """By which orders and news name it; grows with each that a node has been in."""
        return self.order.generation

    @property
    def rank0(self) -> str:
        """Node id of the rank that coordinates it."""
        return self.members[0]

    @property
    def leads(self) -> bool:
        """Whether our learner makes experience: it is rank 0, or computes by itself."""
        return self.order.rank == 0

    @property
    def running(self) -> bool:
        """Whether it has neither ended nor broken."""
        return not self.ended.done()

    @property
    def progressed(self) -> bool:
        """Whether our learner has seen an update in it, as far as it could still say so."""
        if self.copies or self._began_with is None:
            return self.copies > 0
        return self.ended.done() and self.ended.result().policy_version > self._began_with

    async def until_ready(self, deadline_s: float) -> None:
        """Wait for the learner to be in place.

        Raises:
            WorkerError: it didn't in time, or the generation ended before.
        """
        await self._wait_for(self._ready, deadline_s, "ready")

    async def port(self, deadline_s: float) -> int:
        """Wait for the port of the store that the learner opens.

        Raises:
            WorkerError: as `until_ready`.
        """
        await self._wait_for(self._port, deadline_s, "at a meeting point")
        return self._port.result()

    async def _wait_for(
        self, news: asyncio.Future[int] | asyncio.Future[None], deadline_s: float, what: str
    ) -> None:
        await asyncio.wait({news, self.ended}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        if not news.done():
            why = self.ended.result().why if self.ended.done() else f"not within {deadline_s:g} s"
            raise WorkerError(f"the learner isn't {what} for generation {self.number}: {why}")

    def hear(self, news: StageNews) -> None:
        """Take in what the learner says of this generation."""
        if news.what == "ready" and not self._ready.done():
            self._began_with = news.policy_version
            self._ready.set_result(None)
        elif news.what == "meeting" and not self._port.done():
            self._port.set_result(news.port)
        elif news.what == "copied":
            self.copies += 1
        elif news.what in ("over", "broken") and not self.ended.done():
            self.ended.set_result(news)


def blamed(generation: Generation, news: StageNews) -> str:
    """Return the neighbour that broke a generation; empty when none is to blame."""
    if news.what != "broken" or news.side is None or len(generation.members) == 1:
        return ""
    step = 1 if news.side == "next" else -1
    return generation.members[(generation.rank + step) % len(generation.members)]


class LearnerSide:
    """The learner of this node: what it costs, and the generation that it serves in.

    Args:
        on_news: called with each news of the present generation, after that generation.
        over_torch: whether pipelines run over torch.distributed.
        may_nccl: whether they may where NCCL can reach the learner's GPU.
        vectors: says how many vectors the whole state has, the optimizer's too.

    Attributes:
        layers: what its blocks cost; empty before `measure`.
        device: where it computes.
        gpu_bytes: of its GPU's memory, as last asked, that its stage may take; 0 where nobody knows.
        gpu: what tells its GPU from all others; empty where NCCL can't reach one.
        generation: the last generation; None before the first, and after `drop`.
        last: number of the greatest generation so far.
    """

    def __init__(
        self,
        stages: Stages,
        on_news: Callable[[Generation, StageNews], None],
        *,
        over_torch: bool = False,
        may_nccl: bool = False,
        vectors: Callable[[], int] = lambda: 1,
    ) -> None:
        self._stages, self._on_news = stages, on_news
        self._over_torch, self._may_nccl = over_torch, may_nccl
        self._vectors = vectors
        self.layers: tuple[Layer, ...] = ()
        self.device, self.gpu_bytes, self.gpu = "", 0, ""
        self._microbatches = 1
        self.generation: Generation | None = None
        self.last = 0

    @property
    def seconds(self) -> float:
        """What all blocks take for one microbatch, forwards and backwards."""
        return sum(layer.forward_s + layer.backward_s for layer in self.layers)

    @property
    def running(self) -> Generation | None:
        """The generation that it serves in; None when there is none, or it ended."""
        generation = self.generation
        return generation if generation is not None and generation.running else None

    async def measure(self, microbatches: int, deadline_s: float) -> None:
        """Learn what blocks cost, and whether the learner answers.

        Args:
            microbatches: into which the longest batch is cut; one of them is measured.
            deadline_s: seconds, for each of two answers.

        Raises:
            WorkerError: it doesn't.
            ConfigError: the policy can't be cut.
        """
        ask = partial(self._stages.measure, microbatches, deadline_s=deadline_s)
        found = await ask(over_torch=self._over_torch)
        if found.gpu and self._may_nccl and not self._over_torch:
            await ask(over_torch=True)  # so that it is quick to meet the others, should it come to that
        self.layers, self.device = tuple(found.layers), found.device
        self.gpu_bytes, self.gpu, self._microbatches = found.usable_bytes, found.gpu, microbatches

    def begin(self, generation: Generation, pipes: Mapping[StageSide, Pipe]) -> None:
        """Give the learner its order; whatever it did before ends."""
        self.generation, self.last = generation, max(self.last, generation.number)
        generation.moves = copy_bytes(generation.order, self.layers, self._vectors())
        self._stages.work(generation.order, pipes)

    async def look_again(self, deadline_s: float) -> None:
        """Learn how much of a GPU is free now; without an answer in time what was known stays so."""
        if self.gpu_bytes:
            with contextlib.suppress(WorkerError, ConfigError):
                await self.measure(self._microbatches, deadline_s)

    def finish(self) -> None:
        """Have the present generation end after its update; for rank 0."""
        if self.running is not None:
            self._stages.finish(self.running.number)

    def drop(self) -> None:
        """Have nothing to do with the present generation any more.

        A learner that leads it ends it after its update at the latest: nobody would look after it any more.
        """
        if self.generation is not None and self.generation.leads:
            self.finish()
        self.generation = None

    async def listen(self) -> None:
        """Take in the learner's news, for ever; those of other generations are passed over."""
        while True:
            news = await self._stages.news()
            generation = self.generation
            if generation is not None and news.generation == generation.number:
                generation.hear(news)
                self._on_news(generation, news)
