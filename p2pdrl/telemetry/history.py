"""The recent past of a number, in bounded memory: for rates, means and the charts of the status page.

Times are monotonic seconds that the caller hands in (``t_s``, ``now_s``).
"""

from __future__ import annotations

import math
from collections import deque
from itertools import pairwise

__all__ = ["RateMeter", "Ring"]


class Ring:
    """The newest samples of one number.

    Args:
        capacity: samples remembered, at least 1.

    Example:
        >>> steps = Ring(capacity=100)
        >>> for second in range(5):
        ...     _ = steps.add(float(second), 10.0 * second)
        >>> steps.rate(window_s=3.0, now_s=4.0)
        10.0
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise ValueError("a ring holds at least one sample")
        self._samples: deque[tuple[float, float]] = deque(maxlen=capacity)

    def __len__(self) -> int:
        return len(self._samples)

    @property
    def last(self) -> tuple[float, float] | None:
        """The newest sample as (t_s, value)."""
        return self._samples[-1] if self._samples else None

    def add(self, t_s: float, value: float) -> bool:
        """Add a sample; tell whether it was taken.

        NaN and infinity aren't: JSON has no word for them, and a chart shows the gap.

        Raises:
            ValueError: if ``t_s`` lies before the newest sample.
        """
        if self._samples and t_s < self._samples[-1][0]:
            raise ValueError(f"time went back from {self._samples[-1][0]} to {t_s}")
        if not math.isfinite(value):
            return False
        self._samples.append((t_s, value))
        return True

    def window(self, since_s: float) -> list[tuple[float, float]]:
        """Samples with t_s > ``since_s``, oldest first."""
        found = []
        for sample in reversed(self._samples):
            if sample[0] <= since_s:
                break
            found.append(sample)
        return found[::-1]

    def mean(self, window_s: float, now_s: float) -> float | None:
        """Mean of the samples of the last ``window_s``; None when there are none."""
        values = [value for _, value in self.window(now_s - window_s)]
        return math.fsum(values) / len(values) if values else None

    def rate(self, window_s: float, now_s: float) -> float:
        """Growth per second of a running count over the last ``window_s``.

        Measured from the newest sample that is at least a window old, or else from the oldest one,
        up to now: so a count that stands still falls to zero. A count that drops was started again
        from zero, as Prometheus has it. With fewer than two samples the rate is zero.
        """
        samples = list(self._samples)
        start = max((i for i, (t_s, _) in enumerate(samples) if t_s <= now_s - window_s), default=0)
        samples = samples[start:]
        if len(samples) < 2 or now_s <= samples[0][0]:
            return 0.0
        grown = math.fsum(
            after - before if after >= before else after for (_, before), (_, after) in pairwise(samples)
        )
        return grown / (now_s - samples[0][0])

    def thinned(self, points: int) -> list[tuple[float, float]]:
        """At most ``points`` samples, evenly chosen, the newest among them: enough for a chart."""
        step = math.ceil(len(self._samples) / max(1, points))
        return list(self._samples)[:: -max(1, step)][::-1]


class RateMeter:
    """Events per second over a sliding window, in memory that doesn't grow with their number.

    The window is cut into ten slots; the meter forgets slot by slot, so a rate covers between
    nine and ten tenths of the window.

    Args:
        window_s: length of the window.
        began_s: when counting begins; none is the first call. Until a window has passed, the rate is
            over the time since.
    """

    SLOTS = 10

    def __init__(self, window_s: float, began_s: float | None = None) -> None:
        if window_s <= 0:
            raise ValueError("a window has a length")
        self._slot_s = window_s / self.SLOTS
        self._began_s = began_s
        self._slots: deque[tuple[int, float]] = deque()  # (number of the slot, count)

    def add(self, count: float, now_s: float) -> None:
        """Count ``count`` more events."""
        number = self._number(now_s)
        if self._slots and self._slots[-1][0] >= number:
            number, before = self._slots.pop()
            count += before
        self._slots.append((number, count))
        self._forget(now_s)

    def rate(self, now_s: float) -> float:
        """Events per second."""
        self._forget(now_s)
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
