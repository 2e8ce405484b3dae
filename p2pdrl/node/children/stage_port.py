"""The learner as a rank of a pipeline: orders with their pipes go to it, news of them come back.

It works over whichever learner process runs at the moment; `supervisor` keeps one. A pipe is the learner's as
soon as its descriptor was sent: the daemon gives its own up at once, so that the pipe ends with the learner.
It counts as one of the peer's until its generation is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.pipeline.plan import StageNews, StageOrder, StageSide
from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.strategies.pipeline.port import Measured
from p2pdrl.transport.pipe.ticket import Pipe
from p2pdrl.workers.pipeline.protocol import Blocks, Finish, Measure, News, StartStage, Trace, Traced
from p2pdrl.workers.protocol import ToLearner

__all__ = ["StagePort"]

ORDERS: tuple[type[ToLearner], ...] = (StartStage, Finish)


class StagePort:
    """Implements `strategies.pipeline.port.Stages`.

    Args:
        learner: tells the one that runs and can be told something; None while there is none.
    """

    def __init__(self, learner: Callable[[], LearnerLink | None]) -> None:
        self._learner = learner
        self._order: StageOrder | None = None
        self._answered = False
        self._pipes: tuple[Pipe, ...] = ()
        self._news: asyncio.Queue[StageNews] = asyncio.Queue()
        self._measuring = asyncio.Lock()
        self._asked: tuple[int, asyncio.Future[Blocks]] | None = None
        self._traces: dict[int, asyncio.Future[Traced]] = {}
        self._number = 0

    @property
    def order(self) -> StageOrder | None:
        """What the learner works at; None when that is over, or there was nothing."""
        return self._order

    @property
    def unanswered(self) -> bool:
        """Whether the learner has an order, and has neither become its stage nor said that it can't."""
        return self._order is not None and not self._answered

    async def measure(self, microbatches: int, *, deadline_s: float, over_torch: bool = False) -> Measured:
        """Return what each block costs here with one of so many microbatches, and what it computes on.

        Raises:
            WorkerError: it didn't answer in time, or is gone.
            ConfigError: the policy can't be cut.
        """
        try:
            async with asyncio.timeout(deadline_s), self._measuring:
                blocks = await self._measured(Measure(microbatches, over_torch))
        except TimeoutError as error:
            raise WorkerError(f"the learner didn't measure its blocks within {deadline_s:g} s") from error
        if blocks.error:
            raise ConfigError(blocks.error)
        return Measured(blocks.layers, blocks.device, blocks.usable_bytes, blocks.gpu)

    async def _measured(self, asked: Measure) -> Blocks:
        learner = self._learner()
        if learner is None:
            raise WorkerError("the learner is down")
        answer: asyncio.Future[Blocks] = asyncio.get_running_loop().create_future()
        self._asked = (asked.microbatches, answer)
        try:
            learner.tell(asked)
            return await answer
        finally:
            self._asked = None

    async def trace(self, seconds: float, *, deadline_s: float) -> list[TraceSpan]:
        """Return what the learner did as a stage in the last seconds, in times of ``time.monotonic``.

        Raises:
            WorkerError: it didn't answer in time, or is gone.
        """
        learner = self._learner()
        if learner is None:
            raise WorkerError("the learner is down")
        self._number += 1
        number = self._number
        answer = self._traces[number] = asyncio.get_running_loop().create_future()
        try:
            learner.tell(Trace(number, seconds))
            async with asyncio.timeout(deadline_s):
                traced = await answer
        except TimeoutError as error:
            raise WorkerError(f"the learner didn't tell what it did within {deadline_s:g} s") from error
        finally:
            del self._traces[number]
        ahead_s = traced.monotonic_s - traced.clock_s
        return [
            span._replace(start_s=span.start_s + ahead_s, end_s=span.end_s + ahead_s) for span in traced.spans
        ]

    def work(self, order: StageOrder, pipes: Mapping[StageSide, Pipe]) -> None:
        """Have the learner be a stage; whatever it did before ends, and so do the pipes of that."""
        self._end()
        self._order, self._pipes = order, tuple(pipes.values())
        self._answered = False
        learner = self._learner()
        if learner is None:
            self.died("the learner is down")
            return
        tickets = tuple((side, pipe.ticket) for side, pipe in pipes.items())
        learner.tell(StartStage(order, tickets), self._pipes, _detaching(self._pipes))

    def finish(self, generation: int) -> None:
        """Have rank 0 end the generation after the update that it is in."""
        learner = self._learner()
        if learner is not None:
            learner.tell(Finish(generation))

    async def news(self) -> StageNews:
        """Wait for the next news; cancelling loses none."""
        return await self._news.get()

    def heard(self, message: Blocks | Traced | News) -> None:
        """Note what the learner said; what is about an order that is over is passed over."""
        if isinstance(message, News):
            self._hear(message.news)
        elif isinstance(message, Traced):
            traced = self._traces.get(message.number)
            if traced is not None and not traced.done():
                traced.set_result(message)
        elif self._asked is not None:
            microbatches, blocks = self._asked
            if microbatches == message.microbatches and not blocks.done():
                blocks.set_result(message)

    def _hear(self, news: StageNews) -> None:
        if self._order is None or news.generation != self._order.generation:
            return
        # who has opened the store has yet to meet the others
        self._answered = news.what != "meeting"
        if news.what in ("over", "broken"):
            self._end()
        self._news.put_nowait(news)

    def died(self, why: str) -> None:
        """The learner is gone: its generation is broken, and whoever waits for figures waits in vain."""
        order = self._order
        self._end()
        if order is not None:
            self._news.put_nowait(StageNews(order.generation, "broken", why=why))
        waiting: list[asyncio.Future[Any]] = [*self._traces.values()]
        if self._asked is not None:
            waiting.append(self._asked[1])
        for future in waiting:
            if not future.done():
                future.set_exception(WorkerError(why))

    def close(self) -> None:
        """Another mode follows, which ends every order: what wasn't told or heard of one is dropped."""
        self._end()
        learner = self._learner()
        if learner is not None:
            for kind in ORDERS:
                learner.withdraw(kind)
        while not self._news.empty():
            self._news.get_nowait()

    def _end(self) -> None:
        pipes, self._pipes, self._order = self._pipes, (), None
        for pipe in pipes:
            pipe.close()


def _detaching(pipes: Sequence[Pipe]) -> Callable[[], None]:
    def detach() -> None:
        for pipe in pipes:
            pipe.detach()

    return detach
