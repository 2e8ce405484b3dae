"""A small vector for each node, from independent starts, to see how fast a strategy brings them together.

No learner changes it (learning rate zero): what is left of the first consensus distance,
sqrt(mean over nodes of ‖x_i − x̄‖²), is what mixing has left.

Shapes: N nodes, E = 16 entries.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["AGREED", "Replicas"]

ENTRIES = 16
AGREED = 0.01
"""Share of the first distance at which nodes count as agreed."""


class Replicas:
    """The vectors, and when they had come together.

    Args:
        capacity: nodes at most.
        nodes: there at first.
        seed: of the starts.

    Attributes:
        x_NE: one row for each node.
        agreed_s: when the distance had fallen to `AGREED`; None before.
        mixes: exchanges, pushes or rounds of a node that changed rows.
        agreed_mixes: that count at ``agreed_s``.
        walk: (seconds, part of the first distance) at each look.
    """

    def __init__(self, capacity: int, nodes: int, seed: int) -> None:
        self.x_NE: npt.NDArray[np.float64] = np.random.default_rng(seed).normal(size=(capacity, ENTRIES))
        self._up = np.zeros(capacity, bool)
        self._up[:nodes] = True
        self._first = self.distance() or 1.0
        self.agreed_s: float | None = 0.0 if nodes < 2 else None
        self.mixes = 0
        self.agreed_mixes = 0
        self.walk: list[tuple[float, float]] = [(0.0, 1.0)]
        self._every = 1 if nodes <= 32 else nodes // 4
        self._left = self._every

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to see, so that mixing needn't be done."""
        return self.agreed_s is not None

    def distance(self) -> float:
        """The consensus distance of those that are there."""
        x_NE = self.x_NE[self._up]
        return float(np.sqrt(np.square(x_NE - x_NE.mean(0)).sum(1).mean())) if len(x_NE) else 0.0

    def part(self) -> float:
        """What is left of the first distance."""
        return self.distance() / self._first

    def changed(self, now_s: float) -> None:
        """Rows were mixed; now and then look how far apart they are."""
        self.mixes += 1
        self._left -= 1
        if self._left <= 0 and self.agreed_s is None:
            self._left = self._every
            self.look(now_s)

    def look(self, now_s: float) -> None:
        """See whether they have agreed."""
        part = self.part()
        self.walk.append((now_s, part))
        if part <= AGREED and self.agreed_s is None:
            self.agreed_s, self.agreed_mixes = now_s, self.mixes

    def alike(self, rows: list[int], value_E: npt.NDArray[np.float64], now_s: float) -> None:
        """All of ``rows`` have the same from now on."""
        if not self.settled:
            self.x_NE[rows] = value_E
            self.mixes += len(rows)
            self.look(now_s)

    def left(self, node: int) -> None:
        """A node is gone."""
        self._up[node] = False

    def joined(self, node: int, donor: int) -> None:
        """A node is there, with the state of ``donor``."""
        self._up[node] = True
        self.x_NE[node] = self.x_NE[donor]
