"""A sum tree in arrays: leaves have masses; one is found by where a number falls on their running sum.

The data structure of prioritized experience replay (Schaul 2016, arXiv 1511.05952, appendix B.2.1). There
each node has two children; here it has sixteen, as one NumPy call costs as much for sixteen numbers as for
two. Every block of siblings keeps the running sums of their masses, so a search compares once per level. The
upper levels, as soon as they have few nodes, are one list that is summed at each search.

`memory` holds one; sets and finds work on whole batches.

Shape suffixes: N leaves of one call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import TensorError

__all__ = ["SumTree"]

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_FAN_OUT = 16
_LONGEST_TOP = 1024
_BELOW_ONE = 1.0 - 2.0**-53


class SumTree:
    """Masses of leaves 0 … size − 1, all zero at first.

    A node's mass is recomputed from its children's whenever one of them changes: rounding doesn't add up over
    time. Sixteen bytes and a little more for each leaf.

    Args:
        size: at least 1.

    Example:
        >>> tree = SumTree(4)
        >>> tree.set(np.array([1, 3]), np.array([2.0, 6.0]))
        >>> tree.total, tree.find(np.array([0.0, 1.9, 2.0, 7.9])).tolist()
        (8.0, [1, 1, 3, 3])
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise TensorError(f"a sum tree of {size} leaves can't be made")
        self.size = size
        self._masses: list[Float64Array] = []
        self._sums: list[Float64Array] = []
        nodes = size
        while nodes > _LONGEST_TOP or not self._masses:
            nodes = -(-nodes // _FAN_OUT)
            self._masses.append(np.zeros(nodes * _FAN_OUT))
            self._sums.append(np.zeros((nodes, _FAN_OUT)))
        self._top = np.zeros(nodes)

    @property
    def total(self) -> float:
        """The mass of all leaves."""
        return float(self._top.cumsum()[-1])

    def masses(self, leaves_N: Int64Array) -> Float64Array:
        """Return the masses of some leaves."""
        return self._masses[0].take(leaves_N)

    def set(self, leaves_N: Int64Array, masses_N: Float64Array) -> None:
        """Give leaves new masses; of a leaf that is named more than once the last one counts.

        Args:
            leaves_N: from 0 to size − 1.
            masses_N: float64, finite and not negative: that isn't checked.
        """
        nodes_N, values_N = leaves_N, masses_N
        for masses, sums in zip(self._masses, self._sums, strict=True):
            masses[nodes_N] = values_N
            nodes_N = nodes_N // _FAN_OUT
            block = masses.reshape(-1, _FAN_OUT).take(nodes_N, axis=0).cumsum(axis=1)
            sums[nodes_N] = block
            values_N = block[:, -1]
        self._top[nodes_N] = values_N

    def fill(self, masses: Float64Array) -> None:
        """Give every leaf a new mass.

        Args:
            masses: float64, one for each leaf, finite and not negative.
        """
        values = masses
        for own, sums in zip(self._masses, self._sums, strict=True):
            own[: len(values)] = values
            np.cumsum(own.reshape(-1, _FAN_OUT), axis=1, out=sums)
            values = sums[:, -1]
        self._top[:] = values

    def find(self, points_N: Float64Array) -> Int64Array:
        """Return the leaf on which each point falls, when all masses are laid end to end.

        A leaf without mass is never found, however the sums are rounded: what remains of a point below a node
        is kept below the node's mass, which is the last of its children's running sums.

        Args:
            points_N: float64, at least 0, less than `total`. In ascending order they are found quicker.

        Raises:
            TensorError: there is no mass at all.
        """
        ends = self._top.cumsum()
        if not ends[-1] > 0.0:
            raise TensorError("all leaves of the sum tree have no mass: none can be found")
        nodes_N = ends.searchsorted(np.minimum(points_N, ends[-1] * _BELOW_ONE), side="right")
        rest_N = _within(points_N, ends.take(nodes_N), self._top.take(nodes_N))
        for masses, sums in zip(reversed(self._masses), reversed(self._sums), strict=True):
            children_N = (sums.take(nodes_N, axis=0) > rest_N[:, None]).argmax(axis=1)
            nodes_N = nodes_N * _FAN_OUT + children_N
            rest_N = _within(rest_N, sums.reshape(-1).take(nodes_N), masses.take(nodes_N))
        leaves_N: Int64Array = nodes_N
        return leaves_N


def _within(points_N: Float64Array, ends_N: Float64Array, masses_N: Float64Array) -> Float64Array:
    """Return how far each point lies behind the beginning of its node, less than the node's mass."""
    return np.minimum(np.maximum(points_N - (ends_N - masses_N), 0.0), masses_N * _BELOW_ONE)
