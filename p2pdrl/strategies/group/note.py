"""What a member says of itself when it acknowledges a view: the base of strategies' own notes.

`service` carries notes as bytes; strategies that need them (averaging, servers, pipeline) derive theirs from
this one and read everybody's when the view is active.
"""

from __future__ import annotations

from typing import Self

import msgspec

from p2pdrl.errors import WireError
from p2pdrl.transport import codec

__all__ = ["GroupNote"]


class GroupNote(msgspec.Struct, frozen=True, array_like=True):
    """A note; every field has a default, which says nothing."""

    def encode(self) -> bytes:
        """As bytes for the group."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, data: bytes | None) -> Self:
        """Read a member's note; an empty one when there is none, or it can't be read."""
        try:
            note: Self = codec.decode(data or b"", cls)
        except WireError:
            return cls()
        return note
