"""Calls peers over HTTP and believes nothing that comes back unproved.

`http_transport` owns this. Two lanes of connections: probes of the failure detector never
wait behind vectors. The bulk lane goes over streams where the peer offers them. Foreign errors
become ours here: see `Transport.call`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeVar

import aiohttp
from yarl import URL

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.calls import OutgoingCall, refused
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.dial import Dialer
from p2pdrl.transport.http.body import BodyReader, body_chunks
from p2pdrl.transport.http.headers import CONTENT_TYPE, AnswerHead, Credentials, RequestHead
from p2pdrl.transport.http.upgrade import NotConnectedError, NotOfferedError
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pieces import body_nbytes
from p2pdrl.transport.pipe.opening import PipeOpener
from p2pdrl.transport.pipe.ticket import Pipe
from p2pdrl.transport.protocol import Address, Answer, Lane
from p2pdrl.transport.stream.client import StreamClient

__all__ = ["HttpClient"]

T = TypeVar("T")


class HttpClient:
    """The calling half of `HttpTransport`.

    Args:
        credentials: sign requests, check answers.
        clock: monotonic time for idle streams.
        limits: all bounds.
        counters: written to.
        dialer: turns names into addresses that may be dialled.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        clock: Clock,
        limits: TransportLimits,
        counters: TrafficCounters,
        dialer: Dialer,
    ) -> None:
        self._credentials = credentials
        self._limits = limits
        self._counters = counters
        self._dialer = dialer
        self._lanes: dict[Lane, aiohttp.ClientSession] = {}
        self._streams = StreamClient(credentials, clock=clock, limits=limits, counters=counters)
        self._pipes = PipeOpener(credentials, limits)

    async def start(self) -> None:
        """Open both lanes."""
        self._streams.start()
        if not self._lanes:
            limits = self._limits
            self._lanes["probe"] = self._session(limits.probe_connections_per_host, limits.probe_keepalive_s)
            self._lanes["bulk"] = self._session(limits.bulk_connections_per_host, limits.client_keepalive_s)

    async def close(self) -> None:
        """Close all connections."""
        lanes = tuple(self._lanes.values())
        self._lanes.clear()
        self._streams.close()
        self._pipes.close()
        for session in lanes:
            await session.close()

    def _session(self, per_host: int, keepalive_s: float) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=per_host, keepalive_timeout=keepalive_s)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=self._limits.read_buffer_bytes,
            headers={"Accept-Encoding": "identity"},
            skip_auto_headers=("User-Agent", "Accept"),
        )

    async def call(self, to: Address, call: OutgoingCall, *, deadline_s: float, lane: Lane) -> Answer:
        """Send ``call`` to ``to``; errors as in `Transport.call`."""

        async def once(address: Address) -> Answer:
            if lane == "bulk" and self._streams.offered(address):
                try:
                    return await self._streams.call(address, call)
                except NotOfferedError:
                    pass  # an older node, or something between us that knows no upgrades
            return await self._exchange(address, call, self._lanes[lane])

        return await self._try_addresses(to, once, call.path, deadline_s)

    async def open_pipe(
        self, to: Address, peer_id: str, route: str, meta: bytes, *, deadline_s: float
    ) -> Pipe:
        """Open a pipe; see `HttpTransport.open_pipe`."""

        async def once(address: Address) -> Pipe:
            return await self._pipes.open(address, peer_id, route, meta)

        return await self._try_addresses(to, once, f"the request for the pipe {route}", deadline_s)

    async def _try_addresses(
        self, to: Address, once: Callable[[Address], Awaitable[T]], what: str, deadline_s: float
    ) -> T:
        """Do something at the first IP of a peer where it listens; errors as in `Transport.call`."""
        if not self._lanes:
            raise PeerUnreachableError(f"{to} isn't called: our transport is closed", sent=False)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._try_each(to, once)
        except TimeoutError as error:
            raise PeerTimeoutError(f"{to} didn't answer {what} within {deadline_s:g} s") from error

    async def _try_each(self, to: Address, once: Callable[[Address], Awaitable[T]]) -> T:
        broken: Exception | None = None
        for address in await self._dialer.addresses(to):
            try:
                return await once(address)
            except (NotConnectedError, aiohttp.ClientConnectorError) as error:
                broken = error
            except (ConnectionError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                raise PeerUnreachableError(
                    f"the connection to {to} broke before an answer: {error}"
                ) from error
            except (aiohttp.ClientError, UnicodeError) as error:
                raise WireError(f"{to} answered what isn't HTTP: {str(error)[:200]}") from error
        raise PeerUnreachableError(f"nothing listens at {to}: {broken}", sent=False) from broken

    async def _exchange(self, address: Address, call: OutgoingCall, session: aiohttp.ClientSession) -> Answer:
        """Send one request to one IP and read its answer."""
        head = self._credentials.head(
            call.path, call.target_id, meta_nbytes=len(call.meta), vector_nbytes=call.vector_nbytes
        )
        keys = self._credentials.keys
        nbytes = body_nbytes(len(call.meta), call.vector_nbytes, keys is not None)
        data: bytes | AsyncIterator[bytes | memoryview]
        if call.views:
            mac = keys.request_pieces(head.nonce) if keys is not None else None
            data = body_chunks(call.meta, call.views, mac)
        else:
            data = self._credentials.sealed(head, call.meta)
        headers = {**head.to_headers(), "Content-Length": str(nbytes)}
        url = URL.build(scheme="http", host=address.host, port=address.port, path=call.path)
        async with session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            self._counters.sent(call.target_id, nbytes)
            if response.status != 200:
                raise await self._refusal(response)
            return await self._answer(response, call, head)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        """Return the error for an answer that isn't 200; its text is cut and made printable."""
        if not 400 <= response.status <= 599:
            return WireError(f"the peer answered with status {response.status}, which is never followed")
        text = b""
        try:
            async with asyncio.timeout(self._limits.stall_deadline_s):
                while len(text) < self._limits.max_refusal_bytes and (
                    chunk := await response.content.readany()
                ):
                    text += chunk
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            pass  # the status alone says enough
        return refused(response.status, text[: self._limits.max_refusal_bytes])

    async def _answer(
        self, response: aiohttp.ClientResponse, call: OutgoingCall, request: RequestHead
    ) -> Answer:
        """Check and read an answer.

        Raises:
            WireError: anything about it is wrong.
            PeerTimeoutError: it stopped coming.
        """
        if response.headers.get("Content-Type") != CONTENT_TYPE or "Content-Encoding" in response.headers:
            raise WireError("the answer isn't of the peer protocol")
        head = AnswerHead.from_headers(response.headers)
        self._credentials.check(head, request)
        keys = self._credentials.keys
        mac = keys.answer_pieces(request.nonce, head.nonce) if keys is not None else None
        if head.meta_nbytes > self._limits.max_answer_meta_bytes:
            raise WireError(f"the answer announces {head.meta_nbytes} bytes of metadata")
        expected = body_nbytes(head.meta_nbytes, head.vector_nbytes, mac is not None)
        if response.content_length not in (None, expected):
            raise WireError(f"the answer has {response.content_length} bytes, its parts {expected}")
        body = BodyReader(response.content, mac, self._limits.stall_deadline_s)
        try:
            meta = await body.meta(head.meta_nbytes)
            if head.vector_nbytes:
                await body.vector_into(call.buffer(meta, head.vector_nbytes))
            else:
                await body.end()
        finally:
            self._counters.received(call.target_id or head.sender, body.nbytes)
        return Answer(meta, head.vector_nbytes, head.sender)
