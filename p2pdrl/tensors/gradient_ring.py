"""A few vectors in shared memory through which a learner and its daemon hand gradients to each other.

The memory has no state of its own: who owns a slot is said by the messages of `workers.protocol`. A slot
belongs to the daemon from the post that names it until the answer to it, and to the learner otherwise.

Shapes: every slot is a flat vector of D float32; names carry no suffix.
"""

from __future__ import annotations

import numpy as np

from p2pdrl.errors import LayoutMismatchError, TensorError
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.shared_memory import SharedRegion

__all__ = ["GradientRing"]

_SECTION_BYTES = 64


class GradientRing:
    """Views of the slots, each beginning at a multiple of 64 bytes.

    Args:
        region: shared memory, of at least `nbytes_of` bytes.
        slots: vectors that it holds, 1 or more.
        size: D.

    Raises:
        LayoutMismatchError: the region is too small for them.
        TensorError: no slots, or vectors of no elements, were asked for.

    Example:
        >>> region = SharedRegion.create(GradientRing.nbytes_of(slots=2, size=3), "ring")
        >>> learner, daemon = GradientRing(region, 2, 3), GradientRing(region, 2, 3)
        >>> learner.slot(1)[:] = 0.5
        >>> daemon.slot(1).tolist()
        [0.5, 0.5, 0.5]
    """

    def __init__(self, region: SharedRegion, slots: int, size: int) -> None:
        needed = self.nbytes_of(slots, size)
        if region.nbytes < needed:
            raise LayoutMismatchError(
                f"{slots} gradients of {size} floats take {needed} bytes, the region has {region.nbytes}"
            )
        stride = _section(4 * size)
        self._slots = tuple(np.frombuffer(region.buf, np.float32, size, n * stride) for n in range(slots))

    @staticmethod
    def nbytes_of(slots: int, size: int) -> int:
        """Bytes of shared memory that ``slots`` vectors of ``size`` float32 take.

        Raises:
            TensorError: no slots, or vectors of no elements, were asked for.
        """
        if slots < 1 or size < 1:
            raise TensorError(f"a ring of {slots} vectors of {size} floats can't be made")
        return slots * _section(4 * size)

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, number: int) -> Float32Array:
        """A slot's vector: D float32, writable.

        Raises:
            TensorError: there is no such slot.
        """
        if not 0 <= number < len(self._slots):
            raise TensorError(f"the ring has slots 0 to {len(self._slots) - 1}, no {number}")
        return self._slots[number]


def _section(nbytes: int) -> int:
    return -(-nbytes // _SECTION_BYTES) * _SECTION_BYTES
