"""Decoding of what peers send: one place that maps every way of being malformed to one error."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from p2pdrl.errors import WireError

__all__ = ["decode"]

T = TypeVar("T")


def decode(data: bytes | memoryview, kind: type[T] | Any, what: str = "message") -> T:
    """Read MessagePack as ``kind``.

    msgspec tells bad types by its own errors, but text that isn't UTF-8, nesting thousands of levels deep
    and numbers beyond all bounds by Python's.

    Args:
        data: from the network, or from a record that came over it.
        kind: the type to decode to, with its bounds.
        what: stands in the error's text.

    Raises:
        WireError: whatever is wrong with it.
    """
    try:
        result: T = msgspec.msgpack.decode(data, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as error:
        raise WireError(f"the {what} can't be read: {str(error)[:200]}") from error
    return result
