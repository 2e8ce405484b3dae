"""How often something happens, in bounded memory.

Times are monotonic seconds that the caller hands in (``now_s``).
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["RateMeter"]


class RateMeter:
    """Events per second over a sliding window, in memory that doesn't grow with their number.

    The window is cut into ten slots; the meter forgets slot by slot, so a rate covers between
    nine and ten tenths of the window.

    Bursts further apart than half a window, such as the steps of updates that take long, are told by the
    last two: what the last brought over the time between them. That holds until twice that time has
    passed without another, and not for those more than six windows apart.

    Args:
        window_s: length of the window.
        began_s: when counting begins; none is the first call. Until a window has passed, the rate is
            over the time since.
    """

    SLOTS = 10
    FURTHEST = 6
    """Windows between two bursts that still tell a rate."""

    def __init__(self, window_s: float, began_s: float | None = None) -> None:
        if window_s <= 0:
            raise ValueError("a window has a length")
        self._slot_s = window_s / self.SLOTS
        self._began_s = began_s
        self._slots: deque[tuple[int, float]] = deque()  # (number of the slot, count)
        self._burst: tuple[float, float] | None = None  # of the last: its count and when
        self._gap_s = 0.0  # between it and the one before

    def add(self, count: float, now_s: float) -> None:
        """Count ``count`` more events."""
        if count:
            self._gap_s = 0.0 if self._burst is None else now_s - self._burst[1]
            self._burst = count, now_s
        number = self._number(now_s)
        if self._slots and self._slots[-1][0] >= number:
            number, before = self._slots.pop()
            count += before
        self._slots.append((number, count))
        self._forget(now_s)

    def rate(self, now_s: float) -> float:
        """Events per second."""
        self._forget(now_s)
        window_s = self._slot_s * self.SLOTS
        if self._burst is not None and window_s / 2 < self._gap_s <= self.FURTHEST * window_s:
            count, last_s = self._burst
            if now_s - last_s <= 2 * self._gap_s:
                return count / max(self._gap_s, now_s - last_s)
        covered_from_s = self._start(now_s) + max(0, self._first_kept(now_s)) * self._slot_s
        # Right after the start a slot's length stands in for the time that has passed.
        return math.fsum(count for _, count in self._slots) / max(self._slot_s, now_s - covered_from_s)

    def _number(self, now_s: float) -> int:
        return math.floor((now_s - self._start(now_s)) / self._slot_s)

    def _start(self, now_s: float) -> float:
        if self._began_s is None:
            self._began_s = now_s
        return self._began_s

    def _first_kept(self, now_s: float) -> int:
        return self._number(now_s) - self.SLOTS + 1

    def _forget(self, now_s: float) -> None:
        while self._slots and self._slots[0][0] < self._first_kept(now_s):
            self._slots.popleft()
