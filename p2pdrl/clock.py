"""Time as a value that is passed in, so that cores and tests decide what it is.

`SystemClock` serves the daemon, `LoopClock` what counts by the event loop's time (virtual in tests and in
virtual swarms), `ManualClock` unit tests and the simulator.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

__all__ = ["Clock", "LoopClock", "ManualClock", "SystemClock"]


class Clock(Protocol):
    """A source of monotonic and of wall time, both in seconds."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""

    def wall(self) -> float:
        """Seconds since the Unix epoch; may jump."""


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> float:
        """Seconds of ``time.monotonic``."""
        return time.monotonic()

    def wall(self) -> float:
        """Seconds of ``time.time``."""
        return time.time()


class ManualClock:
    """A clock that stands still until it is advanced.

    Args:
        monotonic_s: first monotonic reading.
        wall_s: first wall reading, seconds since the Unix epoch.
    """

    def __init__(self, monotonic_s: float = 0.0, wall_s: float = 1_700_000_000.0) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s

    def monotonic(self) -> float:
        """The current monotonic reading."""
        return self._monotonic_s

    def wall(self) -> float:
        """The current wall reading."""
        return self._wall_s

    def advance(self, seconds: float) -> None:
        """Move both readings forward.

        Raises:
            ValueError: if ``seconds`` is negative.
        """
        if seconds < 0:
            raise ValueError("a clock can't be advanced by a negative time")
        self._monotonic_s += seconds
        self._wall_s += seconds

    def jump(self, seconds: float) -> None:
        """Set the wall clock forward, or back, as a person or NTP may."""
        self._wall_s += seconds


class LoopClock:
    """The running event loop's time, which tests replace by a virtual one.

    Args:
        wall_s: wall reading when the loop's time is zero, seconds since the Unix epoch.
    """

    def __init__(self, wall_s: float = 1_700_000_000.0) -> None:
        self._wall_s = wall_s

    def monotonic(self) -> float:
        """Seconds of the loop."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Seconds of the loop, from ``wall_s`` on."""
        return self._wall_s + self.monotonic()
