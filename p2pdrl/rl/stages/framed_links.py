"""Links over anything that carries bytes: whoever has sockets or shared memory implements ``Carrier``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from p2pdrl.errors import WireError
from p2pdrl.rl.stages.frames import HEAD_BYTES, Head, bytes_of, check, decode, encode
from p2pdrl.rl.stages.links import Room, Way
from p2pdrl.rl.stages.messages import Message
from p2pdrl.rl.stages.rows import Slot

__all__ = ["Carrier", "FramedLinks"]


class Carrier(Protocol):
    """Four streams of bytes: down and up, in and out. See ``links.Links`` for who calls."""

    def write(self, way: Way, views: Sequence[bytes | memoryview]) -> None:
        """Write some pieces one after the other, without waiting; they stay as they are until that is done.

        Raises:
            PeerUnreachableError: the stream is broken.
        """
        ...

    def read(self, way: Way, views: Sequence[memoryview], timeout_s: float) -> None:
        """Fill pieces of memory with the next bytes, one after the other.

        Raises:
            PeerUnreachableError: the stream is broken.
            PeerTimeoutError: they didn't all come.
        """
        ...

    def close(self) -> None:
        """Break all four streams, and wake whoever reads."""
        ...


class FramedLinks:
    """Implements ``links.Links`` by frames. What is on other devices goes through the host's memory.

    Args:
        carrier: of the bytes.
    """

    def __init__(self, carrier: Carrier) -> None:
        self._carrier = carrier

    def send(self, way: Way, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """See ``Links.send``."""
        frame = encode(message, [tensor.cpu() for tensor in tensors])
        self._carrier.write(way, [frame.head, *frame.tensors])

    def receive(self, way: Way, room: Room, timeout_s: float) -> Message:
        """See ``Links.receive``."""
        head = Head.decode(self._read(way, HEAD_BYTES, timeout_s))
        message = decode(self._read(way, head.message_nbytes, timeout_s), cast("type[Message]", Message))
        slots = room(message)
        expected = sum(slot.tensor.nbytes for slot in slots)
        if expected != head.tensors_nbytes:
            raise WireError(f"a message with {head.tensors_nbytes} bytes of tensors should have {expected}")
        hosted = [Slot(_on_host(slot.tensor), slot.below) for slot in slots]
        if expected:
            self._carrier.read(way, [bytes_of(slot.tensor) for slot in hosted], timeout_s)
        for slot, (tensor, _) in zip(slots, hosted, strict=True):
            check(Slot(tensor, slot.below))
            if tensor is not slot.tensor:
                slot.tensor.copy_(tensor)
        return message

    def close(self) -> None:
        """See ``Links.close``."""
        self._carrier.close()

    def _read(self, way: Way, nbytes: int, timeout_s: float) -> bytearray:
        data = bytearray(nbytes)
        self._carrier.read(way, [memoryview(data)], timeout_s)
        return data


def _on_host(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or memory from which it can be copied to its device quickly."""
    if tensor.device.type == "cpu":
        return tensor
    how: dict[str, Any] = {"pin_memory": True} if tensor.is_cuda else {}
    return torch.empty(tensor.shape, dtype=tensor.dtype, **how)
