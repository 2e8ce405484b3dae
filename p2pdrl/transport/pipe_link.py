"""The connection under a pipe, which two threads share, and why it ended."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from p2pdrl.errors import PeerUnreachableError, TransportError

__all__ = ["PipeLink"]


class PipeLink:
    """A connected socket and its first fault.

    Args:
        sock: in blocking mode.

    Attributes:
        sock: the same.
        fault: why the pipe ended; None while it goes on.
        closed: whether it was our end that was closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fault: Exception | None = None
        self.closed = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def on_end(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when the pipe ends, by whichever thread noticed."""
        self._wakers.append(wake)

    def fail(self, error: Exception) -> None:
        """End the pipe, unless it has ended: every call that blocks on the socket returns.

        What the peer sent before can still be received.
        """
        with self._lock:
            if self.fault is not None:
                return
            self.fault = broken(error) if isinstance(error, OSError) else error
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        for wake in self._wakers:
            wake()

    def shut(self) -> None:
        """End the pipe because our end is closed."""
        self.closed = True
        self.fail(PeerUnreachableError("our end of the pipe was closed"))
        for wake in self._wakers:
            wake()

    def check(self) -> None:
        """Raise a copy of the fault, if there is one, for each caller its own.

        Raises:
            TransportError: the peer's or the network's fault, or our end was closed.
            RuntimeError: a bug of ours ended the pipe.
        """
        fault = self.fault
        if fault is None:
            return
        if isinstance(fault, TransportError):
            raise type(fault)(*fault.args) from fault
        raise RuntimeError("our end of the pipe failed") from fault


def broken(error: OSError) -> PeerUnreachableError:
    """Return what to tell of a socket that doesn't work any more."""
    return PeerUnreachableError(f"the pipe broke: {error}")
