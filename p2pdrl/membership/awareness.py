"""Local health: how much this node distrusts itself (Lifeguard, section IV-A).

0 is well. Every sign that we, not the others, are slow (a late timer, a relay that sent no nack,
having to refute a suspicion) raises it; each good probe lowers it. Probe interval and deadline
are multiplied by health + 1, so an ailing node accuses others more slowly.
"""

from __future__ import annotations

__all__ = ["Awareness"]


class Awareness:
    """A counter between 0 and ``maximum``."""

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._score = 0

    @property
    def score(self) -> int:
        """0 (well) to the maximum."""
        return self._score

    def add(self, delta: int) -> None:
        """Raise (positive) or lower (negative) the score within its bounds."""
        self._score = min(self._maximum, max(0, self._score + delta))

    def scale(self, seconds: float) -> float:
        """``seconds`` stretched by the score."""
        return seconds * (self._score + 1)
