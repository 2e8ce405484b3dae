"""The real transport: calls, streams and pipes over HTTP connections.

The node makes one, mounts it on the application that also serves the API, and gives it to
membership and strategies as a `Transport`:

    transport = HttpTransport(node_id, swarm_id, tls, clock=SystemClock())
    transport.mount(app)
    await transport.start()

Two lanes of connections: probes of the failure detector never wait behind vectors. Calls of the bulk lane go
over streams where the peer offers them; everything else is posted. Errors of aiohttp and of the operating
system become `TransportError` here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import TypeVar

import aiohttp
from aiohttp import web
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.tracing import Trace
from yarl import URL

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.calls import OutgoingCall, R, ServedRoute, refused
from p2pdrl.transport.certificates import CertifiedRoles, Credentials, NodeCertificate
from p2pdrl.transport.dial import Dialer
from p2pdrl.transport.http.body import BodyReader, body_chunks
from p2pdrl.transport.http.headers import (
    CONTENT_TYPE,
    NO_TARGET,
    AnswerHead,
    RequestHead,
    check_answer,
    told_spoken,
)
from p2pdrl.transport.http.listener import APP_TRANSPORT, ServedConnection
from p2pdrl.transport.http.server import PIPE_PREFIX, STREAM_PATH, HttpServer
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import (
    ConnectionOpening,
    NotConnectedError,
    NotOfferedError,
    Opener,
    connect,
    show,
)
from p2pdrl.transport.pipe.server import PipeAnswer
from p2pdrl.transport.pipe.ticket import MAX_PIPE_META_BYTES, Pipe, PipeReply, PipeTicket
from p2pdrl.transport.protocol import (
    ANYBODY,
    Address,
    Answer,
    Handler,
    Incoming,
    Lane,
    RouteRoles,
    TrafficCounters,
    VectorBuffer,
    check_route,
)
from p2pdrl.transport.rate import NodeRates
from p2pdrl.transport.relay import (
    OPEN_ROUTE,
    WAIT_ROUTE,
    RelayDialer,
    RelayedMember,
    RelayServer,
    relayed_address,
    relayed_id,
)
from p2pdrl.transport.stream.client import StreamClient
from p2pdrl.transport.tls import SwarmTls
from p2pdrl.versions import BEFORE_RANGES, SPOKEN, ProtocolRange, refuse_protocol

__all__ = ["HttpTransport"]

T = TypeVar("T")

_MAX_PEERS = 4096

_shown: ContextVar[list[NodeCertificate | None]] = ContextVar("_shown")
"""Where `_Connector` tells the request that it connects what certificate was shown."""


class _Connector(aiohttp.TCPConnector):
    """Connections to peers, each by the id of the node at its other end.

    Args:
        relayed: connects to a member through its relays.
    """

    def __init__(
        self,
        relayed: Callable[[str], Awaitable[socket.socket]],
        *,
        limit_per_host: int,
        keepalive_timeout: float,
    ) -> None:
        super().__init__(limit=0, limit_per_host=limit_per_host, keepalive_timeout=keepalive_timeout)
        self._relayed = relayed

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's name
    ) -> Connection:
        """Return a connection, new or used before."""
        connection = await super().connect(req, traces, timeout)
        transport = connection.transport
        found = transport.get_extra_info("ssl_object") if transport is not None else None
        _shown.set([SwarmTls.shown_by(found)])
        return connection

    async def _create_connection(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's name
    ) -> ResponseHandler:
        """Connect; through a relay when the host stands for a member that is relayed."""
        host = req.url.raw_host or ""
        if (member := relayed_id(host)) is None:
            return await super()._create_connection(req, traces, timeout)
        tls = req.ssl if isinstance(req.ssl, ssl.SSLContext) else None
        sock = await self._relayed(member)
        try:
            name = host if tls is not None else None
            _, protocol = await self._loop.create_connection(
                self._factory, sock=sock, ssl=tls, server_hostname=name
            )
        except ssl.SSLCertVerificationError as error:
            raise aiohttp.ClientConnectorCertificateError(req.connection_key, error) from error
        except ssl.SSLError as error:
            raise aiohttp.ClientConnectorSSLError(req.connection_key, error) from error
        except OSError as error:  # the relay's machine, or the way to it, is gone
            raise aiohttp.ClientOSError(*error.args) from error
        return protocol


class HttpTransport:
    """`Transport` over HTTP; see there for `call` and `serve`.

    Args:
        node_id: our id.
        swarm_id: the swarm's id.
        tls: ours; None for a swarm without a key, which `Listener` keeps on loopback.
        hides: encrypt streams and pipes, too; else they are authenticated alone, unless the peer wants more.
        clock: time for rates and the name cache.
        limits: all bounds.
        allowed_hosts: names in lower case, besides IP literals and ``localhost``, under which
            others may address us.
        spoken: the protocols that we speak.
        rates: what all connections together keep to, those of pipes too; None without bounds. Stays the
            caller's.
    """

    def __init__(
        self,
        node_id: str,
        swarm_id: str,
        tls: SwarmTls | None,
        *,
        hides: bool = True,
        clock: Clock,
        limits: TransportLimits | None = None,
        allowed_hosts: Callable[[], set[str]] = set,
        spoken: ProtocolRange = SPOKEN,
        rates: NodeRates | None = None,
    ) -> None:
        self.node_id = node_id
        self.limits = limits if limits is not None else TransportLimits()
        self.counters = TrafficCounters()
        self.tls = tls
        self._epoch = 0
        """How often peers had to prove themselves anew."""
        self._swarm_id = swarm_id
        self._hides = hides
        self._clock = clock
        self._certified = CertifiedRoles()
        self._server = HttpServer(
            node_id,
            swarm_id,
            tls,
            certified=self._certified,
            hides=hides,
            clock=clock,
            limits=self.limits,
            counters=self.counters,
            allowed_hosts=allowed_hosts,
            spoken=spoken,
            rates=rates,
        )
        self._spoken = spoken
        self._spoken_by: dict[str, ProtocolRange] = {}
        """What members have told, by id."""
        self._rates = rates
        self._dialer = Dialer(clock, self.limits.resolve_ttl_s)
        self._sessions: dict[Lane, aiohttp.ClientSession] = {}
        self._opener = Opener(self.limits, self._connect)
        self.relay = RelayServer(self._server.pending, self.limits, clock, rates)
        self.relayed = RelayedMember(self._call_itself, self._show_ticket)
        self.relays = RelayDialer(self._call_itself, self._show_ticket, self.relay)
        self.serve(WAIT_ROUTE, self.relay.wait, max_meta_bytes=16)
        self.serve(OPEN_ROUTE, self.relay.open, max_meta_bytes=64)
        self._streams = StreamClient(
            self._ask_stream, self._opener, clock=clock, counters=self.counters, rates=rates
        )

    def mount(self, app: web.Application) -> None:
        """Add the peer routes to ``app``, before it starts."""
        app[APP_TRANSPORT] = self
        self._server.mount(app)

    def use_keys(self, credentials: Sequence[bytes] | Credentials, *, anew: bool) -> None:
        """Take these keys of the swarm, or certificates, and no others, from the next connection on.

        Args:
            credentials: as `SwarmTls` takes them.
            anew: end the streams that are open, whose peers proved themselves by a key that is good no more.
        """
        if self.tls is None:
            raise ValueError("a swarm without a key has none to be replaced")
        self.tls.use(credentials)
        if anew:
            self._epoch += 1
            self._server.pending.close()
            self._opener.close()
            self._streams.close()
            self._streams.start()

    def bar(self, barred: Callable[[str], str | None]) -> None:
        """Answer none of the nodes for which ``barred`` gives a reason, from its next request on."""
        self._server.barred = barred

    def tell_other_protocols(self, told: Callable[[str, str], None]) -> None:
        """Tell of each request by a node that speaks none of our protocols: its id, and why it's refused."""
        self._server.on_other_protocol = told

    def redeem(self, token: bytes) -> Callable[[socket.socket, str], ServedConnection | None] | None:
        """Return what takes a connection over that has shown ``token``; see `http.listener.PortUser`."""
        return self._server.pending.redeem(token)

    def serve(
        self,
        route: str,
        handler: Handler,
        *,
        max_meta_bytes: int = 65536,
        max_vector_bytes: int = 0,
        roles: RouteRoles = ANYBODY,
    ) -> None:
        """Register a handler; see `Transport`."""
        self._server.routes.add(route, handler, max_meta_bytes, max_vector_bytes, roles)

    def roles_of(self, node_id: str) -> frozenset[str] | None:
        """Return what roles a node may have; see `Transport`."""
        return self._certified.get(node_id)

    def serve_pipes(
        self,
        route: str,
        handler: Callable[[Incoming], Awaitable[PipeReply]],
        *,
        max_meta_bytes: int = MAX_PIPE_META_BYTES,
        roles: RouteRoles = ANYBODY,
    ) -> None:
        """Register who decides about pipes that peers ask for.

        Args:
            route: a name, as for `serve`; calls have names of their own.
            handler: raises `Refusal` to refuse.
            max_meta_bytes: longer requests are refused with 413.
            roles: as for `serve`.

        Raises:
            ValueError: the name is malformed or taken.
        """
        self._server.pipes.routes.add(route, handler, max_meta_bytes, 0, roles)

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
        connector = _Connector(self.relays.connect, limit_per_host=per_host, keepalive_timeout=keepalive_s)
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
        self._opener.close()
        self._server.pending.close()
        self.relayed.close()
        self.relay.close()
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
        return await self._call(to, OutgoingCall(target_id, route, meta, vector, into), deadline_s, lane)

    async def _call(
        self, to: Address, call: OutgoingCall, deadline_s: float, lane: Lane, *, itself: bool = False
    ) -> Answer:
        async def once(address: Address) -> Answer:
            if lane == "bulk" and self._streams.offered(address):
                try:
                    return await self._streams.call(address, call)
                except NotOfferedError:
                    pass  # an older node, or something between us that knows no upgrades
            return await self._post(address, call, self._sessions[lane])

        target = None if itself else call.target_id
        served = self._server.routes.get(call.route)
        self._check_callee(served, call.target_id)
        answer = await self._try_addresses(to, target, once, call.path, deadline_s)
        self._check_callee(served, answer.sender)  # its certificate may be news
        return answer

    async def _call_itself(
        self, to: Address, peer_id: str, route: str, meta: bytes, deadline_s: float
    ) -> Answer:
        """Call a peer at its own address, whether it is relayed or not; see `relay.Call`."""
        call = OutgoingCall(peer_id, route, meta, None, None)
        return await self._call(to, call, deadline_s, "probe", itself=True)

    async def call_anew(
        self, to: Address, peer_id: str, route: str, meta: bytes, *, deadline_s: float
    ) -> Answer:
        """Call a peer at its own address over a connection made for this, which ends with it; as `call`."""
        call = OutgoingCall(peer_id, route, meta, None, None)

        async def once(address: Address) -> Answer:
            async with self._session(1, 1.0) as session:
                return await self._post(address, call, session)

        return await self._try_addresses(to, None, once, call.path, deadline_s)

    async def _connect(self, address: Address) -> socket.socket:
        """Connect to an IP address, or to a member through its relays."""
        member = relayed_id(address.host)
        return await (connect(address) if member is None else self.relays.connect(member))

    async def _show_ticket(self, to: Address, ticket: bytes) -> tuple[socket.socket, str]:
        """Connect to a relay and show a ticket; see `relay.Open`."""
        broken: Exception = WireError("it has no address")
        for address in await self._dialer.addresses(to):
            try:
                return await show(await connect(address), ticket, self.limits.stall_deadline_s), address.host
            except NotConnectedError as error:
                broken = error
        raise broken

    def _check_callee(self, served: ServedRoute[R] | None, peer: str | None) -> None:
        """Ask nobody for what its certificate doesn't allow it to answer.

        Raises:
            PeerRefusedError: it doesn't.
        """
        if served is None or peer is None:
            return
        if (verdict := served.refuse_callee(self._certified.get(peer))) is not None:
            raise PeerRefusedError(403, verdict)

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
        if len(meta) > MAX_PIPE_META_BYTES:
            raise ValueError(f"{len(meta)} bytes of metadata are too many for the request")
        path = PIPE_PREFIX + check_route(route)
        served = self._server.pipes.routes.get(route)
        self._check_callee(served, peer_id)

        async def once(address: Address) -> Pipe:
            epoch = self._epoch
            call = OutgoingCall(peer_id, route, meta, None, None)
            told = await self._post(address, call, self._sessions["bulk"], path)
            self._check_callee(served, peer_id)
            answer = PipeAnswer.decode(told.meta)
            if len(answer.meta) > MAX_PIPE_META_BYTES:
                raise WireError(f"the answer has {len(answer.meta)} bytes of metadata")
            self._check_opening(answer.opening)
            async with self._opener.open(address, answer.opening.token) as sock:
                if self._epoch != epoch:
                    raise ConnectionResetError("the swarm's key was replaced")
                connection, leftover = sock.detach()
            limits = self._rates.limits if self._rates is not None else None
            ticket = PipeTicket(answer.opening.keys, leftover, answer.opening.hides, limits)
            return Pipe(connection, told.sender or peer_id, answer.meta, ticket)

        return await self._try_addresses(to, peer_id, once, f"the request for the pipe {route}", deadline_s)

    async def _ask_stream(self, address: Address, target_id: str | None) -> tuple[str, ConnectionOpening]:
        """Ask for a stream; see `stream.client.Asks`."""
        call = OutgoingCall(target_id, "stream", b"", None, None)
        told = await self._post(address, call, self._sessions["bulk"], STREAM_PATH)
        opening = ConnectionOpening.decode(told.meta)
        self._check_opening(opening)
        return told.sender or "", opening

    def _check_opening(self, opening: ConnectionOpening) -> None:
        """See that a connection is as well protected as we want it.

        Raises:
            WireError: it isn't.
        """
        if self.tls is not None and (opening.keys is None or (self._hides and not opening.hides)):
            raise WireError("the peer offers a connection that isn't encrypted")

    async def _try_addresses(
        self,
        to: Address,
        peer_id: str | None,
        once: Callable[[Address], Awaitable[T]],
        what: str,
        deadline_s: float,
    ) -> T:
        """Do something at the first IP of a peer where it listens, or through a relay if it has some.

        Errors are those of `Transport.call`.
        """
        if not self._sessions:
            raise PeerUnreachableError(f"{to} isn't called: our transport is closed", sent=False)
        try:
            async with asyncio.timeout(deadline_s):
                return await self._try_each(to, peer_id, once)
        except TimeoutError as error:
            raise PeerTimeoutError(f"{to} didn't answer {what} within {deadline_s:g} s") from error

    async def _try_each(self, to: Address, peer_id: str | None, once: Callable[[Address], Awaitable[T]]) -> T:
        broken: Exception | None = None
        relayed = peer_id is not None and self.relays.relays(peer_id) is not None
        addresses = [relayed_address(peer_id or "")] if relayed else await self._dialer.addresses(to)
        for address in addresses:
            try:
                return await once(address)
            except (aiohttp.ClientConnectorSSLError, aiohttp.ClientConnectorCertificateError) as error:
                raise _without_tls(error) from error
            except (NotConnectedError, aiohttp.ClientConnectorError) as error:
                broken = error
            except (ConnectionError, aiohttp.ServerDisconnectedError, aiohttp.ClientOSError) as error:
                raise PeerUnreachableError(
                    f"the connection to {to} broke before an answer: {error}"
                ) from error
            except (aiohttp.ClientError, UnicodeError) as error:
                raise WireError(f"{to} answered what isn't HTTP: {str(error)[:200]}") from error
        number = getattr(getattr(broken, "os_error", None), "errno", None)
        why = os.strerror(number).lower() if number else broken  # aiohttp's own words have its SSL context
        raise PeerUnreachableError(f"nothing listens at {to}: {why}", sent=False) from broken

    async def _post(
        self, address: Address, call: OutgoingCall, session: aiohttp.ClientSession, path: str | None = None
    ) -> Answer:
        """Post one call to one IP, to its own path or another, and read its answer.

        It is written in the newest protocol that both speak, as far as we know: in our oldest, where we
        don't. Where that was wrong, the refusal says which it can be, and the call goes once more.
        """
        spoken = self._spoken_by.get(call.target_id or "")
        protocol = self._spoken.oldest if spoken is None else self._spoken.common(spoken)
        for _ in range(2):
            protocol = protocol or self._spoken.oldest
            answer = await self._post_in(protocol, address, call, session, path or call.path)
            if not isinstance(answer, ProtocolRange):
                return answer
            reason = refuse_protocol(self._spoken, answer)
            if reason is not None:
                raise PeerRefusedError(403, reason)
            protocol = self._spoken.common(answer)
        raise WireError("the peer refuses a protocol that it says it speaks")

    async def _post_in(
        self,
        protocol: int,
        address: Address,
        call: OutgoingCall,
        session: aiohttp.ClientSession,
        path: str,
    ) -> Answer | ProtocolRange:
        """Post one call, written in ``protocol``; return what the callee speaks where that isn't of it."""
        head = RequestHead(
            path=path,
            protocol=protocol,
            spoken=self._spoken,
            sender=self.node_id,
            target=call.target_id if call.target_id is not None else NO_TARGET,
            swarm=self._swarm_id,
            meta_nbytes=len(call.meta),
            vector_nbytes=call.vector_nbytes,
            hides=self._hides,
        )
        nbytes = len(call.meta) + call.vector_nbytes
        upload = self._rates.upload if self._rates is not None else None
        data = body_chunks(call.meta, call.views, upload) if call.views else call.meta
        if upload is not None and not call.views:
            upload.charge(nbytes)
        headers = {**head.to_headers(), "Content-Length": str(nbytes)}
        if relayed_id(address.host) is not None:
            headers["Host"] = "localhost"  # no name of a relayed member is an address
        tls: ssl.SSLContext | bool = self.tls.client if self.tls is not None else True
        scheme = "http" if self.tls is None else "https"
        url = URL.build(scheme=scheme, host=address.host, port=address.port, path=head.path)
        async with session.post(url, data=data, headers=headers, allow_redirects=False, ssl=tls) as response:
            self.counters.sent(call.target_id, nbytes)
            if response.status != 200:
                self._check_refuser(response.status, head)
                told = told_spoken(response.headers)
                if told is not None:
                    self._note_spoken(call.target_id, told)
                elif self._spoken_by.pop(call.target_id or "", None) is not None:
                    told = BEFORE_RANGES  # an older release was started in its place
                if response.status == 403 and told is not None and not told.has(protocol):
                    return told
                raise await self._refusal(response)
            return await self._answer(response, call, head)

    def _note_spoken(self, node_id: str | None, spoken: ProtocolRange) -> None:
        if node_id is not None and (len(self._spoken_by) < _MAX_PEERS or node_id in self._spoken_by):
            self._spoken_by[node_id] = spoken

    def _check_refuser(self, status: int, request: RequestHead) -> None:
        """Believe a refusal of the node that was asked alone; others may say that it isn't them (403).

        Raises:
            WireError: it is another's.
        """
        if self.tls is None:
            return
        certificate = _shown.get()[0]
        shown = None if certificate is None else certificate.node_id
        if shown is None or (request.target not in (NO_TARGET, shown) and status != 403):
            raise WireError(f"node {shown} refused in place of {request.target}")

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
        shown = _shown.get()[0] if self.tls is not None else None
        check_answer(head, request, None if shown is None else shown.node_id)
        self._note_spoken(head.sender, head.spoken)
        if self.tls is not None and shown is None:
            raise WireError("the peer has shown no certificate")
        if shown is not None:
            if shown.has_ended(self._clock.wall()):
                raise PeerRefusedError(403, "the membership of the node that answers has ended")
            self._certified.note(shown)
        if head.meta_nbytes > self.limits.max_answer_meta_bytes:
            raise WireError(f"the answer announces {head.meta_nbytes} bytes of metadata")
        expected = head.meta_nbytes + head.vector_nbytes
        if response.content_length not in (None, expected):
            raise WireError(f"the answer has {response.content_length} bytes, its parts {expected}")
        download = self._rates.download if self._rates is not None else None
        body = BodyReader(response.content, self.limits.stall_deadline_s, download)
        try:
            meta = await body.meta(head.meta_nbytes)
            if head.vector_nbytes:
                await body.vector_into(call.buffer(meta, head.vector_nbytes))
            else:
                await body.end()
        finally:
            self.counters.received(call.target_id or head.sender, body.nbytes)
        return Answer(meta, head.vector_nbytes, head.sender)


def _without_tls(error: aiohttp.ClientSSLError) -> PeerRefusedError:
    """Say what it means that TLS came to nothing."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        return PeerRefusedError(
            403, "it belongs to another swarm: give both the same --swarm-key-file, or ask for an invite"
        )
    if getattr(error.os_error, "reason", None) != "WRONG_VERSION_NUMBER":
        return PeerRefusedError(403, "it takes no TLS of ours: give both the same --swarm-key-file")
    # A full port answers in the open, before it knows what its caller speaks. So this is no sign of another
    # swarm, by which a member would be given up, nor of life.
    why = "it answered without TLS: it has too many connections, no --swarm-key-file, or an older p2pdrl"
    return PeerRefusedError(503, why)
