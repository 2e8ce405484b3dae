"""Connects to a peer and asks it for a stream, by one HTTP request that is signed like any call.

The answer is signed too and bound to the request; the keys of both directions come from the fresh
nonces of both, so that nothing that was recorded can be played again. `stream_client` owns this.
"""

from __future__ import annotations

import asyncio
import socket

from multidict import CIMultiDict

from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.credentials import Credentials
from p2pdrl.transport.headers import AnswerHead, RequestHead
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.outgoing import refused
from p2pdrl.transport.protocol import Address
from p2pdrl.transport.stream_caller import CallerStream
from p2pdrl.transport.stream_frames import MAX_HEADER_BYTES, STREAM_PATH, UPGRADE, read_header
from p2pdrl.transport.stream_socket import StreamSocket

__all__ = ["NoStreamsError", "NotConnectedError", "StreamOpener"]

_NO_STREAMS = frozenset({404, 405, 426, 501})


class NotConnectedError(OSError):
    """Nothing listens there."""


class NoStreamsError(Exception):
    """The peer, or something on the way to it, offers no streams."""


class StreamOpener:
    """Opens streams.

    Args:
        credentials: sign requests, check answers.
        limits: all bounds.
        counters: written to by the streams.
    """

    def __init__(self, credentials: Credentials, limits: TransportLimits, counters: TrafficCounters) -> None:
        self._credentials = credentials
        self._limits = limits
        self._counters = counters
        self._opening: set[StreamSocket] = set()

    def close(self) -> None:
        """End what is being opened."""
        for sock in self._opening:
            sock.close()

    async def open(self, address: Address, target_id: str | None) -> CallerStream:
        """Return a new stream to the node at an IP address.

        Raises:
            NotConnectedError: nothing listens there.
            NoStreamsError: no streams are offered there.
            ConnectionError: the connection broke.
            PeerRefusedError: the peer said no.
            WireError: the answer breaks the protocol.
        """
        head = self._credentials.head(STREAM_PATH, target_id, method="GET")
        sock = StreamSocket(await _connect(address))
        self._opening.add(sock)
        try:
            await self._ask(sock, address, head)
            answer = await self._heard(sock)
            self._credentials.check(answer, head)
        except BaseException:
            sock.close()
            raise
        finally:
            self._opening.discard(sock)
        keys = self._credentials.keys
        macs = keys.stream(head.nonce, answer.nonce) if keys is not None else (None, None)
        return CallerStream(sock, answer.sender, macs, self._limits, self._counters)

    @staticmethod
    async def _ask(sock: StreamSocket, address: Address, head: RequestHead) -> None:
        headers = {"Host": str(address), "Connection": "Upgrade", "Upgrade": UPGRADE, **head.to_headers()}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        raw = f"{head.method} {head.path} HTTP/1.1\r\n{lines}\r\n".encode()
        await sock.send(iter([[raw]]), len(raw), until_answered=True)

    async def _heard(self, sock: StreamSocket) -> AnswerHead:
        """Read what is answered to the request for a stream."""
        status, headers = read_header(await sock.read_until(b"\r\n\r\n", MAX_HEADER_BYTES))
        if status == 101:
            if headers.get("Upgrade", "").lower() != UPGRADE or sock.staged_nbytes:
                raise WireError("the peer speaks another protocol")
            return AnswerHead.from_headers(headers)
        if status in _NO_STREAMS:
            raise NoStreamsError
        if not 400 <= status <= 599:
            raise WireError(f"the peer answered with status {status}, which is never followed")
        raise refused(status, await self._reason(sock, headers))

    async def _reason(self, sock: StreamSocket, headers: CIMultiDict[str]) -> bytes:
        """Return what comes of a refusal's text."""
        length, text = headers.get("Content-Length", ""), b""
        most = self._limits.max_refusal_bytes
        if length.isascii() and length.isdigit() and len(length) < 10:
            most = min(most, int(length))
        try:
            while len(text) < most:
                text += await sock.read(1, self._limits.stall_deadline_s)
                text += await sock.read(min(sock.staged_nbytes, most - len(text)))
        except (PeerTimeoutError, ConnectionError):
            pass  # the status alone says enough
        return text


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
