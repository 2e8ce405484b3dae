"""The bytes of every message between nodes, written and parsed without any input or output.

    POST, body = metadata vector                                              the head is in HTTP's headers
    call       = head(16) route metadata [tag] piece_1 [tag] ...              over a stream
    answer     = head(16) metadata [tag] piece_1 [tag] ...                    over a stream, one for each call
    message    = head(16) number(8) metadata [tag] piece_1 [tag] ...          over a pipe, either way

A head is a mark (2 bytes), a code (2: what it means depends on the mark) and the lengths of metadata (4) and
vector (8), big-endian. A vector is cut into pieces of 1 MiB, the last of which may be shorter. Metadata and
pieces are sealed one by one (`cipher`); the first tag covers what precedes the metadata, too. Without a swarm
key nothing is sealed, and tags are empty.

`batches` writes a frame; `UnreadBytes` takes in heads and metadata, `Filling` a vector, straight into its
buffer. Learner processes use this too, so it imports little.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from p2pdrl.errors import WireError
from p2pdrl.transport.cipher import OPEN, Cipher
from p2pdrl.transport.limits import PIECE_BYTES

__all__ = [
    "HEAD_BYTES",
    "STAGE_BYTES",
    "AnswerFrame",
    "Buffer",
    "CallFrame",
    "Filling",
    "OverlongError",
    "UnreadBytes",
    "Views",
    "batches",
    "body_nbytes",
    "checked_buffer",
    "cut",
    "join_views",
    "pack_head",
    "pieces_of",
    "unpack_head",
    "unsent",
    "views_of",
]

Buffer = bytes | bytearray | memoryview
Views = Sequence[memoryview] | memoryview | None


class OverlongError(WireError):
    """More bytes came than the head announced."""


# Heads

_HEAD = struct.Struct(">2sHIQ")
HEAD_BYTES = _HEAD.size
_MAX_VECTOR_BYTES = 10**15
_MAX_META_BYTES = (1 << 32) - 1


def pack_head(mark: bytes, code: int, meta_nbytes: int, vector_nbytes: int) -> bytes:
    """Return the bytes of a head.

    Raises:
        ValueError: a length is greater than a head can say.
    """
    if meta_nbytes > _MAX_META_BYTES or vector_nbytes > _MAX_VECTOR_BYTES:
        raise ValueError(f"{meta_nbytes} bytes of metadata and {vector_nbytes} are too long for a message")
    return _HEAD.pack(mark, code, meta_nbytes, vector_nbytes)


def unpack_head(data: Buffer, mark: bytes, what: str) -> tuple[int, int, int]:
    """Return code, length of the metadata and length of the vector of a head with this mark.

    Raises:
        WireError: ``data`` isn't such a head; ``what`` names it in the error.
    """
    found, code, meta_nbytes, vector_nbytes = _HEAD.unpack(data)
    if found != mark:
        raise WireError(f"what came isn't the head of {what}")
    if vector_nbytes > _MAX_VECTOR_BYTES:
        raise WireError(f"{what} announces a vector of {vector_nbytes} bytes")
    return code, meta_nbytes, vector_nbytes


_CALL_MARK, _ANSWER_MARK = b"pC", b"pA"
_MAX_ROUTE_BYTES = 131
_LAST = 1 << 15


class CallFrame(NamedTuple):
    """Head of a call; the length of the route's name (1-131) is the upper byte of its code."""

    route_nbytes: int
    meta_nbytes: int
    vector_nbytes: int

    def encode(self) -> bytes:
        """Return the head's bytes; raises ``ValueError`` as `pack_head`."""
        return pack_head(_CALL_MARK, self.route_nbytes << 8, self.meta_nbytes, self.vector_nbytes)

    @classmethod
    def decode(cls, data: Buffer) -> CallFrame:
        """Parse a head; raises `WireError`."""
        code, meta_nbytes, vector_nbytes = unpack_head(data, _CALL_MARK, "a call")
        route_nbytes, zero = divmod(code, 256)
        if zero or not 1 <= route_nbytes <= _MAX_ROUTE_BYTES:
            raise WireError("what came isn't the head of a call")
        return cls(route_nbytes, meta_nbytes, vector_nbytes)


