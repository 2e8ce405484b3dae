"""Tasks in the background whose errors are never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Coroutine
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["FirstFailure", "beside", "first_ended", "set_within"]


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Run ``work`` as a task while the block runs; cancel it at the block's end, and raise its error."""
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()


async def first_ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until one of them has ended, and end the others; all of them where the caller is cancelled."""
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


async def set_within(event: asyncio.Event, seconds: float) -> bool:
    """Wait until ``event`` is set, no longer than that; tell whether it is."""
    try:
        async with asyncio.timeout(seconds):
            return await event.wait()
    except TimeoutError:
        return False


class FirstFailure:
    """The first error of tasks that nobody awaits, raised in whoever watches."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._failed = asyncio.Event()

    def note(self, task: asyncio.Task[Any]) -> None:
        """Note how a task has ended; to be one of its done callbacks."""
        error = None if task.cancelled() else task.exception()
        if error is not None and self._error is None:
            self._error = error
            self._failed.set()

    async def watch(self) -> None:
        """Wait for ever; raise the first error, by now or before."""
        await self._failed.wait()
        if self._error is not None:
            raise self._error
