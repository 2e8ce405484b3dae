"""Where bytes that arrive are put, without any input or output.

A `UnreadBytes` takes heads and short messages before anybody says where they belong; a `Filling` takes a long
vector straight into its buffer, and checks each piece of `pieces` when it is whole.
"""

from __future__ import annotations

from p2pdrl.errors import WireError
from p2pdrl.transport.auth import MAC_BYTES, SerialMac
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.pieces import Buffer

__all__ = ["STAGE_BYTES", "Filling", "UnreadBytes"]

STAGE_BYTES = 32768
"""Length of a stage where nothing longer is needed."""


class UnreadBytes:
    """A few bytes that came and that nobody asked for yet.

    Args:
        first: bytes that are there already.
        size: the longest that can lie here, and so be taken, at once.
    """

    def __init__(self, first: Buffer = b"", size: int = STAGE_BYTES) -> None:
        self._bytes = memoryview(bytearray(size))
        self._size = size
        self._from, self._to = 0, len(first)
        self._bytes[: self._to] = first

    def __len__(self) -> int:
        return self._to - self._from

    def room(self, nbytes: int = 1) -> memoryview:
        """Return where the next bytes go; empty when it is full.

        Args:
            nbytes: how many must be able to lie here at once.
        """
        if self._size - self._from < nbytes:
            self._to -= self._from
            self._bytes[: self._to] = self._bytes[self._from : self._from + self._to]
            self._from = 0
        return self._bytes[self._to :]

    def came(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` of `room` hold what came."""
        self._to += nbytes

    def peek(self) -> memoryview:
        """Return what lies here."""
        return self._bytes[self._from : self._to]

    def take(self, nbytes: int) -> bytes:
        """Return the first ``nbytes``, and forget them."""
        data = self._bytes[self._from : self._from + nbytes].tobytes()
        self._used(nbytes)
        return data

    def pour(self, filling: Filling) -> None:
        """Give a filling what it needs.

        Raises:
            WireError: a piece isn't authentic.
        """
        self._used(filling.copy(self.peek()))

    def _used(self, nbytes: int) -> None:
        self._from += nbytes
        if self._from == self._to:
            self._from = self._to = 0


_NO_TAIL = memoryview(b"")


class Filling:
    """A buffer that fills with pieces as they come, each checked when it is whole.

    Args:
        out: where the bytes go.
        mac: checks pieces; None when there are no MACs.

    Attributes:
        out: where the bytes go.
        taken_nbytes: bytes that came, MACs included.
    """

    def __init__(self, out: memoryview, mac: SerialMac | None) -> None:
        self.taken_nbytes = 0
        self.out = out
        self._mac = mac
        self._start = 0
        self._piece = out[:PIECE_BYTES]
        self._at = 0
        self._tail = memoryview(bytearray(MAC_BYTES)) if mac is not None else _NO_TAIL

    @property
    def full(self) -> bool:
        """Whether everything came and is authentic."""
        return self._start >= len(self.out)

    def room(self) -> list[memoryview]:
        """Return where the next bytes go: never more than the rest of one piece and its MAC."""
        missing = len(self._piece) - self._at
        if missing <= 0:
            return [self._tail[-missing:]]
        return [self._piece[self._at :], self._tail] if self._tail else [self._piece[self._at :]]

    def took(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` of `room` hold what came.

        Raises:
            WireError: a piece isn't authentic.
        """
        self.taken_nbytes += nbytes
        self._at += nbytes
        if self._at < len(self._piece) + len(self._tail):
            return
        if self._mac is not None and not self._mac.good(self._piece, self._tail):
            raise WireError(f"piece {self._start // PIECE_BYTES + 1} of the vector isn't authentic")
        self._start += PIECE_BYTES
        self._piece = self.out[self._start : self._start + PIECE_BYTES]
        self._at = 0

    def copy(self, data: memoryview) -> int:
        """Take what is needed from the front of ``data``; return how many bytes that were.

        Raises:
            WireError: a piece isn't authentic.
        """
        used = 0
        while used < len(data) and not self.full:
            room = self.room()[0]
            count = min(len(room), len(data) - used)
            room[:count] = data[used : used + count]
            used += count
            self.took(count)
        return used
