"""What a tensor of rows looks like before it is there, and memory for such tensors.

Everything that passes between stages has rows first; the rest of its shape and its type are known to both
sides from the task, so nothing but the number of rows is taken from a message.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from p2pdrl.errors import LayoutMismatchError

__all__ = ["Buffers", "RowSpec", "TensorSlot"]


class RowSpec(NamedTuple):
    """Tensors that differ in their number of rows alone.

    Attributes:
        shape: of one row.
        dtype: of all numbers.
        below: what whole numbers are to be smaller than, as indices are; None where any will do.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None

    def nbytes(self, rows: int) -> int:
        """Return the bytes of so many rows."""
        return rows * math.prod(self.shape) * self.dtype.itemsize

    def check(self, tensor: Tensor, what: str) -> None:
        """Check a tensor of this process.

        Raises:
            LayoutMismatchError: its rows are of another shape or type.
        """
        if tensor.dtype != self.dtype or tuple(tensor.shape[1:]) != self.shape:
            raise LayoutMismatchError(
                f"{what} should have rows of {self.dtype} {self.shape}, "
                f"not of {tensor.dtype} {tuple(tensor.shape[1:])}"
            )


class TensorSlot(NamedTuple):
    """Where a tensor of a message is to be written.

    Attributes:
        tensor: in one piece; filled as a whole.
        below: as in ``RowSpec``: whoever reads from a network checks it.
    """

    tensor: Tensor
    below: int | None = None


class Buffers:
    """Memory that is used over and over again: one microbatch's activations are like another's.

    Args:
        device: where the memory is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: dict[RowSpec, list[Tensor]] = {}

    def take(self, spec: RowSpec, rows: int) -> Tensor:
        """Return memory for at least so many rows, whatever is in it."""
        free = self._free.get(spec)
        buffer = free.pop() if free else None
        if buffer is None or len(buffer) < rows:
            buffer = torch.empty((rows, *spec.shape), dtype=spec.dtype, device=self._device)
        return buffer

    def give(self, spec: RowSpec, buffer: Tensor) -> None:
        """Take back what ``take`` gave: nobody reads it any more."""
        self._free.setdefault(spec, []).append(buffer)
