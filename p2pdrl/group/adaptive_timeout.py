"""How long to wait for the last of a group: a deadline that follows what was observed.

A fixed deadline is either so long that one dead member holds everybody up, or so short that a slow machine
is always left out. Here it is a high quantile of the arrivals seen lately, times a margin, between two
bounds. `round_collector` and the strategies with rounds use it. Pure: times are passed in. All in seconds.
"""

from __future__ import annotations

import math
from collections import deque

__all__ = ["AdaptiveTimeout"]

ENOUGH = 4
"""Observations below which nothing is known yet, and the longest wait holds."""


class AdaptiveTimeout:
    """A deadline that tunes itself.

    ``deadline_s = clamp(margin · quantile of the last ``window`` observations, least_s, most_s)``; before
    there are `ENOUGH` observations it is ``most_s``. Members that come after the deadline should be
    observed too, when they come: so the deadline grows with a swarm that became slower.

    Args:
        most_s: never wait longer.
        least_s: never wait shorter (above ``most_s`` it gives way): room for the pauses of a busy machine.
        quantile: in (0, 1], of the observations, by nearest rank.
        margin: factor on the quantile; more forgives more, and finds the dead later.

    Raises:
        ValueError: a bound is out of its range.

    Example:
        >>> timeout = AdaptiveTimeout(10.0)
        >>> timeout.deadline_s
        10.0
        >>> for _ in range(20):
        ...     timeout.observe(0.2)
        >>> round(timeout.deadline_s, 3)
        0.6
    """

    def __init__(
        self,
        most_s: float,
        *,
        least_s: float = 0.25,
        quantile: float = 0.95,
        margin: float = 3.0,
        window: int = 64,
    ) -> None:
        if not (most_s > 0 and least_s >= 0 and 0 < quantile <= 1 and margin >= 1 and window >= ENOUGH):
            raise ValueError("timeout needs positive bounds, a quantile in (0, 1] and a margin of 1 or more")
        self.most_s = most_s
        self._least_s = min(least_s, most_s)
        self._quantile = quantile
        self._margin = margin
        self._seen: deque[float] = deque(maxlen=window)
        self._deadline_s = most_s
        self._fresh = True

    def observe(self, seconds: float) -> None:
        """Note how long one arrival took; what isn't a time is passed over."""
        if math.isfinite(seconds) and seconds >= 0:
            self._seen.append(seconds)
            self._fresh = False

    @property
    def deadline_s(self) -> float:
        """How long to wait now."""
        if not self._fresh:
            self._fresh = True
            self._deadline_s = self._tuned()
        return self._deadline_s

    def _tuned(self) -> float:
        if len(self._seen) < ENOUGH:
            return self.most_s
        ordered = sorted(self._seen)
        rank = math.ceil(self._quantile * len(ordered)) - 1
        return min(max(self._margin * ordered[rank], self._least_s), self.most_s)
