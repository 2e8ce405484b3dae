"""The tasks of one strategy: begun, watched and ended together; none outlives `Runner.stop`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["Runner"]

T = TypeVar("T")


class Runner:
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
        self._others = [asyncio.create_task(other, name="strategy-posts") for other in others]

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
        tasks = list(self._others)
        if self._main is not None:
            _, late = await asyncio.wait([self._main], timeout=timeout_s)
            for task in late:
                task.cancel()
            tasks.append(self._main)
        for task in self._beside:
            task.cancel()
        tasks.extend(self._beside)
        await asyncio.gather(*tasks, return_exceptions=True)
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
