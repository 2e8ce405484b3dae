"""What goes over a pipe: messages, written and read without any input or output.

    message = head(24) metadata [mac]  piece_1 [mac] piece_2 [mac] ...

Both ways at once, one message after another, without answers. Numbers are big-endian. The first MAC
covers the head and the metadata; `pieces` and `filling` do the rest. Without a swarm key there are no
MACs. Each message carries its number, and MACs are numbered too, so that nothing can be repeated, left
out or put in another order.
"""

from __future__ import annotations

import struct

from p2pdrl.errors import WireError
from p2pdrl.transport.pieces import Buffer

__all__ = ["HEAD_BYTES", "MAX_KIND", "MAX_META_BYTES", "PIPE_PREFIX", "UPGRADE", "pack_head", "unpack_head"]

PIPE_PREFIX = "/p2p-pipe/"
"""Where pipes are asked for."""

UPGRADE = "p2pdrl-pipe"
"""Name of the protocol in the Upgrade header."""

HEAD_BYTES = 24
"""Length of a head."""

MAX_META_BYTES = 65536
"""Longest metadata of a message."""

MAX_KIND = 65535
"""Greatest kind of a message."""

_HEAD = struct.Struct(">2sHIQQ")
_MARK = b"pM"
_MAX_VECTOR_BYTES = 10**15


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
    if meta_nbytes > MAX_META_BYTES or vector_nbytes > _MAX_VECTOR_BYTES:
        raise ValueError(f"{meta_nbytes} bytes of metadata and {vector_nbytes} are too long for a message")
    return _HEAD.pack(_MARK, kind, meta_nbytes, vector_nbytes, number)


def unpack_head(data: Buffer, number: int) -> tuple[int, int, int]:
    """Read the head of the message with this number.

    Returns:
        Its kind, and the lengths of metadata and vector.

    Raises:
        WireError: it isn't that.
    """
    mark, kind, meta_nbytes, vector_nbytes, found = _HEAD.unpack(data)
    if mark != _MARK or vector_nbytes > _MAX_VECTOR_BYTES:
        raise WireError("what came isn't the head of a message")
    if found != number:
        raise WireError(f"message {found} came in place of message {number}")
    if meta_nbytes > MAX_META_BYTES:
        raise WireError(f"the message announces {meta_nbytes} bytes of metadata")
    return kind, meta_nbytes, vector_nbytes
