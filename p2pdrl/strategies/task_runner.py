"""The tasks of one strategy, begun, watched and ended together; outcomes of exchanges, counted."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Coroutine
from typing import Any, TypeVar

from p2pdrl.strategies.protocol import RoundReport, SwarmView

__all__ = ["OutcomeMetrics", "TaskRunner", "cancel_and_wait", "together"]

DISTANCE_MEMORY = 0.8
"""Part of the estimate that one more measurement leaves."""


class OutcomeMetrics:
    """One strategy's exchanges."""

    def __init__(self, swarm: SwarmView) -> None:
        self._swarm = swarm
        self._counts: Counter[str] = Counter()
        self._square: float | None = None

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges so far, by how they ended."""
        return dict(self._counts)

    def count(self, outcome: str) -> int:
        """How many ended so."""
        return self._counts[outcome]

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²) from the pairs that met.

        The mean over pairs of ‖x_i − x_j‖² is 2n/(n−1) times the square of it.
        """
        if self._square is None:
            return None
        nodes = len(self._swarm.alive()) + 1
        return math.sqrt(self._square * (nodes - 1) / (2 * nodes))

    def ended(self, report: RoundReport, *, ours: bool = True) -> None:
        """Note an exchange's end.

        Args:
            report: how it ended.
            ours: whether we began it, so that its time says something about the peer.
        """
        self._counts[report.outcome] += 1
        if ours:
            self._swarm.observed(report.outcome, report.seconds)
        self._swarm.round(report)

    def met(self, distance: float) -> None:
        """Note how far our parameters were from a peer's."""
        square, old = distance**2, self._square
        self._square = square if old is None else DISTANCE_MEMORY * old + (1 - DISTANCE_MEMORY) * square


T = TypeVar("T")


async def together(*jobs: Coroutine[Any, Any, T]) -> list[T]:
    """Run several things at a time; when one fails, or we are cancelled, end the others first."""
    if len(jobs) == 1:
        return [await jobs[0]]
    tasks = [asyncio.create_task(job, name="together") for job in jobs]
    try:
        return await asyncio.gather(*tasks)
    finally:
        await cancel_and_wait(*tasks)


async def cancel_and_wait(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their ends; what they raise is read, so that nobody complains of it."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class TaskRunner:
    """A main task that ends by itself once `stopping` is set, and others that are just cancelled.

    Attributes:
        stopping: set by `stop`: begin nothing new.
        news: set it when there may be something to do; see `rest`.
    """

    def __init__(self) -> None:
        self.stopping = False
        self.news = asyncio.Event()
        self._main: asyncio.Task[None] | None = None
        self._others: list[asyncio.Task[None]] = []
        self._short: set[asyncio.Task[Any]] = set()
        self._beside: set[asyncio.Task[None]] = set()
        self._bug: BaseException | None = None
        self._ended = asyncio.Event()

    def start(self, main: Coroutine[Any, Any, None], *others: Coroutine[Any, Any, None]) -> None:
        """Begin the tasks."""
        self._main = asyncio.create_task(main, name="strategy")
        self._others = [asyncio.create_task(other, name="strategy-beside") for other in others]

    def briefly(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Begin a short task that is never cancelled; `stop` waits for its end.

        What it raises ends the main task at its next `rest`.
        """
        task = asyncio.create_task(work, name="strategy-commit")
        self._short.add(task)
        task.add_done_callback(self._brief_ended)
        return task

    def beside(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Begin a task beside the main one, which `stop` cancels once the main one has ended.

        What it raises ends the main task at its next `rest`.
        """
        task = asyncio.create_task(work, name="strategy-beside")
        self._beside.add(task)
        task.add_done_callback(self._beside.discard)
        task.add_done_callback(self._brief_ended)
        return task

    async def rest(self, seconds: float) -> None:
        """Wait for news, at most so long."""
        if self._bug is not None:
            raise self._bug
        self.news.clear()
        try:
            async with asyncio.timeout(seconds):
                await self.news.wait()
        except TimeoutError:
            return

    async def stop(self, timeout_s: float) -> None:
        """Let the main task finish, at most ``timeout_s`` long; end the others. A bug is left to `watch`."""
        self.stopping = True
        self.news.set()
        for other in self._others:
            other.cancel()
        main = [] if self._main is None else [self._main]
        if main:
            await asyncio.wait(main, timeout=timeout_s)
        await cancel_and_wait(*main, *self._others, *self._beside)
        while self._short:
            # From Python 3.12 on to gather those that are done lets nobody run who would note their ends.
            await asyncio.wait(self._short)
        self._ended.set()

    async def watch(self) -> None:
        """Wait until it is stopped; raise what ended a task before: a bug of ours."""
        tasks = [task for task in (self._main, *self._others) if task is not None]
        if tasks:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in tasks:
            if task.done() and not task.cancelled():
                task.result()
        if self.stopping:
            await self._ended.wait()

    def _brief_ended(self, task: asyncio.Task[Any]) -> None:
        self._short.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._bug = task.exception()
            self.news.set()
