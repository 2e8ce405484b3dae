"""What ranks say to each other, as values and as bytes.

    down (to the next rank)                  up (to the rank before)
    Activation   of a microbatch, …          Gradient   of a microbatch's activation, …
                 the first with Opening      Sums       once each backward is done
    Step         the gradient is known
      … the next minibatch, or
    Over         the update is done          Slice      one of each rank below
    Whole        everybody's slices

All is said to neighbours; what concerns ranks further away is passed on. Activation, Gradient, Slice and
Whole bring tensors, whose shapes and types follow from the plan, the task and Opening's length and parts. A
number of microbatches, stages or steps that isn't the one expected is an error.

With ``torch_runner`` a minibatch has one Activation, whose tensors are targets and context of all rows, and
no Gradient: torch.distributed brings what they are named for.

A tensor on its way has rows first; the rest of its shape and its type are known to both sides from the task
(`RowSpec`), so nothing but the number of rows is taken from a message. As bytes, a message is a frame: itself
as MessagePack, and the memory of its tensors as it lies there (little-endian, rows first), one right after
the other. Its carrier keeps the two apart and their lengths. Nothing in a frame says how tensors are
cut out of its bytes.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta
from torch import Tensor

from p2pdrl.config.fields import Precision
from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.pipeline.plan import MAX_MICROBATCHES

__all__ = [
    "Activation",
    "Buffers",
    "Frame",
    "Gradient",
    "Message",
    "Opening",
    "RowSpec",
    "Slice",
    "StepMessage",
    "Sums",
    "TensorSlot",
    "UpdateOver",
    "Whole",
    "bytes_of",
    "decode",
    "encode",
    "fill",
    "on_host",
]

T = TypeVar("T")

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("frames are written on little-endian machines only")

_MAX_TERMS = 64
_MAX_OBJECTIVE_BYTES = 4096

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Index = Annotated[int, Meta(ge=0, le=MAX_MICROBATCHES)]


class Opening(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What must be known of a minibatch before its first forward."""

    generation: Count
    """Of the pipeline: what comes from an older one is refused."""
    step: Count
    """Number of minibatches stepped with, or skipped, before this one."""
    rows: Count
    """Rows that count: what sums are divided by."""
    length: Count
    """First dimension of its tensors."""
    parts: Annotated[int, Meta(ge=1, le=MAX_MICROBATCHES)]
    """Microbatches; ``gradients.cut`` says where."""
    precision: Precision
    objective: Annotated[bytes, Meta(max_length=_MAX_OBJECTIVE_BYTES)]
    """Fields of the objective, as MessagePack; its type is known."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """First dimension of each microbatch."""
        size, longer = divmod(self.length, self.parts)
        return (size + 1,) * longer + (size,) * (self.parts - longer)


class Activation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="activation"):
    """A stage's input; on its way to the last rank for the first time, with targets and context."""

    stage: Index
    """That gets it."""
    microbatch: Index
    opening: Opening | None = None
    """With the first message that a rank gets of a minibatch."""


class Gradient(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="gradient"):
    """Of the loss by a stage's output."""

    stage: Index
    """That gets it."""
    microbatch: Index


class Sums(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="sums"):
    """What the ranks from the sender on have found."""

    step: Count
    squares: float
    """Of their gradients' entries, added up."""
    terms: Annotated[tuple[float, ...], Meta(max_length=_MAX_TERMS)]
    """Of the objective."""


class StepMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="step"):
    """Clip and step, all by the same numbers; a sum of squares that isn't finite skips the step."""

    step: Count
    squares: float
    """Of the whole gradient."""
    learning_rate: float
    max_grad_norm: float
    took_s: float = 0.0
    """Seconds from the minibatch's beginning at the first rank until this, which no other rank knows."""


class UpdateOver(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="over"):
    """There are no more minibatches in this update: hand over the slices."""

    step: Count
    state: bool
    """With the optimizer's."""
    spread: bool
    """Every rank is to get all of them."""
    last: bool = False
    """The pipeline ends with this."""


class Slice(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="slice"):
    """The parameters of one rank, and with ``UpdateOver.state`` its optimizer's vectors."""

    rank: Index
    step: Count
    optimizer_steps: Count


