"""The real transport: calls, streams and pipes over HTTP connections.

The node makes one, mounts it on the application that also serves the API, and gives it to
membership and strategies as a `Transport`:

    transport = HttpTransport(node_id, swarm_id, swarm_key, clock=SystemClock())
    transport.mount(app)
    await transport.start()

Two lanes of connections: probes of the failure detector never wait behind vectors. Calls of the bulk lane go
over streams where the peer offers them; everything else is posted. Errors of aiohttp and of the operating
system become `TransportError` here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import aiohttp
from aiohttp import web
from yarl import URL

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.auth import SwarmKeys
from p2pdrl.transport.calls import OutgoingCall, refused
from p2pdrl.transport.dial import Dialer
from p2pdrl.transport.framing import body_nbytes, seal
from p2pdrl.transport.http.body import BodyReader, body_chunks
from p2pdrl.transport.http.headers import CONTENT_TYPE, AnswerHead, Credentials, RequestHead
from p2pdrl.transport.http.server import HttpServer
from p2pdrl.transport.http.upgrade import NotConnectedError, NotOfferedError, Upgrader
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe.opening import open_pipe
from p2pdrl.transport.pipe.ticket import MAX_PIPE_META_BYTES, Pipe, PipeReply
from p2pdrl.transport.protocol import Address, Answer, Handler, Incoming, Lane, TrafficCounters, VectorBuffer
from p2pdrl.transport.stream.client import StreamClient

__all__ = ["HttpTransport"]

T = TypeVar("T")


class HttpTransport:
    """`Transport` over HTTP; see there for `call` and `serve`.

    Args:
        node_id: our id.
        swarm_id: the swarm's id.
        swarm_key: the shared secret; None for a keyless swarm, which `Listener` keeps on loopback.
        clock: time for stamps, freshness, rates and the name cache.
        limits: all bounds.
        allowed_hosts: names in lower case, besides IP literals and ``localhost``, under which
            others may address us.
    """

    def __init__(
        self,
        node_id: str,
        swarm_id: str,
        swarm_key: bytes | None,
        *,
        clock: Clock,
        limits: TransportLimits | None = None,
        allowed_hosts: Callable[[], set[str]] = set,
    ) -> None:
        self.node_id = node_id
        self.limits = limits if limits is not None else TransportLimits()
        self.counters = TrafficCounters()
        keys = SwarmKeys(swarm_key)
        self._server = HttpServer(
            node_id,
            swarm_id,
            keys,
            clock=clock,
            limits=self.limits,
            counters=self.counters,
            allowed_hosts=allowed_hosts,
        )
        self._credentials = Credentials(node_id, swarm_id, keys, clock)
        self._dialer = Dialer(clock, self.limits.resolve_ttl_s)
        self._sessions: dict[Lane, aiohttp.ClientSession] = {}
        self._upgrader = Upgrader(self._credentials, self.limits)
        self._streams = StreamClient(self._upgrader, clock=clock, counters=self.counters)

    def mount(self, app: web.Application) -> None:
        """Add the peer routes to ``app``, before it starts."""
        self._server.mount(app)

    def serve(
        self, route: str, handler: Handler, *, max_meta_bytes: int = 65536, max_vector_bytes: int = 0
    ) -> None:
        """Register a handler; see `Transport`."""
        self._server.routes.add(route, handler, max_meta_bytes, max_vector_bytes)

    def serve_pipes(
        self,
        route: str,
        handler: Callable[[Incoming], Awaitable[PipeReply]],
        *,
        max_meta_bytes: int = MAX_PIPE_META_BYTES,
    ) -> None:
        """Register who decides about pipes that peers ask for.

        Args:
            route: a name, as for `serve`; calls have names of their own.
            handler: raises `Refusal` to refuse.
            max_meta_bytes: longer requests are refused with 413.

        Raises:
            ValueError: the name is malformed or taken.
        """
        self._server.pipes.routes.add(route, handler, max_meta_bytes, 0)

    async def start(self) -> None:
        """Make calls possible."""
        self._streams.start()
        if not self._sessions:
            limits = self.limits
            self._sessions = {
                "probe": self._session(limits.probe_connections_per_host, limits.probe_keepalive_s),
                "bulk": self._session(limits.bulk_connections_per_host, limits.client_keepalive_s),
            }

    def _session(self, per_host: int, keepalive_s: float) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, limit_per_host=per_host, keepalive_timeout=keepalive_s)
        return aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,
            trust_env=False,
            read_bufsize=self.limits.read_buffer_bytes,
            headers={"Accept-Encoding": "identity"},
            skip_auto_headers=("User-Agent", "Accept"),
        )

    async def close(self) -> None:
        """Close outgoing connections; the listener closes incoming ones."""
        sessions = tuple(self._sessions.values())
        self._sessions.clear()
        self._streams.close()
        self._upgrader.close()
        for session in sessions:
            await session.close()

    async def call(
        self,
        to: Address,
        target_id: str | None,
        route: str,
        meta: bytes,
        *,
        vector: memoryview | None = None,
        into: VectorBuffer | None = None,
        deadline_s: float,
        lane: Lane = "probe",
    ) -> Answer:
        """Send one request; see `Transport`."""
        call = OutgoingCall(target_id, route, meta, vector, into)

        async def once(address: Address) -> Answer:
            if lane == "bulk" and self._streams.offered(address):
                try:
                    return await self._streams.call(address, call)
                except NotOfferedError:
                    pass  # an older node, or something between us that knows no upgrades
            return await self._post(address, call, self._sessions[lane])

        return await self._try_addresses(to, once, call.path, deadline_s)

    async def open_pipe(
        self, to: Address, peer_id: str, route: str, meta: bytes, *, deadline_s: float
    ) -> Pipe:
        """Open a pipe to a peer: a connection of its own, for another process to use.

        Args:
            to: where to dial.
            peer_id: who must answer there.
            route: the name under which the peer serves pipes.
            meta: told to its handler, at most `pipe.ticket.MAX_PIPE_META_BYTES`.
            deadline_s: seconds for all of it.

        Raises:
            TransportError: as for `call`.
            ValueError: the name is malformed, or the metadata are too long.
        """

        async def once(address: Address) -> Pipe:
            return await open_pipe(self._upgrader, address, peer_id, route, meta)

        return await self._try_addresses(to, once, f"the request for the pipe {route}", deadline_s)

    async def _try_addresses(
        self, to: Address, once: Callable[[Address], Awaitable[T]], what: str, deadline_s: float
    ) -> T:
        """Do something at the first IP of a peer where it listens; errors as in `Transport.call`."""
        if not self._sessions:
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

    async def _post(self, address: Address, call: OutgoingCall, session: aiohttp.ClientSession) -> Answer:
        """Post one call to one IP and read its answer."""
        head = self._credentials.head(
            call.path, call.target_id, meta_nbytes=len(call.meta), vector_nbytes=call.vector_nbytes
        )
        mac = self._credentials.keys.request_pieces(head.nonce)
        nbytes = body_nbytes(len(call.meta), call.vector_nbytes, mac.nbytes)
        data = body_chunks(call.meta, call.views, mac) if call.views else seal(call.meta, mac)
        headers = {**head.to_headers(), "Content-Length": str(nbytes)}
        url = URL.build(scheme="http", host=address.host, port=address.port, path=call.path)
        async with session.post(url, data=data, headers=headers, allow_redirects=False) as response:
            self.counters.sent(call.target_id, nbytes)
            if response.status != 200:
                raise await self._refusal(response)
            return await self._answer(response, call, head)

    async def _refusal(self, response: aiohttp.ClientResponse) -> Exception:
        """Return the error for an answer that isn't 200."""
        if not 400 <= response.status <= 599:
            return WireError(f"the peer answered with status {response.status}, which is never followed")
        text = b""
        try:
            async with asyncio.timeout(self.limits.stall_deadline_s):
                while len(text) < self.limits.max_refusal_bytes and (
                    chunk := await response.content.readany()
                ):
                    text += chunk
        except (TimeoutError, aiohttp.ClientError, ConnectionError):
            pass  # the status alone says enough
        return refused(response.status, text[: self.limits.max_refusal_bytes])

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
        mac = self._credentials.keys.answer_pieces(request.nonce, head.nonce)
        if head.meta_nbytes > self.limits.max_answer_meta_bytes:
            raise WireError(f"the answer announces {head.meta_nbytes} bytes of metadata")
        expected = body_nbytes(head.meta_nbytes, head.vector_nbytes, mac.nbytes)
        if response.content_length not in (None, expected):
            raise WireError(f"the answer has {response.content_length} bytes, its parts {expected}")
        body = BodyReader(response.content, mac, self.limits.stall_deadline_s)
        try:
            meta = await body.meta(head.meta_nbytes)
            if head.vector_nbytes:
                await body.vector_into(call.buffer(meta, head.vector_nbytes))
            else:
                await body.end()
        finally:
            self.counters.received(call.target_id or head.sender, body.nbytes)
        return Answer(meta, head.vector_nbytes, head.sender)
