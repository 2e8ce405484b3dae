"""Free ports for the nodes of ``p2pdrl swarm up``, kept apart from those of other swarms that start now.

A port that is free when it is looked at may be taken a second later by the nodes of another ``swarm up``.
So each port is claimed by a name in Linux's abstract socket namespace, which the kernel frees however
we end, and which reaches as far as the ports do (one network namespace). Elsewhere there are no claims.
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
        self._claims: list[socket.socket] = []
        self.ports: list[int] = []
        for port in range(first, _LAST_PORT + 1):
            if len(self.ports) == count:
                return
            if (claim := _claim(port)) is not None:
                self._claims.append(claim)
                self.ports.append(port)
        if len(self.ports) < count:
            self.release()
            raise UsageError(f"there aren't {count} free ports from {first}: end what listens there")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def release(self) -> None:
        """Give up all claims."""
        for claim in self._claims:
            claim.close()
        self._claims.clear()


def _claim(port: int) -> socket.socket | None:
    """The claim on a port, or None where somebody listens there or has claimed it."""
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        if sys.platform == "linux":
            claim.bind(f"\0p2pdrl port {port}")
        # With SO_REUSEADDR, as nodes do: connections that ended a moment ago don't keep a port.
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
    except OSError:
        claim.close()
        return None
    return claim
