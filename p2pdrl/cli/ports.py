"""Free ports for the nodes of ``p2pdrl swarm up``, kept until the nodes themselves listen.

A free port that was only looked at can be taken by somebody else before the node binds it. On Linux
a socket that is bound but doesn't listen keeps others off, except those that set ``SO_REUSEADDR`` as
asyncio's servers do: that is a reservation which the node can take over. Elsewhere it is let go early.
"""

from __future__ import annotations

import socket
import sys
from types import TracebackType
from typing import Self

from p2pdrl.errors import UsageError

__all__ = ["FIRST_PORT", "ReservedPorts"]

FIRST_PORT = 7700
"""Where nodes begin to look for a port."""

_LAST_PORT = 65535


class ReservedPorts:
    """Context manager: ``count`` ports on loopback that nobody else uses.

    Args:
        count: how many.
        first: the lowest.

    Raises:
        UsageError: there aren't that many.
    """

    def __init__(self, count: int, first: int = FIRST_PORT) -> None:
        self._sockets: list[socket.socket] = []
        self.ports: list[int] = []
        for port in range(first, _LAST_PORT + 1):
            if len(self.ports) == count:
                break
            if (held := _reserve(port)) is not None:
                self._sockets.append(held)
                self.ports.append(port)
        if len(self.ports) < count:
            self.release()
            raise UsageError(f"there aren't {count} free ports from {first}: end what listens there")
        if sys.platform != "linux":
            self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Let go of all ports."""
        for held in self._sockets:
            held.close()
        self._sockets.clear()


def _reserve(port: int) -> socket.socket | None:
    """Bind without SO_REUSEADDR first, which fails where anybody else is bound; then allow the node in."""
    held = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        held.bind(("127.0.0.1", port))
    except OSError:
        held.close()
        return None
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return held
