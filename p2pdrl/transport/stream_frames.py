"""What goes over a stream: frames of calls and answers, written and read without any input or output.

    call   = head(16) route metadata [mac]  piece_1 [mac] piece_2 [mac] ...
    answer = head(16)       metadata [mac]  piece_1 [mac] ...

One call after another, each with one answer. Numbers are big-endian. The first MAC covers the head,
the route and the metadata; pieces are those of `pieces`: 1 MiB each, the last may be shorter. Without
a swarm key there are no MACs. `stream_socket` moves these bytes; `stream_client` and `stream_server`
say what they mean.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from multidict import CIMultiDict

from p2pdrl.errors import WireError
from p2pdrl.transport.auth import MAC_BYTES, SerialMac
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.pieces import cut

__all__ = [
    "HEAD_BYTES",
    "MAX_HEADER_BYTES",
    "STREAM_PATH",
    "UPGRADE",
    "AnswerFrame",
    "CallFrame",
    "Filling",
    "batches",
    "pieces_of",
    "read_header",
]

STREAM_PATH = "/p2p/stream"
"""Where a stream is asked for."""

UPGRADE = "p2pdrl"
"""Name of the frames' protocol in the Upgrade header."""

HEAD_BYTES = 16
"""Length of both kinds of head."""

MAX_HEADER_BYTES = 16384
"""Longest HTTP header accepted as the answer to a request for a stream."""

_CALL = struct.Struct(">2sBBIQ")
_ANSWER = struct.Struct(">2sHIQ")
_CALL_MARK, _ANSWER_MARK = b"pC", b"pA"
_MAX_ROUTE_BYTES = 131
_MAX_VECTOR_BYTES = 10**15
_MAX_META_BYTES = (1 << 32) - 1
_LAST = 1 << 15
_MAX_BUFFERS = 64
_STATUS_LINE = re.compile(r"HTTP/1\.1 ([1-5][0-9]{2})(?: [^\r\n]*)?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")

Buffer = bytes | bytearray | memoryview


class CallFrame(NamedTuple):
    """Head of a call.

    Attributes:
        route_nbytes: length of the route's name, 1-131.
        meta_nbytes: length of the metadata.
        vector_nbytes: length of the vector.
    """

    route_nbytes: int
    meta_nbytes: int
    vector_nbytes: int

    def encode(self) -> bytes:
        """Return the head's bytes.

        Raises:
            ValueError: something is longer than a frame can say.
        """
        if self.meta_nbytes > _MAX_META_BYTES or self.vector_nbytes > _MAX_VECTOR_BYTES:
            raise ValueError(f"{self} is too long for a frame")
        return _CALL.pack(_CALL_MARK, self.route_nbytes, 0, self.meta_nbytes, self.vector_nbytes)

    @classmethod
    def decode(cls, data: Buffer) -> CallFrame:
        """Read a head.

        Raises:
            WireError: it isn't one.
        """
        mark, route_nbytes, zero, meta_nbytes, vector_nbytes = _CALL.unpack(data)
        if mark != _CALL_MARK or zero or not 1 <= route_nbytes <= _MAX_ROUTE_BYTES:
            raise WireError("what came isn't the head of a call")
        if vector_nbytes > _MAX_VECTOR_BYTES:
            raise WireError(f"the call announces a vector of {vector_nbytes} bytes")
        return cls(route_nbytes, meta_nbytes, vector_nbytes)


class AnswerFrame(NamedTuple):
    """Head of an answer.

    Attributes:
        status: 200, or 400-599 for a refusal, whose reason is the metadata.
        meta_nbytes: length of the metadata.
        vector_nbytes: length of the vector.
        last: no further call is taken on this stream.
    """

    status: int
    meta_nbytes: int
    vector_nbytes: int
    last: bool

    def encode(self) -> bytes:
        """Return the head's bytes.

        Raises:
            ValueError: something is longer than a frame can say.
        """
        if self.meta_nbytes > _MAX_META_BYTES or self.vector_nbytes > _MAX_VECTOR_BYTES:
            raise ValueError(f"{self} is too long for a frame")
        status = self.status | (_LAST if self.last else 0)
        return _ANSWER.pack(_ANSWER_MARK, status, self.meta_nbytes, self.vector_nbytes)

    @classmethod
    def decode(cls, data: Buffer) -> AnswerFrame:
        """Read a head.

        Raises:
            WireError: it isn't one.
        """
        mark, status, meta_nbytes, vector_nbytes = _ANSWER.unpack(data)
        last, status = bool(status & _LAST), status & ~_LAST
        if mark != _ANSWER_MARK or not (status == 200 or 400 <= status <= 599):
            raise WireError("what came isn't the head of an answer")
        if vector_nbytes > _MAX_VECTOR_BYTES:
            raise WireError(f"the answer announces a vector of {vector_nbytes} bytes")
        return cls(status, meta_nbytes, vector_nbytes, last)


def read_header(raw: bytes) -> tuple[int, CIMultiDict[str]]:
    """Return status and fields of an HTTP answer's header, the last of several that are equal.

    Raises:
        WireError: it isn't one.
    """
    line, *fields = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    status = _STATUS_LINE.fullmatch(line)
    if status is None:
        raise WireError("what came isn't the header of an HTTP answer")
    headers: CIMultiDict[str] = CIMultiDict()
    for text in fields:
        name, _, value = text.partition(":")
        if _NAME.fullmatch(name) is None:
            raise WireError("what came isn't the header of an HTTP answer")
        headers[name] = value.strip(" \t")
    return int(status[1]), headers


def pieces_of(vector_nbytes: int) -> int:
    """Return how many pieces a vector has."""
    return -(-vector_nbytes // PIECE_BYTES)


def batches(first: bytes, views: Sequence[memoryview], mac: SerialMac | None) -> Iterator[list[Buffer]]:
    """Yield a frame as lists of buffers, each list to be sent by one system call.

    A list is about one piece long, so that no call holds the event loop for long; what comes first
    travels with the first piece, so that a short frame is one list. Nothing is copied but pieces that
    need a MAC and span two views. MACs are made when their turn comes.

    Args:
        first: head, route and metadata, without their MAC.
        views: the vector.
        mac: makes MACs; None without a swarm key.
    """
    batch: list[Buffer] = [first]
    if mac is not None:
        batch.append(mac.of(first))
        for piece in cut(views):
            batch += (piece, mac.of(piece))
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
        self._tail = memoryview(bytearray(MAC_BYTES if mac is not None else 0))

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
            for room in self.room():
                count = min(len(room), len(data) - used)
                room[:count] = data[used : used + count]
                used += count
                self.took(count)
        return used
