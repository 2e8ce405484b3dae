"""From a transport's error to what the membership core makes of it, in plain words.

| error | kind |
|---|---|
| connection refused, or nothing listens there | unreachable: fast evidence |
| no answer in time; the connection broke; the name isn't known | timeout: ambiguous |
| a refusal | refused, with its status |
| out of file descriptors, no network, held up ourselves | local: our own trouble |
"""

from __future__ import annotations

import errno

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.membership.events import Failed

__all__ = ["failed"]

_LOCAL = frozenset(
    {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENETDOWN, errno.ENETUNREACH, errno.EADDRNOTAVAIL}
)


def failed(call_id: int, error: TransportError, took_s: float, deadline_s: float, lag_s: float) -> Failed:
    """What ``error`` means.

    Args:
        call_id: the core's number of the call.
        error: as the transport raised it.
        took_s: how long the call took.
        deadline_s: how long it was allowed to take.
        lag_s: an answer later than the deadline by more than this was held up here.
    """
    if isinstance(error, PeerRefusedError):
        return Failed(call_id, "refused", f"it answered {error.status}: {error.reason}"[:200], error.status)
    number = _errno(error)
    if number in _LOCAL:
        return Failed(call_id, "local", f"this node can't connect: {errno.errorcode[number]}")
    if took_s > deadline_s + lag_s:
        return Failed(call_id, "local", f"this node was held up for {took_s - deadline_s:.1f} s")
    if isinstance(error, PeerTimeoutError):
        return Failed(call_id, "timeout", f"no answer within {deadline_s:g} s")
    if isinstance(error, PeerUnreachableError):
        if number == errno.ECONNREFUSED or (number is None and error.__cause__ is None):
            return Failed(call_id, "unreachable", "connection refused")
        if number == errno.EHOSTUNREACH:
            return Failed(call_id, "timeout", "no route to its host")
        return Failed(call_id, "timeout", "the connection broke")
    return Failed(call_id, "timeout", f"a strange answer: {error}"[:200])


def _errno(error: BaseException) -> int | None:
    """The first errno in the chain of causes."""
    cause: BaseException | None = error
    for _ in range(5):
        if cause is None:
            return None
        if isinstance(cause, OSError) and cause.errno:
            return cause.errno
        inner = getattr(cause, "os_error", None)
        if isinstance(inner, OSError) and inner.errno:
            return inner.errno
        cause = cause.__cause__
    return None
