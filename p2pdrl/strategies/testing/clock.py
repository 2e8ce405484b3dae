"""The event loop's time, which tests replace by a virtual one."""

from __future__ import annotations

import asyncio

__all__ = ["LoopClock"]


class LoopClock:
    """The running loop's time."""

    def monotonic(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Seconds since the Unix epoch, of an invented day."""
        return 1_700_000_000.0 + self.monotonic()
