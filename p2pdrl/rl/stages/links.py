"""What connects a rank with its two neighbours.

``memory_links`` connects the threads of one process, ``framed_links`` anything that carries bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol, TypeVar

from torch import Tensor

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.rl.stages.messages import Message
from p2pdrl.rl.stages.rows import Slot

__all__ = ["Links", "Room", "Way", "receive", "receive_any", "receive_kind"]

_Kind = TypeVar("_Kind", bound=Message)

Way = Literal["down", "up"]
"""Down go activations, from each rank to the next and from the last to the first; up go gradients."""

Room = Callable[[Message], Sequence[Slot]]
"""Looks at a message and says where its tensors go; raises ``WireError`` if it isn't the one expected."""


class Links(Protocol):
    """Four streams: down and up, in and out. Of each, messages arrive in the order in which they were sent.

    One thread sends and receives; any may close.
    """

    def send(self, way: Way, message: Message, tensors: Sequence[Tensor] = ()) -> None:
        """Send a message and its tensors without waiting for anybody.

        Whoever sends doesn't write to the tensors before it knows that they have arrived.

        Args:
            way: to which neighbour.
            message: what is said.
            tensors: in one piece each, on any device.

        Raises:
            PeerUnreachableError: the link is broken.
        """
        ...

    def receive(self, way: Way, room: Room, timeout_s: float) -> Message:
        """Wait for the next message that goes this way, and write its tensors where ``room`` says.

        Raises:
            PeerUnreachableError: the link is broken.
            PeerTimeoutError: the message didn't come, or not all of it.
            WireError: it isn't the one expected, or its tensors have another length.
        """
        ...

    def close(self) -> None:
        """Break all four streams; whoever waits for a message, here and there, is told at once."""
        ...


def receive(
    links: Links, way: Way, wanted: Message, room: Callable[[], Sequence[Slot]], timeout_s: float
) -> None:
    """Receive the one message that is wanted.

    Args:
        links: of this rank.
        way: that the message goes.
        wanted: what it must say.
        room: where its tensors go, once it is there.
        timeout_s: bound on the wait.

    Raises:
        PeerUnreachableError: see ``Links.receive``; all say what was waited for.
        PeerTimeoutError: likewise.
        WireError: likewise.
    """

    def checked(message: Message) -> Sequence[Slot]:
        if message != wanted:
            raise WireError(f"{str(message)[:200]} came instead")
        return room()

    receive_any(links, way, checked, timeout_s, str(wanted))


def receive_kind(
    links: Links,
    way: Way,
    kind: type[_Kind],
    room: Callable[[_Kind], Sequence[Slot]],
    timeout_s: float,
) -> _Kind:
    """Receive a message of the kind that is wanted; else as ``receive``.

    Args:
        links: of this rank.
        way: that the message goes.
        kind: what the message must be.
        room: checks what it says, and tells where its tensors go.
        timeout_s: bound on the wait.
    """

    def checked(message: Message) -> Sequence[Slot]:
        if not isinstance(message, kind):
            raise WireError(f"{str(message)[:200]} came instead")
        return room(message)

    message = receive_any(links, way, checked, timeout_s, kind.__name__)
    assert isinstance(message, kind)  # noqa: S101 - checked above
    return message


def receive_any(links: Links, way: Way, room: Room, timeout_s: float, what: str) -> Message:
    """Receive a message; else as ``receive``.

    Args:
        links: of this rank.
        way: that the message goes.
        room: checks what it is and says, and tells where its tensors go.
        timeout_s: bound on the wait.
        what: is waited for, in words.
    """
    try:
        return links.receive(way, room, timeout_s)
    except (PeerUnreachableError, PeerTimeoutError, WireError) as error:
        raise type(error)(f"waiting for {what}: {error}") from error
