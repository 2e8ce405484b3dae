"""One strategy's work on long vectors: in threads, and none is left once the strategy has ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

from p2pdrl.strategies.heavy import heavy
from p2pdrl.transport.protocol import Refusal

__all__ = ["Arithmetic"]

T = TypeVar("T")


class Arithmetic:
    """Runs `heavy` work, until it is closed.

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
