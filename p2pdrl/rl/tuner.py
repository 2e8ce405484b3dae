"""Which number of microbatches is the fastest: a decision from measured times.

Pure: ``tuned_gradients`` computes gradients, looks at the clock and reports here.
"""

from __future__ import annotations

from statistics import median

__all__ = ["Tuner"]

FIRST_CANDIDATES = (1, 2, 4, 8)
WARM_UP = 1
"""Measurements of each candidate that are forgotten: the first one pays for what is made only once."""
REPEATS = 5
"""Measurements of each candidate that count, by their median."""


class Tuner:
    """Tries candidates in turn, so that a machine that slows down does so for all of them.

    More microbatches need less memory: a number that was too small takes all smaller ones with it. Where
    none of the first is left, it goes on doubling until one fits.

    Args:
        most: no more microbatches than this: the batch's length.

    Example:
        >>> tuner = Tuner(most=2)
        >>> while not tuner.done:
        ...     tuner.took({1: 0.5, 2: 0.25}[tuner.microbatches])
        >>> tuner.microbatches
        2
    """

    def __init__(self, most: int) -> None:
        self._most = max(most, 1)
        self._times_s: dict[int, list[float]] = {n: [] for n in FIRST_CANDIDATES if n <= self._most}
        self._picked: int | None = None

    @property
    def done(self) -> bool:
        """Whether every candidate was measured often enough."""
        return self._picked is not None

    @property
    def microbatches(self) -> int:
        """The number to use next: a candidate to measure, and the fastest once that is done."""
        if self._picked is not None:
            return self._picked
        return min(self._times_s, key=lambda n: (len(self._times_s[n]), n))

    @property
    def warming(self) -> bool:
        """Whether the next measurement is one that doesn't count."""
        return len(self._times_s[self.microbatches]) < WARM_UP

    @property
    def medians_s(self) -> dict[int, float]:
        """Median time of each candidate that was measured, in seconds per row."""
        counted = {n: times_s[WARM_UP:] for n, times_s in self._times_s.items()}
        return {n: median(times_s) for n, times_s in counted.items() if times_s}

    def took(self, seconds_per_row: float) -> None:
        """Say how long ``microbatches`` took."""
        if self.done:
            return
        self._times_s[self.microbatches].append(seconds_per_row)
        if all(len(times_s) >= WARM_UP + REPEATS for times_s in self._times_s.values()):
            medians_s = self.medians_s
            self._picked = min(medians_s, key=lambda n: (medians_s[n], n))

    def did_not_fit(self) -> bool:
        """Say that ``microbatches`` took too much memory; return whether there is another candidate."""
        failed = self.microbatches
        left = {n: times_s for n, times_s in self._times_s.items() if n > failed}
        if not left and failed >= self._most:
            return False
        self._times_s = left or {min(2 * failed, self._most): []}
        self._picked = None
        return True
