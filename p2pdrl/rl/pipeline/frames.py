"""Messages and their tensors as bytes.

A frame is a message as MessagePack, and the memory of its tensors: their numbers as they lie there
(little-endian, rows first), one tensor right after the other. Whoever carries it keeps the two apart and
their lengths. Nothing in a frame says how tensors are cut out of its bytes: the receiver knows.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.errors import WireError
from p2pdrl.rl.pipeline.messages import Message
from p2pdrl.rl.pipeline.tensor_specs import TensorSlot

__all__ = ["Frame", "bytes_of", "decode", "encode", "fill", "on_host"]

T = TypeVar("T")

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("frames are written on little-endian machines only")


class Frame(NamedTuple):
    """A message, encoded.

    Attributes:
        message: at most some 4 KiB.
        tensors: views of their memory, in order, one dimension of bytes each.
    """

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
    """Copy the bytes of tensors to where they belong.

    Args:
        slots: on any device; to another than the CPU tensors are copied from the memory that they came in.
        data: all tensors.

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
