"""Both ends of the request that turns an HTTP connection into a stream or a pipe (RFC 9110, 7.8).

The request is signed and judged like any call, and so is the answer, which is bound to it: keys are derived
from the fresh nonces of both, so that nothing that was recorded can be played again.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from multidict import CIMultiDict

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.calls import refused
from p2pdrl.transport.http.headers import AnswerHead, Credentials, RequestHead
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address
from p2pdrl.transport.stream.socket import StreamSocket

__all__ = [
    "PIPE_PREFIX",
    "PIPE_UPGRADE",
    "STREAM_PATH",
    "STREAM_UPGRADE",
    "DetachedTransport",
    "NotConnectedError",
    "NotOfferedError",
    "Upgrader",
    "read_header",
    "switching",
    "take_over",
]

STREAM_PATH = "/p2p/stream"
"""Where a stream is asked for."""

PIPE_PREFIX = "/p2p-pipe/"
"""Where pipes are asked for; the route follows."""

STREAM_UPGRADE, PIPE_UPGRADE = "p2pdrl", "p2pdrl-pipe"
"""Names of the protocols in the Upgrade header."""


def take_over(request: web.Request) -> socket.socket:
    """Make aiohttp deaf to the connection of ``request``; return a duplicate of its socket.

    aiohttp goes on to hold its own, and closes that when the handler has returned `DetachedTransport`.

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


class DetachedTransport(web.StreamResponse):
    """The response after which aiohttp closes its own socket of a connection that was taken over."""

    def __init__(self) -> None:
        super().__init__()
        self.force_close()

    async def prepare(self, request: web.BaseRequest) -> None:
        """Write nothing."""

    async def write_eof(self, data: bytes = b"") -> None:
        """Write nothing."""


_MAX_HEADER_BYTES = 16384
_STATUS_LINE = re.compile(r"HTTP/1\.1 ([1-5][0-9]{2})(?: [^\r\n]*)?")
_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


class NotConnectedError(OSError):
    """Nothing listens there."""


class NotOfferedError(Exception):
    """The peer, or something on the way to it, doesn't know the protocol."""


class Upgrader:
    """Makes connections that speak another protocol than HTTP."""

    def __init__(self, credentials: Credentials, limits: TransportLimits) -> None:
        self.credentials = credentials
        self.limits = limits
        self._opening: set[StreamSocket] = set()

    def close(self) -> None:
        """End what is being opened."""
        for sock in self._opening:
            sock.close()

    @asynccontextmanager
    async def connection(self, address: Address) -> AsyncIterator[StreamSocket]:
        """Connect to an IP address; whatever fails inside closes the connection.

        Raises:
            NotConnectedError: nothing listens there.
        """
        sock = StreamSocket(await _connect(address))
        self._opening.add(sock)
        try:
            yield sock
        except BaseException:
            sock.close()
            raise
        finally:
            self._opening.discard(sock)

    async def ask(
        self,
        sock: StreamSocket,
        address: Address,
        head: RequestHead,
        protocol: str,
        *,
        body: bytes = b"",
        absent: frozenset[int] = frozenset(),
    ) -> AnswerHead:
        """Ask for ``protocol``, and return the head of the answer, which is checked.

        Args:
            sock: from `connection`; what it holds afterwards is of the new protocol.
            address: of the peer.
            head: of the request.
            protocol: name in the Upgrade header.
            body: of the request.
            absent: statuses by which a peer says that it has no such protocol.

        Raises:
            NotOfferedError: the answer was one of ``absent``.
            ConnectionError: the connection broke.
            PeerRefusedError: the peer said no.
            WireError: the answer breaks the protocol.
        """
        headers = {"Host": str(address), "Connection": "Upgrade", "Upgrade": protocol, **head.to_headers()}
        if head.method == "POST":
            headers["Content-Length"] = str(len(body))
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        raw = f"{head.method} {head.path} HTTP/1.1\r\n{lines}\r\n".encode() + body
        await sock.send(iter([[raw]]), len(raw), until_answered=True)
        status, fields = read_header(await sock.read_until(b"\r\n\r\n", _MAX_HEADER_BYTES))
        if status in absent:
            raise NotOfferedError
        if status != 101:
            if not 400 <= status <= 599:
                raise WireError(f"the peer answered with status {status}, which is never followed")
            raise refused(status, await self._reason(sock, fields))
        if fields.get("Upgrade", "").lower() != protocol:
            raise WireError("the peer speaks another protocol")
        answer = AnswerHead.from_headers(fields)
        self.credentials.check(answer, head)
        return answer

    async def _reason(self, sock: StreamSocket, headers: CIMultiDict[str]) -> bytes:
        """Return as much of a refusal's text as comes."""
        length, text = headers.get("Content-Length", ""), b""
        most = self.limits.max_refusal_bytes
        if length.isascii() and length.isdigit() and len(length) < 10:
            most = min(most, int(length))
        try:
            while len(text) < most:
                text += await sock.read(1, self.limits.stall_deadline_s)
                text += await sock.read(min(sock.staged_nbytes, most - len(text)))
        except (PeerTimeoutError, ConnectionError):
            pass  # the status alone says enough
        return text


def read_header(raw: bytes) -> tuple[int, CIMultiDict[str]]:
    """Return status and fields of an HTTP answer's header, the last of several that are equal.

    Raises:
        WireError: it isn't one.
    """
    line, *fields = raw.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    status = _STATUS_LINE.fullmatch(line)
    if status is None:
        raise WireError("what came isn't the header of an HTTP answer")
    headers: CIMultiDict[str] = CIMultiDict()
    for text in fields:
        name, _, value = text.partition(":")
        if _NAME.fullmatch(name) is None:
            raise WireError("what came isn't the header of an HTTP answer")
        headers[name] = value.strip(" \t")
    return int(status[1]), headers


async def _connect(address: Address) -> socket.socket:
    """Return a non-blocking socket connected to an IP address.

    Raises:
        NotConnectedError: nothing listens there.
    """
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise NotConnectedError(str(error)) from error
    try:
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (address.host, address.port))
    except OSError as error:
        sock.close()
        raise NotConnectedError(str(error)) from error
    except BaseException:
        sock.close()
        raise
    return sock