class AnswerFrame(NamedTuple):
    """Head of an answer.

    Attributes:
        status: 200, or 400-599 for a refusal, whose reason is the metadata.
        last: no further call is taken on this stream; the highest bit of the code.
    """

    status: int
    meta_nbytes: int
    vector_nbytes: int
    last: bool

    def encode(self) -> bytes:
        """Return the head's bytes; raises ``ValueError`` as `pack_head`."""
        code = self.status | (_LAST if self.last else 0)
        return pack_head(_ANSWER_MARK, code, self.meta_nbytes, self.vector_nbytes)

    @classmethod
    def decode(cls, data: Buffer) -> AnswerFrame:
        """Parse a head; raises `WireError`."""
        code, meta_nbytes, vector_nbytes = unpack_head(data, _ANSWER_MARK, "an answer")
        last, status = bool(code & _LAST), code & ~_LAST
        if not (status == 200 or 400 <= status <= 599):
            raise WireError("what came isn't the head of an answer")
        return cls(status, meta_nbytes, vector_nbytes, last)


def checked_buffer(out: memoryview | None, vector_nbytes: int, what: str) -> memoryview:
    """Return the bytes of the buffer that the receiver gave for a vector.

    Raises:
        WireError: it gave none; ``what`` names the message in the error.
        ValueError: it has another length.
    """
    if out is None:
        raise WireError(f"{what} carries a vector of {vector_nbytes} bytes that isn't wanted")
    if out.nbytes != vector_nbytes:
        raise ValueError(f"the buffer holds {out.nbytes} bytes, the vector has {vector_nbytes}")
    return out.cast("B")


# Writing

_MAX_BUFFERS = 64


def views_of(vector: Views) -> list[memoryview]:
    """Return the vector as byte views, empty ones left out.

    Raises:
        ValueError: a view isn't contiguous.
    """
    if isinstance(vector, memoryview) and vector.ndim == 1 and vector.format == "B" and vector.contiguous:
        return [vector] if vector.nbytes else []
    views = [vector] if isinstance(vector, memoryview) else list(vector or ())
    if not all(view.c_contiguous for view in views):
        raise ValueError("a vector has to be contiguous")
    return [view.cast("B") for view in views if view.nbytes]


def join_views(vector: Views) -> bytes:
    """Return a copy of the whole vector."""
    return b"".join(views_of(vector))


