"""Links over anything that carries bytes: whoever has sockets or shared memory implements ``Carrier``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from p2pdrl.rl.stages.frames import decode, encode, fill, on_host
from p2pdrl.rl.stages.links import Room, Way
from p2pdrl.rl.stages.messages import Message

__all__ = ["Carrier", "FramedLinks"]


class Carrier(Protocol):
    """Four streams of frames: down and up, in and out. See ``links.Links`` for who calls."""

    def send(self, way: Way, message: bytes, tensors: Sequence[memoryview]) -> None:
        """Send a frame without waiting for anybody; its memory stays as it is until it has arrived.

        Raises:
            PeerUnreachableError: the stream is broken.
        """
        ...

    def receive(self, way: Way, timeout_s: float) -> tuple[bytes, memoryview]:
        """Return the next frame that goes this way: the message, and all tensors in one piece.

        That piece is read before anything else is received, and not any more afterwards.

        Raises:
            PeerUnreachableError: the stream is broken.
            PeerTimeoutError: no whole frame came.
            WireError: what came is no frame, or longer than any can be (``Parts.longest_nbytes``).
        """
        ...

    def close(self) -> None:
        """Break all four streams, and wake whoever waits."""
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
        frame = encode(message, [on_host(tensor) for tensor in tensors])
        self._carrier.send(way, frame.message, frame.tensors)

    def receive(self, way: Way, room: Room, timeout_s: float) -> Message:
        """See ``Links.receive``."""
        encoded, data = self._carrier.receive(way, timeout_s)
        message = decode(encoded, cast("type[Message]", Message))
        fill(room(message), data)
        return message

    def close(self) -> None:
        """See ``Links.close``."""
        self._carrier.close()
