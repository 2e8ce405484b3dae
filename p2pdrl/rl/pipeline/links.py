"""What connects a rank with its two neighbours: queues between threads, or anything that carries bytes."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Protocol, TypeVar, cast

from torch import Tensor

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.rl.pipeline.messages import Message, TensorSlot, decode, encode, fill, on_host

__all__ = [
    "Carrier",
    "FramedLinks",
    "Links",
    "MemoryLinks",
    "Room",
    "Way",
    "receive",
    "receive_any",
    "receive_kind",
    "ring",
]

_Kind = TypeVar("_Kind", bound=Message)

Way = Literal["down", "up"]
"""Down go activations, from each rank to the next and from the last to the first; up go gradients."""

Room = Callable[[Message], Sequence[TensorSlot]]
"""Looks at a message and says where its tensors go; raises ``WireError`` if it isn't the one expected."""


class Links(Protocol):
    """Four streams: down and up, in and out. Of each, messages arrive in the order in which they were sent.

    One thread sends and receives; any may close.
    """

    def send(self, way: Way, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message and its tensors, in one piece each, on any device, without waiting for anybody.

        The sender doesn't write to the tensors before it knows that they have arrived.

        Raises:
            PeerUnreachableError: the link is broken.
        """

    def receive(self, way: Way, room: Room, timeout_s: float) -> Message:
        """Wait for the next message that goes this way, and write its tensors where ``room`` says.

        Raises:
            PeerUnreachableError: the link is broken.
            PeerTimeoutError: the message didn't come, or not all of it.
            WireError: it isn't the one expected, or its tensors have another length.
        """

    def close(self) -> None:
        """Break all four streams; waits for messages, here and at the neighbours, end at once."""


def receive(
    links: Links, way: Way, wanted: Message, room: Callable[[], Sequence[TensorSlot]], timeout_s: float
) -> None:
    """Receive the one message that is wanted; errors are those of ``Links.receive``, and say what it is."""

    def checked(message: Message) -> Sequence[TensorSlot]:
        if message != wanted:
            raise WireError(f"{str(message)[:200]} came instead")
        return room()

    receive_any(links, way, checked, timeout_s, str(wanted))


def receive_kind(
    links: Links,
    way: Way,
    kind: type[_Kind],
    room: Callable[[_Kind], Sequence[TensorSlot]],
    timeout_s: float,
) -> _Kind:
    """Receive a message of the kind that is wanted, which ``room`` checks; else as ``receive``."""

    def checked(message: Message) -> Sequence[TensorSlot]:
        if not isinstance(message, kind):
            raise WireError(f"{str(message)[:200]} came instead")
        return room(message)

    message = receive_any(links, way, checked, timeout_s, kind.__name__)
    assert isinstance(message, kind)  # noqa: S101 - checked above
    return message


def receive_any(links: Links, way: Way, room: Room, timeout_s: float, what: str) -> Message:
    """Receive a message, which ``room`` checks; else as ``receive``, ``what`` being what is waited for."""
    try:
        return links.receive(way, room, timeout_s)
    except (PeerUnreachableError, PeerTimeoutError, WireError) as error:
        raise type(error)(f"waiting for {what}: {error}") from error


class QueuedMessage(NamedTuple):
    """What lies in a queue."""

    message: Message
    tensors: tuple[Tensor, ...]


Stream = queue.SimpleQueue[QueuedMessage | None]
"""None says that it is broken."""


class MemoryLinks:
    """Implements ``Links`` on queues; ``ring`` makes them. Tensors are copied once, by the receiver."""

    def __init__(self, incoming: dict[Way, Stream], outgoing: dict[Way, Stream]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    def send(self, way: Way, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """See ``Links.send``."""
        if self._closed:
            raise PeerUnreachableError("the links between the stages are closed")
        self._outgoing[way].put(QueuedMessage(message, tuple(tensor.detach() for tensor in tensors)))

    def receive(self, way: Way, room: Room, timeout_s: float) -> Message:
        """See ``Links.receive``."""
        stream = self._incoming[way]
        try:
            parcel = None if self._closed else stream.get(timeout=timeout_s)
        except queue.Empty:
            raise PeerTimeoutError(f"no message from the neighbouring stage for {timeout_s:g} s") from None
        if parcel is None:
            stream.put(None)
            raise PeerUnreachableError("the links between the stages are closed")
        slots = room(parcel.message)
        if len(slots) != len(parcel.tensors):
            raise WireError(f"{len(parcel.tensors)} tensors came with a message that has {len(slots)}")
        for slot, tensor in zip(slots, parcel.tensors, strict=True):
            if slot.tensor.shape != tensor.shape or slot.tensor.dtype != tensor.dtype:
                raise WireError(
                    f"a tensor of {slot.tensor.dtype} {tuple(slot.tensor.shape)} should have come, "
                    f"not of {tensor.dtype} {tuple(tensor.shape)}"
                )
            slot.tensor.copy_(tensor)
        return parcel.message

    def close(self) -> None:
        """See ``Links.close``."""
        self._closed = True
        for stream in (*self._incoming.values(), *self._outgoing.values()):
            stream.put(None)


def ring(ranks: int) -> list[MemoryLinks]:
    """Return the links of each rank."""
    down: list[Stream] = [queue.SimpleQueue() for _ in range(ranks)]
    up: list[Stream] = [queue.SimpleQueue() for _ in range(ranks)]
    return [
        MemoryLinks(
            incoming={"down": down[rank - 1], "up": up[(rank + 1) % ranks]},
            outgoing={"down": down[rank], "up": up[rank]},
        )
        for rank in range(ranks)
    ]


class Carrier(Protocol):
    """Four streams of frames: down and up, in and out. See ``Links`` for who calls."""

    def send(self, way: Way, message: bytes, tensors: Sequence[memoryview]) -> None:
        """Send a frame without waiting for anybody; its memory stays as it is until it has arrived.

        Raises:
            PeerUnreachableError: the stream is broken.
        """

    def receive(self, way: Way, timeout_s: float) -> tuple[bytes, memoryview]:
        """Return the next frame that goes this way: the message, and all tensors in one piece.

        That piece is read before anything else is received, and not any more afterwards.

        Raises:
            PeerUnreachableError: the stream is broken.
            PeerTimeoutError: no whole frame came.
            WireError: what came is no frame, or longer than any can be (``ModelParts.longest_nbytes``).
        """

    def close(self) -> None:
        """Break all four streams, and end all waits."""


class FramedLinks:
    """Implements ``Links`` by frames. What is on other devices goes through the host's memory."""

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
