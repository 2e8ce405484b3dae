"""One parameter vector in shared memory that the learners of a node step in place, without locks.

Hogwild (Recht 2011, arXiv 1106.5730): aligned float32 are read and written whole; where two processes move
the same entry at once, one of the moves may be lost. A word before the vector says when the first learner
has put its parameters there; nobody steps before.

Shapes: the vector is flat, of D elements.
"""

from __future__ import annotations

import numpy as np

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.shm import SharedRegion, fence

__all__ = ["SharedVector"]

_HEADER_BYTES = 64


class SharedVector:
    """Views of the vector and of the word before it.

    Args:
        region: shared memory, of at least `nbytes_of` bytes.
        size: D.

    Raises:
        LayoutMismatchError: the region is too small.

    Example:
        >>> region = SharedRegion.create(SharedVector.nbytes_of(2), "vector")
        >>> first, other = SharedVector(region, 2), SharedVector(region, 2)
        >>> first.vector[:] = (1, 2)
        >>> first.fill()
        >>> other.filled, other.vector.tolist()
        (True, [1.0, 2.0])
    """

    def __init__(self, region: SharedRegion, size: int) -> None:
        if size < 1 or region.nbytes < self.nbytes_of(size):
            raise LayoutMismatchError(f"{size} shared floats don't fit into {region.nbytes} bytes")
        self._words = np.frombuffer(region.buf, np.uint64, 1)
        self.vector: Float32Array = np.frombuffer(region.buf, np.float32, size, _HEADER_BYTES)

    @staticmethod
    def nbytes_of(size: int) -> int:
        """Bytes of shared memory that a vector of ``size`` float32 takes."""
        return _HEADER_BYTES + 4 * size

    @property
    def filled(self) -> bool:
        """Whether the vector holds parameters."""
        return bool(self._words[0])

    def fill(self) -> None:
        """Say that the vector holds parameters, after they were written."""
        fence()
        self._words[0] = 1
