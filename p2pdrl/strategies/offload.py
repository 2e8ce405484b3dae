"""Long arithmetic goes to threads, so that the event loop never waits; none outlives its strategy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from p2pdrl.transport.protocol import Refusal

__all__ = ["INLINE_BYTES", "Arithmetic", "heavy", "through"]

INLINE_BYTES = 1 << 20
"""Work on less than this costs less than handing it over."""

T = TypeVar("T")


async def heavy(nbytes: int, work: Callable[[], T]) -> T:
    """Run ``work`` and return its result; in a thread when it is about more than `INLINE_BYTES`.

    Cancelling waits for the thread first: until it ends, its buffers aren't for others.

    Args:
        nbytes: of the vectors that it reads and writes.
        work: touches nothing that the event loop changes meanwhile.
    """
    if nbytes <= INLINE_BYTES:
        return work()
    return await through(asyncio.to_thread(work))


async def through(work: Coroutine[Any, Any, T]) -> T:
    """Do ``work`` to its end even when we are cancelled meanwhile."""
    task = asyncio.create_task(work, name="to its end")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


class Arithmetic:
    """Runs `offload` work, until it is closed.

    Args:
        nbytes: length of the vectors in question.
    """

    def __init__(self, nbytes: int) -> None:
        self._nbytes = nbytes
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self.closed = False

    async def run(self, work: Callable[[], T]) -> T:
        """Return what ``work`` returns.

        Raises:
            Refusal: the strategy has ended (503): only a peer's call can still be around then.
        """
        if self.closed:
            raise Refusal(503, "the strategy that was called has ended")
        self._running += 1
        self._idle.clear()
        try:
            return await heavy(self._nbytes, work)
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    async def close(self) -> None:
        """Begin nothing more, and wait for the threads that work."""
        self.closed = True
        await self._idle.wait()
