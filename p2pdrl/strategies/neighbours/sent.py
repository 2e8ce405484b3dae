"""What a node sent in its last two rounds, kept for neighbours whom it didn't reach: they call again.

A neighbour's edge counts here once the answer has been written. When that answer gets lost the neighbour
asks for it again, maybe after we have gone on; it gets the same bytes, so that both ends mix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from p2pdrl.strategies.group.view import ViewKey
from p2pdrl.strategies.neighbours.messages import Position
from p2pdrl.transport.protocol import Reply

__all__ = ["Message", "SentMessages"]


@dataclass(eq=False)
class Message:
    """Our message of one round.

    Attributes:
        room: where it is; longer than it.
        nbytes: its length.
        key: view that the round is of.
        position: of the round.
        answers: what went before it to those neighbours who called and whose edges count.
        writing: answers under way that show it.
    """

    room: bytearray
    nbytes: int
    key: ViewKey
    position: Position
    answers: dict[str, bytes] = field(default_factory=dict)
    writing: int = 0

    @property
    def view(self) -> memoryview:
        """The message; it stays as it is while ``writing``, and for one more round."""
        return memoryview(self.room)[: self.nbytes]

    def reply(self, meta: bytes, ended: Callable[[bool], None] = lambda _: None) -> Reply:
        """An answer that shows it; ``ended`` is told whether that was written."""
        self.writing += 1

        def done(sent: bool) -> None:
            self.writing -= 1
            ended(sent)

        return Reply(meta, vector=self.view, on_end=done)


class SentMessages:
    """The messages of this round and of the one before.

    Args:
        max_nbytes: of the longest.
    """

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._last: list[Message] = []

    def begin(self, key: ViewKey, position: Position, message: memoryview) -> Message:
        """Return a copy of a round's message."""
        oldest = self._last.pop(0) if len(self._last) > 1 else None
        room = bytearray(self._max_nbytes) if oldest is None or oldest.writing else oldest.room
        made = Message(room, len(message), key, position)
        made.view[:] = message
        self._last.append(made)
        return made

    def again(self, key: ViewKey, position: Position, peer: str) -> Reply | None:
        """The answer that a neighbour got, or should have got; None where its edge doesn't count."""
        for message in self._last:
            if (message.key, message.position) == (key, position) and peer in message.answers:
                return message.reply(message.answers[peer])
        return None