def cut(views: Sequence[memoryview], piece_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
    """Yield the concatenation of ``views`` in pieces; only a piece that spans two views is copied."""
    spill = bytearray()
    for view in views:
        start = 0
        if spill:
            start = min(piece_bytes - len(spill), len(view))
            spill += view[:start]
            if len(spill) < piece_bytes:
                continue
            yield memoryview(spill)
            spill = bytearray()
        while len(view) - start >= piece_bytes:
            yield view[start : start + piece_bytes]
            start += piece_bytes
        spill += view[start:]
    if spill:
        yield memoryview(spill)


def pieces_of(vector_nbytes: int) -> int:
    """Return how many pieces a vector has."""
    return -(-vector_nbytes // PIECE_BYTES)


def body_nbytes(meta_nbytes: int, vector_nbytes: int, tag_nbytes: int) -> int:
    """Return the length of metadata, vector and their tags."""
    return meta_nbytes + vector_nbytes + (1 + pieces_of(vector_nbytes)) * tag_nbytes


def batches(head: bytes, meta: bytes, views: Sequence[memoryview], cipher: Cipher) -> Iterator[list[Buffer]]:
    """Yield a frame as lists of buffers, each to be sent by one system call before the next is asked for.

    A list is about one piece long, so that no call holds the event loop for long; what comes first
    travels with the first piece, so that a short frame is one list. Nothing is copied but what is encrypted,
    and pieces that are sealed and span two views.

    Args:
        head: everything before the metadata; it isn't hidden.
        meta: the metadata.
        views: the vector.
        cipher: seals metadata and pieces when their turn comes.
    """
    batch: list[Buffer] = [head + cipher.seal(meta, head)]
    if cipher.nbytes:
        for piece in cut(views):
            batch += cipher.seal_piece(piece)
            yield batch
            batch = []
    else:
        nbytes = 0
        for view in views:
            for start in range(0, len(view), PIECE_BYTES):
                part = view[start : start + PIECE_BYTES]
                batch.append(part)
                nbytes += len(part)
                if nbytes >= PIECE_BYTES or len(batch) == _MAX_BUFFERS:
                    yield batch
                    batch, nbytes = [], 0
    if batch:
        yield batch


def unsent(batch: Sequence[Buffer], sent_nbytes: int) -> list[Buffer]:
    """Return what is left of a list of buffers when the first ``sent_nbytes`` were sent."""
    for index, buffer in enumerate(batch):
        if sent_nbytes < len(buffer):
            return [memoryview(buffer)[sent_nbytes:], *batch[index + 1 :]]
        sent_nbytes -= len(buffer)
    return []


# Parsing

STAGE_BYTES = 32768
"""Size of `UnreadBytes` where nothing longer is needed."""


class UnreadBytes:
    """A buffer for bytes that came and that nobody has asked for yet.

    Args:
        first: bytes that are there already.
        size: the most that can lie here, and so be taken, at once.
    """

    def __init__(self, first: Buffer = b"", size: int = STAGE_BYTES) -> None:
        self._bytes = memoryview(bytearray(size))
        self._size = size
        self._from, self._to = 0, len(first)
        self._bytes[: self._to] = first

    def __len__(self) -> int:
        return self._to - self._from

    def room(self, nbytes: int = 1) -> memoryview:
        """Return where the next bytes go, empty when full; ``nbytes`` in all will fit here at once."""
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
        """Give ``filling`` what it needs; raises `WireError` for a piece that isn't authentic."""
        self._used(filling.copy(self.peek()))

    def _used(self, nbytes: int) -> None:
        self._from += nbytes
        if self._from == self._to:
            self._from = self._to = 0


class Filling:
    """A buffer that fills with pieces as they come, each checked when it is whole.

    What comes in the open goes straight where it belongs; what is encrypted is decrypted there.

    Args:
        out: where the bytes go.
        cipher: opens pieces.

    Attributes:
        out: as given.
        taken_nbytes: bytes that came, tags included.
    """

    def __init__(self, out: memoryview, cipher: Cipher = OPEN) -> None:
        self.taken_nbytes = 0
        self.out = out
        self._cipher = cipher
        self._start = 0
        self._piece = out[:PIECE_BYTES]
        self._at = 0
        hidden_nbytes = len(self._piece) if cipher.hides else 0
        self._sealed = memoryview(bytearray(hidden_nbytes + cipher.nbytes))
        """The encrypted piece with its tag; or the tag alone, where pieces come in the open."""

    @property
    def full(self) -> bool:
        """Whether everything came and is authentic."""
        return self._start >= len(self.out)

    def room(self) -> list[memoryview]:
        """Return where the next bytes go: never more than the rest of one piece and its tag."""
        if self._cipher.hides:
            return [self._sealed[self._at : len(self._piece) + self._cipher.nbytes]]
        missing = len(self._piece) - self._at
        if missing <= 0:
            return [self._sealed[-missing:]]
        return [self._piece[self._at :], self._sealed] if self._sealed else [self._piece[self._at :]]

    def took(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` of `room` hold what came.

        Raises:
            WireError: a piece isn't authentic.
        """
        self.taken_nbytes += nbytes
        self._at += nbytes
        if self._at < (whole := len(self._piece) + self._cipher.nbytes):
            return
        if self._cipher.hides:
            good = self._cipher.decrypt_piece(self._sealed[:whole], self._piece)
        else:
            good = self._cipher.unseal_piece(self._piece, self._sealed)
        if not good:
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