class Whole(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag="whole"):
    """All slices, put together; or what the first rank has made of that, or has all ranks begin with."""

    step: Count
    optimizer_steps: Count
    version: Count = 0
    """Policy version that the first rank gives it."""
    position: Count = msgspec.field(default=0, name="place")
    """Of the first rank in its data, where that goes on in order: the next first rank goes on there."""
    changed: bool = False
    """Whether it isn't what the slices say: every rank goes on with its part of this."""


Message = Activation | Gradient | Sums | StepMessage | UpdateOver | Slice | Whole


class RowSpec(NamedTuple):
    """Tensors that differ in their number of rows alone.

    Attributes:
        below: what whole numbers are to be smaller than, as indices are; None where any will do.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    below: int | None = None

    def nbytes(self, rows: int) -> int:
        """Return the bytes of so many rows."""
        return rows * math.prod(self.shape) * self.dtype.itemsize

    def check(self, tensor: Tensor, what: str) -> None:
        """Check a tensor of this process."""
        if tensor.dtype != self.dtype or tuple(tensor.shape[1:]) != self.shape:
            raise LayoutMismatchError(
                f"{what} should have rows of {self.dtype} {self.shape}, "
                f"not of {tensor.dtype} {tuple(tensor.shape[1:])}"
            )


class TensorSlot(NamedTuple):
    """Where a tensor of a message is to be written.

    Attributes:
        tensor: in one piece; filled as a whole.
        below: as in ``RowSpec``: checked where tensors come from a network.
    """

    tensor: Tensor
    below: int | None = None


class Buffers:
    """Memory that is used over and over again: one microbatch's activations are like another's."""

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


class Frame(NamedTuple):
    """A message, encoded (at most some 4 KiB), and views of the memory of its tensors, as bytes."""

    message: bytes
    tensors: list[memoryview]


def encode(message: Message, tensors: Sequence[Tensor]) -> Frame:
    """Return the bytes of a message and of its tensors, which are on the CPU and in one piece."""
    return Frame(msgspec.msgpack.encode(message), [bytes_of(tensor) for tensor in tensors])


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Read MessagePack as ``kind``; for messages that is ``Message``.

    Raises:
        WireError: whatever is wrong with it.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"a stage's message can't be read: {str(error)[:200]}") from error


def fill(slots: Sequence[TensorSlot], data: memoryview) -> None:
    """Copy the bytes of all tensors to where they belong; to other devices from the memory that they came in.

    Raises:
        WireError: they have another length, or numbers among them would do harm.
    """
    ends = [0]
    for slot in slots:
        ends.append(ends[-1] + slot.tensor.nbytes)
    if data.nbytes != ends[-1]:
        raise WireError(f"a message with {data.nbytes} bytes of tensors should have {ends[-1]}")
    source: npt.NDArray[np.uint8] = np.frombuffer(data, np.uint8)
    for slot, (begin, end) in zip(slots, pairwise(ends), strict=True):
        if slot.tensor.device.type == "cpu":
            np.copyto(_array(slot.tensor), source[begin:end])
            _check(slot.tensor, slot.below)
        else:
            came = _as_came(source[begin:end], slot.tensor)
            _check(came, slot.below)
            slot.tensor.copy_(came)  # waits: the memory that it came in is used again afterwards


def on_host(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or a copy in host memory, which a GPU writes fastest where it is pinned."""
    if tensor.device.type == "cpu":
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor that is on the CPU and in one piece, as bytes; writable."""
    return _array(tensor).data


def _array(tensor: Tensor) -> npt.NDArray[np.uint8]:
    array: npt.NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return array


def _as_came(piece: npt.NDArray[np.uint8], like: Tensor) -> Tensor:
    """Return a tensor in the memory that its bytes came in, or a copy where they aren't aligned in it."""
    if not len(piece):  # torch can't see numbers of another length in it
        return torch.empty(like.shape, dtype=like.dtype)
    if not piece.flags.writeable or piece.ctypes.data % like.dtype.itemsize:
        piece = piece.copy()
    return torch.from_numpy(piece).view(like.dtype).view(like.shape)


def _check(tensor: Tensor, below: int | None) -> None:
    """Check that truth values are 0 or 1 and indices within bounds."""
    if tensor.dtype == torch.bool:
        tensor, below = tensor.view(torch.uint8), 2
    if below is not None and len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < below:
        raise WireError(f"a number that came isn't in 0 … {below - 1}")
