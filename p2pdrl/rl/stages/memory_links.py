"""Links between the threads of one process, on one device or several."""

from __future__ import annotations

import queue
from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.rl.stages.links import Room, Way
from p2pdrl.rl.stages.messages import Message

__all__ = ["MemoryLinks", "ring"]


class Parcel(NamedTuple):
    """What lies in a queue."""

    message: Message
    tensors: tuple[Tensor, ...]


Stream = queue.SimpleQueue[Parcel | None]
"""None says that it is broken."""


class MemoryLinks:
    """Implements ``links.Links`` on queues; ``ring`` makes them. Tensors are copied once, by the receiver.

    Args:
        incoming: streams by way.
        outgoing: streams by way.
    """

    def __init__(self, incoming: dict[Way, Stream], outgoing: dict[Way, Stream]) -> None:
        self._incoming = incoming
        self._outgoing = outgoing
        self._closed = False

    def send(self, way: Way, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """See ``Links.send``."""
        if self._closed:
            raise PeerUnreachableError("the links between the stages are closed")
        self._outgoing[way].put(Parcel(message, tuple(tensor.detach() for tensor in tensors)))

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
