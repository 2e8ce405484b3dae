"""A sum tree in arrays: leaves have masses; one is found by where a number falls on their running sum.

The data structure of prioritized experience replay (Schaul 2016, arXiv 1511.05952, appendix B.2.1). There
each node has two children; here it has 32, as one NumPy call costs little more for 32 numbers than for two: a
hundred thousand leaves are found in two steps. The uppermost level, as soon as it has few nodes, is one list.
Running sums are taken where they are searched: keeping them would cost each change as much.

`memory` holds one; sets and finds work on whole batches.

Shape suffixes: N leaves of one call, F children of a node.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import TensorError

__all__ = ["SumTree"]

Float64Array = npt.NDArray[np.float64]
Int64Array = npt.NDArray[np.int64]

_FAN_OUT_BITS = 5
_FAN_OUT = 1 << _FAN_OUT_BITS
_LONGEST_TOP = 4096
_BELOW_ONE = 1.0 - 2.0**-53


class SumTree:
    """Masses of leaves 0 … size − 1, all zero at first.

    A node's mass is recomputed from its children's whenever one of them changes: rounding doesn't add up over
    time. Eight bytes and a little more for each leaf.

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
        nodes = size
        while nodes > _LONGEST_TOP or not self._masses:
            nodes = -(-nodes // _FAN_OUT)
            self._masses.append(np.zeros((nodes, _FAN_OUT)))
        self._top = np.zeros(nodes)
        self._ends: Float64Array | None = None

    def _running(self) -> Float64Array:
        """Return the running sums of the uppermost level."""
        if self._ends is None:
            self._ends = self._top.cumsum()
        return self._ends

    @property
    def total(self) -> float:
        """The mass of all leaves."""
        return float(self._running()[-1])

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
        for masses in self._masses:
            masses.reshape(-1)[nodes_N] = values_N
            nodes_N = nodes_N >> _FAN_OUT_BITS
            values_N = masses.take(nodes_N, axis=0).sum(axis=1)
        self._top[nodes_N] = values_N
        self._ends = None

    def fill(self, masses: Float64Array) -> None:
        """Give every leaf a new mass.

        Args:
            masses: float64, one for each leaf, finite and not negative.
        """
        values = masses
        for own in self._masses:
            own.reshape(-1)[: len(values)] = values
            values = own.sum(axis=1)
        self._top[:] = values
        self._ends = None

    def find(self, points_N: Float64Array) -> Int64Array:
        """Return the leaf on which each point falls, when all masses are laid end to end.

        A leaf without mass is never found, however the sums are rounded: what remains of a point below a node
        is kept below the last of its children's running sums.

        Args:
            points_N: float64, at least 0, less than `total`. In ascending order they are found quicker.

        Raises:
            TensorError: there is no mass at all.
        """
        ends = self._running()
        if not ends[-1] > 0.0:
            raise TensorError("all leaves of the sum tree have no mass: none can be found")
        nodes_N = ends.searchsorted(np.minimum(points_N, ends[-1] * _BELOW_ONE), side="right")
        rest_N = points_N - (ends.take(nodes_N) - self._top.take(nodes_N))
        rows_N = np.arange(len(points_N)) << _FAN_OUT_BITS
        for masses in reversed(self._masses):
            masses_NF = masses.take(nodes_N, axis=0)
            ends_NF = masses_NF.cumsum(axis=1)
            np.minimum(np.maximum(rest_N, 0.0), ends_NF[:, -1] * _BELOW_ONE, out=rest_N)
            children_N = (ends_NF > rest_N[:, None]).argmax(axis=1)
            found_N = rows_N + children_N
            rest_N -= ends_NF.take(found_N) - masses_NF.take(found_N)
            nodes_N = (nodes_N << _FAN_OUT_BITS) + children_N
        leaves_N: Int64Array = nodes_N
        return leaves_N
