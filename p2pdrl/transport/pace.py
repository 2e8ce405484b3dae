"""When a connection is too slow to be kept: pure, one `Pace` per connection.

    header ──request_started──► request ──request_ended──► idle ──first byte──► header

aiohttp has no deadline for half-sent headers, stalled bodies or callers that don't read their
answer; `watchdog` feeds this from the connection and cuts it when `verdict` says so.
"""

from __future__ import annotations

from typing import Literal

from p2pdrl.transport.auth import Verdict
from p2pdrl.transport.limits import TransportLimits

__all__ = ["Pace"]


class Pace:
    """What one connection has done lately.

    Args:
        limits: ``header_deadline_s``, ``stall_deadline_s`` and ``min_body_bytes_s``.
        now_s: monotonic time at which the connection was made.
    """

    def __init__(self, limits: TransportLimits, now_s: float) -> None:
        self._limits = limits
        self._phase: Literal["header", "request", "idle"] = "header"
        self._since_s = now_s
        self._window_s = now_s
        self._window_bytes = 0
        self._unsent_bytes = 0
        self._unsent_since_s = now_s

    def arrived(self, nbytes: int, now_s: float) -> None:
        """Bytes came in."""
        self._window_bytes += nbytes
        if self._phase == "idle":
            self._phase = "header"
            self._since_s = now_s

    def request_started(self, now_s: float) -> None:
        """A whole header was read; its handler runs."""
        self._phase = "request"
        self._open_window(now_s)

    def request_ended(self) -> None:
        """The handler is done."""
        self._phase = "idle"

    def verdict(self, now_s: float, *, body_open: bool, unsent_bytes: int) -> Verdict:
        """Tell why the connection has to be cut now.

        Args:
            now_s: monotonic time.
            body_open: a request's body is still coming and we are ready to take it.
            unsent_bytes: bytes of ours that the kernel hasn't taken.
        """
        stall_s = self._limits.stall_deadline_s
        if self._phase == "header" and now_s - self._since_s >= self._limits.header_deadline_s:
            return f"no whole header within {self._limits.header_deadline_s:g} s"
        if self._phase != "request" or not body_open:
            self._open_window(now_s)
        elif now_s - self._window_s >= stall_s:
            if self._window_bytes < max(1.0, self._limits.min_body_bytes_s * stall_s):
                return f"the body brought {self._window_bytes} bytes in {stall_s:g} s"
            self._open_window(now_s)
        if unsent_bytes == 0 or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes = unsent_bytes
            self._unsent_since_s = now_s
        elif now_s - self._unsent_since_s >= stall_s:
            return f"the peer took nothing of {unsent_bytes} bytes in {stall_s:g} s"
        return None

    def _open_window(self, now_s: float) -> None:
        self._window_s = now_s
        self._window_bytes = 0
