"""Decoding of what peers send, whatever is wrong with it becoming a `WireError`."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from p2pdrl.errors import WireError

__all__ = ["decode"]

T = TypeVar("T")


def decode(data: bytes | memoryview, kind: type[T] | Any, what: str = "message") -> T:
    """Decode MessagePack as ``kind``, a type with its bounds; ``what`` names the data in the error.

    Raises:
        WireError: ``data`` is malformed or out of bounds.
    """
    # msgspec has errors of its own for bad types, but text that isn't UTF-8, nesting thousands of levels deep
    # and numbers beyond all bounds raise Python's.
    try:
        result: T = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise WireError(f"the {what} can't be read: {str(error)[:200]}") from error
    return result
