"""Takes a connection over from aiohttp, to speak another protocol on it.

`http_server` judges the request for that as it judges a call; `stream_server` and `pipe_server` go on from
here. `upgrading` is the other end of this.
"""

from __future__ import annotations

import socket

from aiohttp import web

from p2pdrl.transport.headers import AnswerHead

__all__ = ["Over", "switching", "take_over"]


def take_over(request: web.Request) -> socket.socket:
    """Make aiohttp deaf to the connection of ``request``; return a duplicate of its socket.

    aiohttp goes on to hold its own, and closes that when the handler has returned `Over`.

    Raises:
        ConnectionError: the caller went away.
    """
    transport = request.transport
    if transport is None or transport.is_closing():
        raise ConnectionResetError("the caller went away")
    transport.pause_reading()
    sock: socket.socket = transport.get_extra_info("socket").dup()
    return sock


def switching(protocol: str, answer: AnswerHead) -> bytes:
    """Return the HTTP answer with which ``protocol`` begins."""
    headers = {"Connection": "Upgrade", "Upgrade": protocol, **answer.to_headers()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 101 Switching Protocols\r\n{lines}\r\n".encode()


class Over(web.StreamResponse):
    """What is left to aiohttp of a connection that was taken over: to close its socket."""

    def __init__(self) -> None:
        super().__init__()
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Write nothing."""
