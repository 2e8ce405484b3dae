"""Makes messages of the bytes that come out of a pipe; without any input or output."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from p2pdrl.errors import WireError
from p2pdrl.transport.auth import MAC_BYTES, SerialMac
from p2pdrl.transport.filling import STAGE_BYTES, Filling, Stage
from p2pdrl.transport.pipe_frames import HEAD_BYTES, MAX_META_BYTES, unpack_head

__all__ = ["Message", "PipeBuffer", "PipeParser"]

PipeBuffer = Callable[[int, bytes, int], "memoryview | None"]
"""``(kind, meta, vector_nbytes)`` of a message -> where its vector goes, or None to refuse it."""


class Message(NamedTuple):
    """What came, all of it checked.

    Attributes:
        kind: as sent.
        meta: as sent.
        vector: the buffer that the `PipeBuffer` gave, filled; None when there was no vector.
    """

    kind: int
    meta: bytes
    vector: memoryview | None


class PipeParser:
    """Takes bytes in any portions: `next` until it has no message, then receive into `room`, then `came`.

    Args:
        mac: checks MACs; None without a swarm key.
        first: bytes that were read already, at most 64 KiB.
        into: gives the buffers.
        vector_bytes: longest vector that is accepted.
    """

    def __init__(self, mac: SerialMac | None, first: bytes, into: PipeBuffer, vector_bytes: int) -> None:
        self._mac = mac
        self._mac_nbytes = MAC_BYTES if mac is not None else 0
        self._into = into
        self._most_nbytes = vector_bytes
        self._stage = Stage(first, MAX_META_BYTES + STAGE_BYTES)
        self._need = HEAD_BYTES
        self._number = 1
        self._raw = self._meta = b""
        self._kind = self._vector_nbytes = 0
        self._filling: Filling | None = None
        self._out: memoryview | None = None

    @property
    def between(self) -> bool:
        """Whether nothing of the next message has come."""
        return not (self._raw or self._stage)

    @property
    def greedy(self) -> bool:
        """Whether all of `room` has to be filled before anything else can happen."""
        return self._filling is not None

    def room(self) -> list[memoryview]:
        """Return where the next bytes go."""
        if self._filling is not None:
            return self._filling.room()
        # Not as much as there is room for: what belongs to a vector has to be copied once more.
        return [self._stage.room(self._need)[: max(self._need, STAGE_BYTES)]]

    def came(self, nbytes: int) -> None:
        """Note that the first ``nbytes`` of `room` hold what came.

        Raises:
            WireError: it isn't authentic.
        """
        if self._filling is not None:
            self._filling.took(nbytes)
        else:
            self._stage.came(nbytes)

    def next(self) -> Message | None:
        """Return the next message if all of it has come.

        Raises:
            WireError: what came breaks the protocol, or isn't authentic, or isn't wanted.
            ValueError: the `PipeBuffer` gave a buffer of another length.
        """
        if self._filling is None:
            if len(self._stage) < self._need:
                return None
            if not self._raw:
                self._read_head()
                if len(self._stage) < self._need:
                    return None
            self._read_meta()
        if self._filling is not None and not self._filling.full:
            return None
        message = Message(self._kind, self._meta, self._out)
        self._raw, self._need = b"", HEAD_BYTES
        self._filling = self._out = None
        self._number += 1
        return message

    def _read_head(self) -> None:
        self._raw = self._stage.take(HEAD_BYTES)
        self._kind, meta_nbytes, self._vector_nbytes = unpack_head(self._raw, self._number)
        if self._vector_nbytes > self._most_nbytes:
            raise WireError(f"the message announces a vector of {self._vector_nbytes} bytes")
        self._need = meta_nbytes + self._mac_nbytes

    def _read_meta(self) -> None:
        """Take the metadata, and get ready for the vector."""
        self._meta = self._stage.take(self._need - self._mac_nbytes)
        if self._mac is not None and not self._mac.good(
            self._raw + self._meta, self._stage.take(self._mac_nbytes)
        ):
            raise WireError("the message isn't authentic")
        nbytes = self._vector_nbytes
        if nbytes:
            out = self._into(self._kind, self._meta, nbytes)
            if out is None:
                raise WireError(f"the message carries a vector of {nbytes} bytes that isn't wanted")
            if out.nbytes != nbytes:
                raise ValueError(f"the buffer holds {out.nbytes} bytes, the vector has {nbytes}")
            self._out = out
            self._filling = Filling(out.cast("B"), self._mac)
            self._stage.pour(self._filling)
