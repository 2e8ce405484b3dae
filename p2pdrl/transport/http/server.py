"""Answers peers: ``POST /p2p/<route>`` on the node's port, and requests for streams and pipes.

A request is judged from its header alone, in the order cheap to dear: Host and Origin, content type,
protocol, swarm and target, whose certificate its connection has shown, sizes, rate. Only then its body is
read and its handler runs. `http_transport` owns this.
"""

from __future__ import annotations

import socket
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from p2pdrl.clock import Clock
from p2pdrl.errors import WireError
from p2pdrl.transport.calls import (
    CALLERS_FAULTS,
    MAX_REASON_CHARS,
    Admission,
    IncomingCall,
    R,
    Routes,
    ServedRoute,
    refusal_of,
    report_end,
    run_handler,
)
from p2pdrl.transport.certificates import CertifiedRoles
from p2pdrl.transport.framing import views_of
from p2pdrl.transport.http.body import BodyReader, body_chunks
from p2pdrl.transport.http.guard import refuse_foreign
from p2pdrl.transport.http.headers import CONTENT_TYPE, NO_TARGET, AnswerHead, RequestHead, spoken_header
from p2pdrl.transport.http.listener import ServedConnection, watched
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import ConnectionOpening, PendingConnections
from p2pdrl.transport.pipe.server import PipeAnswer, PipeServer
from p2pdrl.transport.protocol import Refusal, Reply, TrafficCounters
from p2pdrl.transport.rate import NodeRates
from p2pdrl.transport.stream.server import Shared, StreamServer
from p2pdrl.transport.tls import SwarmTls
from p2pdrl.versions import SPOKEN, ProtocolRange, refuse_protocol

__all__ = ["PIPE_PREFIX", "PREFIX", "STREAM_PATH", "HttpServer"]

PREFIX, STREAM_PATH, PIPE_PREFIX = "/p2p/", "/p2p-stream", "/p2p-pipe/"
"""Where calls are posted, and requests for streams and pipes; a route follows."""

_Take = Callable[[socket.socket, str], ServedConnection | None]
_Answers = Callable[[web.Request], Awaitable[web.StreamResponse]]

_SMALL_BODY_BYTES = 65536
_MAX_TOLD = 64
"""Nodes of other protocols that are told of."""


