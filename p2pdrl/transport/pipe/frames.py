"""Messages of a pipe, parsed without any input or output; for their bytes see `framing`.

Both ways at once, one message after another, without answers. Each message carries its number, and what is
sealed is numbered too, so that nothing can be repeated, left out or put in another order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from p2pdrl.errors import WireError
from p2pdrl.transport import framing
from p2pdrl.transport.cipher import Cipher
from p2pdrl.transport.framing import STAGE_BYTES, Buffer, Filling, UnreadBytes, checked_buffer

__all__ = [
    "HEAD_BYTES",
    "MAX_KIND",
    "MAX_META_BYTES",
    "PipeBuffer",
    "PipeMessage",
    "PipeParser",
    "pack_head",
    "unpack_head",
]

_NUMBER_BYTES = 8
HEAD_BYTES = framing.HEAD_BYTES + _NUMBER_BYTES
"""Length of a head with the message's number."""

MAX_META_BYTES = 65536
"""Longest metadata of a message."""

MAX_KIND = 65535
"""Greatest kind of a message."""

_MARK = b"pM"


def pack_head(kind: int, number: int, meta_nbytes: int, vector_nbytes: int) -> bytes:
    """Return the head of a message.

    Args:
        kind: what it means, 0-65535; the callers' business.
        number: 1 for the first message that goes this way, then one more each.
        meta_nbytes: length of the metadata.
        vector_nbytes: length of the vector.

    Raises:
        ValueError: something is greater than a head can say.
    """
    if not 0 <= kind <= MAX_KIND:
        raise ValueError(f"{kind} isn't the kind of a message: 0-{MAX_KIND}")
    if meta_nbytes > MAX_META_BYTES:
        raise ValueError(f"{meta_nbytes} bytes of metadata are too long for a message")
    return framing.pack_head(_MARK, kind, meta_nbytes, vector_nbytes) + number.to_bytes(_NUMBER_BYTES, "big")


def unpack_head(data: Buffer, number: int) -> tuple[int, int, int]:
    """Return kind, length of the metadata and length of the vector of the message with this number.

    Raises:
        WireError: ``data`` isn't its head.
    """
    kind, meta_nbytes, vector_nbytes = framing.unpack_head(data[: framing.HEAD_BYTES], _MARK, "a message")
    found = int.from_bytes(data[framing.HEAD_BYTES :], "big")
    if found != number:
        raise WireError(f"message {found} came in place of message {number}")
    if meta_nbytes > MAX_META_BYTES:
        raise WireError(f"the message announces {meta_nbytes} bytes of metadata")
    return kind, meta_nbytes, vector_nbytes


PipeBuffer = Callable[[int, bytes, int], "memoryview | None"]
"""``(kind, meta, vector_nbytes)`` of a message -> where its vector goes, or None to refuse it."""


class PipeMessage(NamedTuple):
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
        cipher: opens what is sealed.
        first: bytes that were read already, at most 64 KiB.
        into: gives the buffers.
        vector_bytes: longest vector that is accepted.
    """

    def __init__(self, cipher: Cipher, first: bytes, into: PipeBuffer, vector_bytes: int) -> None:
        self._cipher = cipher
        self._into = into
        self._most_nbytes = vector_bytes
        self._stage = UnreadBytes(first, MAX_META_BYTES + STAGE_BYTES)
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

    def next(self) -> PipeMessage | None:
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
        message = PipeMessage(self._kind, self._meta, self._out)
        self._raw, self._need = b"", HEAD_BYTES
        self._filling = self._out = None
        self._number += 1
        return message

    def _read_head(self) -> None:
        self._raw = self._stage.take(HEAD_BYTES)
        self._kind, meta_nbytes, self._vector_nbytes = unpack_head(self._raw, self._number)
        if self._vector_nbytes > self._most_nbytes:
            raise WireError(f"the message announces a vector of {self._vector_nbytes} bytes")
        self._need = meta_nbytes + self._cipher.nbytes

    def _read_meta(self) -> None:
        """Take the metadata, and get ready for the vector."""
        self._meta = self._cipher.unseal(self._stage.take(self._need), self._raw, "the message")
        nbytes = self._vector_nbytes
        if nbytes:
            self._out = self._into(self._kind, self._meta, nbytes)
            self._filling = Filling(checked_buffer(self._out, nbytes, "the message"), self._cipher)
            self._stage.pour(self._filling)
