"""How late the daemon's event loop runs its tasks. A daemon that lags is suspected dead by its peers.

A task sleeps a short interval and notes how much later than asked it woke. A stall of L seconds hides
the wakings that should have fallen into it, so it counts as a waking every interval with lags L,
L − interval, …: the correction for coordinated omission (Tene, HdrHistogram). The daemon starts the
monitor; health, metrics and the digest read it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable

__all__ = ["LagWindow", "LoopLagMonitor"]


class LagWindow:
    """Lags of the wakings in the last ``window_s``, one every ``interval_s``."""

    def __init__(self, interval_s: float, window_s: float) -> None:
        self._interval_s = interval_s
        self._lags: deque[float] = deque(maxlen=max(1, round(window_s / interval_s)))

    def add(self, lag_s: float) -> None:
        """Note one waking that came ``lag_s`` late, and the wakings that it hid."""
        lag_s = max(0.0, lag_s)
        hidden = min(int(lag_s / self._interval_s), (self._lags.maxlen or 1) - 1)
        self._lags.extend(lag_s - self._interval_s * back for back in range(hidden, -1, -1))

    @property
    def p99_s(self) -> float:
        """The lag that 99 of 100 wakings in the window stayed within."""
        if not self._lags:
            return 0.0
        return sorted(self._lags)[min(len(self._lags) - 1, int(0.99 * len(self._lags)))]


class LoopLagMonitor:
    """Measures the lag of the running loop.

    Args:
        interval_s: seconds between two wakings. Shorter sees shorter stalls and costs more wakings.
        window_s: how far back the percentile looks.
        on_sample: called with each lag in seconds, for a histogram.
        monotonic: tells the time; None is the running loop's clock.
    """

    def __init__(
        self,
        interval_s: float = 0.2,
        window_s: float = 60.0,
        *,
        on_sample: Callable[[float], None] | None = None,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        monotonic: Callable[[], float] | None = None,
    ) -> None:
        self._interval_s = interval_s
        self._window = LagWindow(interval_s, window_s)
        self._on_sample = on_sample
        self._sleep = sleep
        self._monotonic = monotonic

    @property
    def p99_s(self) -> float:
        """The 99th percentile over the window."""
        return self._window.p99_s

    async def run(self) -> None:
        """Measure until cancelled."""
        monotonic = self._monotonic or asyncio.get_running_loop().time
        while True:
            asked_s = monotonic() + self._interval_s
            await self._sleep(self._interval_s)
            lag_s = max(0.0, monotonic() - asked_s)
            self._window.add(lag_s)
            if self._on_sample is not None:
                self._on_sample(lag_s)
