"""What became of a strategy's exchanges: counted by outcome, told to the node, and the distance they show."""

from __future__ import annotations

import math
from collections import Counter

from p2pdrl.strategies.protocol import RoundReport, Swarm

__all__ = ["Tally"]

DISTANCE_MEMORY = 0.8
"""Part of the estimate that one more measurement leaves."""


class Tally:
    """One strategy's exchanges.

    Args:
        swarm: the node, which is told of each.
    """

    def __init__(self, swarm: Swarm) -> None:
        self._swarm = swarm
        self._counts: Counter[str] = Counter()
        self._square: float | None = None

    @property
    def outcomes(self) -> dict[str, int]:
        """Exchanges so far, by how they ended."""
        return dict(self._counts)

    def count(self, outcome: str) -> int:
        """How many ended so."""
        return self._counts[outcome]

    @property
    def consensus_distance(self) -> float | None:
        """Estimate of sqrt(mean over nodes of ‖x_i − x̄‖²) from the pairs that met.

        The mean over pairs of ‖x_i − x_j‖² is 2n/(n−1) times the square of it.
        """
        if self._square is None:
            return None
        nodes = len(self._swarm.alive()) + 1
        return math.sqrt(self._square * (nodes - 1) / (2 * nodes))

    def ended(self, report: RoundReport, *, ours: bool = True) -> None:
        """Note an exchange's end.

        Args:
            report: how it ended.
            ours: whether we began it, so that its time says something about the peer.
        """
        self._counts[report.outcome] += 1
        if ours:
            self._swarm.observed(report.outcome, report.seconds)
        self._swarm.round(report)

    def met(self, distance: float) -> None:
        """Note how far our parameters were from a peer's."""
        square, old = distance**2, self._square
        self._square = square if old is None else DISTANCE_MEMORY * old + (1 - DISTANCE_MEMORY) * square