class HttpServer:
    """The serving half of `HttpTransport`.

    Args:
        node_id: our id; requests for others are refused.
        swarm_id: requests of other swarms are refused.
        tls: proves who calls; None for a swarm without a key, whose members are believed.
        certified: is told what callers show.
        hides: encrypt streams and pipes (a network that is trusted needs no more than proofs).
        clock: time for rates.
        limits: all bounds.
        counters: written to.
        allowed_hosts: our names that a Host header may hold.
        spoken: the protocols that we speak.
        rates: of the node; None without bounds.
    """

    def __init__(
        self,
        node_id: str,
        swarm_id: str,
        tls: SwarmTls | None,
        *,
        certified: CertifiedRoles,
        hides: bool,
        clock: Clock,
        limits: TransportLimits,
        counters: TrafficCounters,
        allowed_hosts: Callable[[], set[str]],
        spoken: ProtocolRange = SPOKEN,
        rates: NodeRates | None = None,
    ) -> None:
        self.on_other_protocol: Callable[[str, str], None] = lambda node_id, reason: None
        self.routes: Routes[Reply] = Routes()
        self.barred: Callable[[str], str | None] = lambda node_id: None
        self.pending: PendingConnections[_Take] = PendingConnections()
        self._node_id = node_id
        self._swarm_id = swarm_id
        self._tls = tls
        self._clock = clock
        self._certified = certified
        self._hides = hides
        self._limits = limits
        self._counters = counters
        self._allowed_hosts = allowed_hosts
        self._spoken = spoken
        self._other_protocols: dict[str, ProtocolRange] = {}
        self._admission = Admission(limits, clock)
        shared = Shared(
            routes=self.routes,
            admission=self._admission,
            tell=self._tell,
            barred=self.why_barred,
            clock=clock,
            limits=limits,
            counters=counters,
            rates=rates,
        )
        self._upload = rates.upload if rates is not None else None
        self._download = rates.download if rates is not None else None
        self._streams = StreamServer(shared)
        self.pipes = PipeServer(limits, rates)

    def why_barred(self, node_id: str) -> str | None:
        """Why a node isn't answered, as `HttpTransport.bar` was told; None for one that is."""
        return self.barred(node_id)

    def mount(self, app: web.Application) -> None:
        """Add the peer routes, for every method, to ``app``."""
        app.router.add_route("*", PREFIX + "{route:.*}", partial(self._handle, self._call))
        app.router.add_route("*", PIPE_PREFIX + "{route:.*}", partial(self._handle, self._pipe))
        app.router.add_route("*", STREAM_PATH, partial(self._handle, self._stream))
        self._streams.mount(app)

    async def _handle(self, answer: _Answers, request: web.Request) -> web.StreamResponse:
        """Answer one request; never raises for anything that a peer did."""
        try:
            return await answer(request)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        except ConnectionError:
            return web.Response(status=408)  # nobody is there to read it

    async def _call(self, request: web.Request) -> web.StreamResponse:
        """Serve a posted call.

        Raises:
            Refusal: it is refused.
            ConnectionError: the caller went away.
        """
        head, route = self._judge(request, self.routes)
        with self._admission.slot(head.sender):
            reply = await self._run(request, head, route)
            return await self._answer(request, head, reply)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Answer a request for a stream with what opens it.

        Raises:
            Refusal: the request is refused.
            ConnectionError: the caller went away.
        """
        head, allowed = self._head(request)
        if self._limits.max_streams_per_peer == 0:
            raise Refusal(404, "no streams are offered here: post your calls")
        if request.can_read_body or head.meta_nbytes or head.vector_nbytes:
            raise Refusal(413, "the request for a stream has no body")
        with self._admission.slot(head.sender):
            pass  # it counts as one request; its calls count by themselves
        self._streams.make_room(head.sender)
        opening = self._opening(head)
        connection = watched(request)
        shown = None if connection is None or self._tls is None else connection.shown
        take = self._streams.taker(
            head.sender, opening, allowed, until_s=None if shown is None else shown.until_s
        )
        self.pending.add(opening.token, take, lambda: None)
        return await self._promise(request, head, opening, Reply(opening.encode()))

    async def _pipe(self, request: web.Request) -> web.StreamResponse:
        """Let the handler of a pipe decide, and answer with what opens it.

        Raises:
            Refusal: the request is refused.
            ConnectionError: the caller went away.
        """
        head, route = self._judge(request, self.pipes.routes)
        opening = self._opening(head)
        with self._admission.slot(head.sender):
            reply, take, lost = await self.pipes.serve(
                head.sender, opening, lambda: self._run(request, head, route)
            )
            self.pending.add(opening.token, take, lost)
            answer = PipeAnswer(opening, reply.meta)
            return await self._promise(request, head, opening, Reply(answer.encode()))

    def _opening(self, head: RequestHead) -> ConnectionOpening:
        return ConnectionOpening.new(sealed=self._tls is not None, hides=self._hides or head.hides)

    async def _promise(
        self, request: web.Request, head: RequestHead, opening: ConnectionOpening, reply: Reply
    ) -> web.StreamResponse:
        """Tell a caller what it can open; if it never hears of it, nothing waits for it."""
        told = False
        try:
            response = await self._answer(request, head, reply)
            told = True
        finally:
            if not told:
                self.pending.drop(opening.token)
        return response

    def _judge(self, request: web.Request, routes: Routes[R]) -> tuple[RequestHead, ServedRoute[R]]:
        """Decide from the header alone.

        Raises:
            Refusal: the request is refused.
        """
        head, allowed = self._head(request)
        route = routes.find(request.match_info["route"])
        route.admit_caller(allowed)
        self._check_size(request, head, route)
        return head, route

    def _head(self, request: web.Request) -> tuple[RequestHead, frozenset[str] | None]:
        """Read the header, and check everything that is cheap to check; say what roles the caller may have.

        Raises:
            Refusal: the request is refused.
        """
        foreign = refuse_foreign(request, self._allowed_hosts(), own_origin_allowed=False)
        if foreign is not None:
            raise Refusal(403, foreign)
        if request.method != "POST":
            raise Refusal(405, "peer routes take POST only")
        if request.headers.get("Content-Type") != CONTENT_TYPE:
            raise Refusal(415, f"peer routes take {CONTENT_TYPE} only")
        if "Content-Encoding" in request.headers:
            raise Refusal(415, "no Content-Encoding is accepted")
        try:
            head = RequestHead.from_headers(request.raw_path, request.headers)
        except WireError as error:
            raise Refusal(400, str(error)) from error
        allowed = self._check_sender(request, head)  # strangers learn nothing of us
        self._check_parties(head)
        return head, allowed

    def _check_parties(self, head: RequestHead) -> None:
        if not self._spoken.has(head.protocol):
            # where there is one that both speak, the caller sees so by our answer, and asks again
            reason = refuse_protocol(head.spoken, self._spoken)
            if reason is not None:
                self._tell_other_protocol(head)
            raise Refusal(403, reason or f"this node doesn't speak protocol {head.protocol}")
        if head.swarm != self._swarm_id:
            raise Refusal(
                403,
                f"this node belongs to another swarm ({self._swarm_id}, yours is {head.swarm}): "
                "give both the same --swarm-key-file, or --swarm when there is no key",
            )
        if head.target not in (NO_TARGET, self._node_id):
            raise Refusal(403, f"meant for node {head.target}, this is {self._node_id}")

    def _tell_other_protocol(self, head: RequestHead) -> None:
        """Tell once of each node that speaks none of our protocols."""
        told = self._other_protocols.get(head.sender) == head.spoken
        if told or (head.sender not in self._other_protocols and len(self._other_protocols) >= _MAX_TOLD):
            return
        self._other_protocols[head.sender] = head.spoken
        self.on_other_protocol(head.sender, refuse_protocol(self._spoken, head.spoken) or "")

    def _check_sender(self, request: web.Request, head: RequestHead) -> frozenset[str] | None:
        """Believe nobody who hasn't shown the certificate of the node that it names; return its roles."""
        connection = watched(request)
        shown = None if connection is None else connection.shown
        if self._tls is not None:
            if shown is None:
                raise Refusal(
                    401,
                    "peers of this swarm speak TLS, and show a certificate of its key: give both the same "
                    "--swarm-key-file, and the same p2pdrl",
                )
            if shown.node_id != head.sender:
                raise Refusal(403, f"node {shown.node_id} can't speak in the name of {head.sender}")
            if shown.has_ended(self._clock.wall()):
                raise Refusal(403, "the membership of your node has ended")
            self._certified.note(shown)
        if (why := self.barred(head.sender)) is not None:
            raise Refusal(403, why)
        if connection is not None:
            connection.proven = True
        return None if shown is None else shown.roles

    def _check_size(self, request: web.Request, head: RequestHead, route: ServedRoute[R]) -> None:
        route.admit(head.meta_nbytes, head.vector_nbytes)
        announced = request.content_length
        expected = head.meta_nbytes + head.vector_nbytes
        if announced is not None and announced > expected:
            raise Refusal(413, f"Content-Length {announced} is more than the parts' {expected}")
        if announced is not None and announced < expected:
            raise Refusal(400, f"Content-Length {announced} is less than the parts' {expected}")

    async def _run(self, request: web.Request, head: RequestHead, route: ServedRoute[R]) -> R:
        """Read the metadata and run the handler.

        Raises:
            Refusal: of the handler, or because of the body.
        """
        body = BodyReader(request.content, self._limits.stall_deadline_s, self._download)
        try:
            try:
                meta = await body.meta(head.meta_nbytes)
                if head.vector_nbytes == 0:
                    await body.end()
            except CALLERS_FAULTS as error:
                raise refusal_of(error) from error
            incoming = IncomingCall(
                sender=head.sender,
                route=route.name,
                meta=meta,
                vector_nbytes=head.vector_nbytes,
                remote_host=request.remote or "",
                read_vector=body.vector_into,
            )
            return await run_handler(route, incoming)
        finally:
            self._counters.received(head.sender, body.nbytes)

    async def _answer(self, request: web.Request, head: RequestHead, reply: Reply) -> web.StreamResponse:
        """Write the whole answer, and tell the handler whether that went well.

        Raises:
            ConnectionError: the caller went away.
        """
        written = False
        try:
            response = await self._write(request, head, reply)
            written = True
        finally:
            report_end(head.path, reply, written)
        return response

    async def _write(self, request: web.Request, head: RequestHead, reply: Reply) -> web.StreamResponse:
        views = views_of(reply.vector)
        vector_nbytes = sum(view.nbytes for view in views)
        meta_nbytes = len(reply.meta)
        answer = AnswerHead(
            sender=self._node_id, meta_nbytes=meta_nbytes, vector_nbytes=vector_nbytes, spoken=self._spoken
        )
        response = web.StreamResponse(headers=answer.to_headers())
        response.content_length = meta_nbytes + vector_nbytes
        await response.prepare(request)
        async for chunk in body_chunks(reply.meta, views, self._upload):
            await response.write(chunk)
            self._counters.sent(head.sender, len(chunk))
        await response.write_eof()
        await self._flush(request)
        return response

    @staticmethod
    async def _flush(request: web.Request) -> None:
        """Wait until the kernel has everything, so that a dead peer isn't taken for served."""
        transport = request.transport
        if transport is None or transport.is_closing():
            raise ConnectionResetError("the caller went away")
        if not transport.get_write_buffer_size():
            return  # asyncio's TLS would call an empty buffer full, until something else is written
        transport.set_write_buffer_limits(high=0)
        await request.writer.drain()
        if transport.is_closing():
            raise ConnectionResetError("the caller went away")
        transport.set_write_buffer_limits()

    def _tell(self, refusal: Refusal, host: str) -> tuple[int, str]:
        """Count a refusal; return status and reason as ``host`` is told."""
        self._counters.refused[refusal.status] += 1
        if refusal.status in (400, 401, 403) and not self._admission.tell_failure(host):
            return 429, "too many bad requests from your address"
        return refusal.status, refusal.reason[:MAX_REASON_CHARS]

    def _refuse(self, request: web.Request, refusal: Refusal) -> web.Response:
        status, reason = self._tell(refusal, request.remote or "")
        response = web.Response(status=status, text=reason, headers=spoken_header(self._spoken))
        length = request.content_length
        connection = watched(request)
        shown = None if connection is None else connection.shown
        ended = shown is not None and shown.has_ended(self._clock.wall())  # another may have a newer one
        if ended or (request.can_read_body and (length is None or length > _SMALL_BODY_BYTES)):
            response.force_close()
        return response
