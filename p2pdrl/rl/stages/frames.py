"""Messages and their tensors as bytes.

    frame = mark(4) length of the message(4) length of the tensors(8) | message | tensor | tensor | …

Numbers of the head are big-endian, the message is MessagePack, tensors are their numbers as they lie in
memory (little-endian, rows first). Nothing in a frame says how tensors are cut out of its bytes: the
receiver knows.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from p2pdrl.errors import WireError
from p2pdrl.rl.stages.messages import Message
from p2pdrl.rl.stages.rows import Slot

__all__ = ["HEAD_BYTES", "MAX_MESSAGE_BYTES", "Frame", "Head", "bytes_of", "check", "decode", "encode"]

T = TypeVar("T")

_HEAD = struct.Struct(">4sIQ")
_MARK = b"p2S1"
HEAD_BYTES = _HEAD.size
MAX_MESSAGE_BYTES = 1 << 20

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("frames are written on little-endian machines only")


class Frame(NamedTuple):
    """A message, encoded.

    Attributes:
        head: the head and the message.
        tensors: views of their memory, in order, one dimension of bytes each.
    """

    head: bytes
    tensors: list[memoryview]


class Head(NamedTuple):
    """What begins a frame.

    Attributes:
        message_nbytes: length of the message.
        tensors_nbytes: length of all tensors.
    """

    message_nbytes: int
    tensors_nbytes: int

    @classmethod
    def decode(cls, data: bytes | bytearray | memoryview) -> Head:
        """Read a head.

        Raises:
            WireError: it isn't one, or the message is too long.
        """
        if len(data) != HEAD_BYTES:
            raise WireError("what came isn't the head of a stage's message")
        mark, message_nbytes, tensors_nbytes = _HEAD.unpack(data)
        if mark != _MARK or message_nbytes > MAX_MESSAGE_BYTES:
            raise WireError("what came isn't the head of a stage's message")
        return cls(message_nbytes, tensors_nbytes)


def encode(message: Message, tensors: Sequence[Tensor]) -> Frame:
    """Return the bytes of a message and of its tensors, which are on the CPU and in one piece."""
    views = [bytes_of(tensor) for tensor in tensors]
    encoded = msgspec.msgpack.encode(message)
    return Frame(_HEAD.pack(_MARK, len(encoded), sum(map(len, views))) + encoded, views)


def decode(data: bytes | bytearray | memoryview, kind: type[T]) -> T:
    """Read MessagePack as ``kind``; for messages that is ``Message``.

    Raises:
        WireError: whatever is wrong with it.
    """
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise WireError(f"a stage's message can't be read: {str(error)[:200]}") from error


def bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a tensor that is on the CPU and in one piece, as bytes; writable."""
    flat: npt.NDArray[np.uint8] = tensor.detach().view(-1).view(torch.uint8).numpy()
    return flat.data


def check(slot: Slot) -> None:
    """Check numbers that came over a network where some of them would do harm.

    Raises:
        WireError: a truth value is neither 0 nor 1, or an index is out of bounds.
    """
    tensor, below = slot
    if tensor.dtype == torch.bool:
        tensor, below = tensor.view(torch.uint8), 2
    if below is not None and len(tensor) and not 0 <= int(tensor.min()) <= int(tensor.max()) < below:
        raise WireError(f"a number that came isn't in 0 … {below - 1}")
