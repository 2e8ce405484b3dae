"""What goes over a stream: frames of calls and answers, written and read without any input or output.

    call   = head(16) route metadata [mac]  piece_1 [mac] piece_2 [mac] ...
    answer = head(16)       metadata [mac]  piece_1 [mac] ...

One call after another, each with one answer. Numbers are big-endian. The first MAC covers the head,
the route and the metadata; `pieces` and `filling` do the rest. Without a swarm key there are no MACs.
`socket` moves these bytes; `client` and `server` say what they mean.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from p2pdrl.errors import WireError
from p2pdrl.transport.pieces import Buffer

__all__ = ["HEAD_BYTES", "STREAM_PATH", "UPGRADE", "AnswerFrame", "CallFrame"]

STREAM_PATH = "/p2p/stream"
"""Where a stream is asked for."""

UPGRADE = "p2pdrl"
"""Name of the frames' protocol in the Upgrade header."""

HEAD_BYTES = 16
"""Length of both kinds of head."""

_CALL = struct.Struct(">2sBBIQ")
_ANSWER = struct.Struct(">2sHIQ")
_CALL_MARK, _ANSWER_MARK = b"pC", b"pA"
_MAX_ROUTE_BYTES = 131
_MAX_VECTOR_BYTES = 10**15
_MAX_META_BYTES = (1 << 32) - 1
_LAST = 1 << 15


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
