"""Answers peers: ``POST /p2p/<route>`` on the node's port, and requests for streams and pipes.

A request is judged from its header alone, in the order cheap to dear: Host and Origin,
content type, protocol, swarm and target, sizes, MAC, freshness, rate. Only then its body is
read and its handler runs. `http_transport` owns this; aiohttp calls `handle`.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from p2pdrl.clock import Clock
from p2pdrl.errors import WireError
from p2pdrl.ids import PROTOCOL_VERSION
from p2pdrl.transport.auth import ReplayGuard, SwarmKeys, parse_time
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
from p2pdrl.transport.framing import body_nbytes, views_of
from p2pdrl.transport.http.body import BodyReader, body_chunks
from p2pdrl.transport.http.guard import refuse_foreign
from p2pdrl.transport.http.headers import CONTENT_TYPE, NO_TARGET, AnswerHead, RequestHead
from p2pdrl.transport.http.listener import watched
from p2pdrl.transport.http.upgrade import PIPE_PREFIX, PIPE_UPGRADE, STREAM_PATH, STREAM_UPGRADE
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe.opening import PipeServer
from p2pdrl.transport.protocol import Refusal, Reply, TrafficCounters
from p2pdrl.transport.stream.server import Shared, StreamServer

__all__ = ["PREFIX", "HttpServer"]

PREFIX = "/p2p/"
"""Where peer routes live."""

_SMALL_BODY_BYTES = 65536


class HttpServer:
    """The serving half of `HttpTransport`.

    Args:
        node_id: our id; requests for others are refused.
        swarm_id: requests of other swarms are refused.
        keys: the swarm's keys.
        clock: time for freshness and rates.
        limits: all bounds.
        counters: written to.
        allowed_hosts: our names that a Host header may hold.
    """

    def __init__(
        self,
        node_id: str,
        swarm_id: str,
        keys: SwarmKeys,
        *,
        clock: Clock,
        limits: TransportLimits,
        counters: TrafficCounters,
        allowed_hosts: Callable[[], set[str]],
    ) -> None:
        self.routes: Routes[Reply] = Routes()
        self._node_id = node_id
        self._swarm_id = swarm_id
        self._keys = keys
        self._limits = limits
        self._counters = counters
        self._allowed_hosts = allowed_hosts
        self._admission = Admission(limits, clock)
        self._replays = ReplayGuard(clock, limits.clock_skew_s, limits.max_nonces)
        shared = Shared(
            routes=self.routes,
            admission=self._admission,
            tell=self._tell,
            clock=clock,
            limits=limits,
            counters=counters,
        )
        self._streams = StreamServer(node_id, keys, shared)
        self.pipes = PipeServer(node_id, keys, limits)

    def mount(self, app: web.Application) -> None:
        """Add the peer routes, for every method, to ``app``."""
        app.router.add_route("*", PREFIX + "{route:.*}", self.handle)
        app.router.add_route("*", PIPE_PREFIX + "{route:.*}", self.handle)
        self._streams.mount(app)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; never raises for anything that a peer did."""
        try:
            if request.method == "GET" and request.raw_path == STREAM_PATH and "Upgrade" in request.headers:
                return await self._stream(request)
            if request.raw_path.startswith(PIPE_PREFIX):
                return await self._pipe(request)
            head, route = self._judge(request, self.routes)
            with self._admission.slot(head.sender):
                reply = await self._run(request, head, route)
                return await self._answer(request, head, reply)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        except ConnectionError:
            return web.Response(status=408)  # nobody is there to read it

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        """Judge a request for a stream, and serve the stream.

        Raises:
            Refusal: the request is refused.
            ConnectionError: the caller went away.
        """
        head = self._head(request, "GET")
        connection = watched(request)
        if connection is None or self._limits.max_streams_per_peer == 0:
            raise Refusal(404, "no streams are offered here: post your calls")
        if request.headers["Upgrade"].lower() != STREAM_UPGRADE:
            raise Refusal(426, f"streams of {STREAM_UPGRADE} only")
        if request.can_read_body or head.meta_nbytes or head.vector_nbytes:
            raise Refusal(413, "the request for a stream has no body")
        self._check_proof(head)
        with self._admission.slot(head.sender):
            pass  # it counts as one request; its calls count by themselves
        return await self._streams.serve(request, head, connection)

    async def _pipe(self, request: web.Request) -> web.StreamResponse:
        """Judge a request for a pipe, let its handler decide, and hand the pipe over.

        Raises:
            Refusal: the request is refused.
            ConnectionError: the caller went away.
        """
        head, route = self._judge(request, self.pipes.routes)
        if request.headers.get("Upgrade", "").lower() != PIPE_UPGRADE:
            raise Refusal(426, f"pipes of {PIPE_UPGRADE} only")
        with self._admission.slot(head.sender):
            return await self.pipes.serve(request, head, lambda: self._run(request, head, route))

    def _judge(self, request: web.Request, routes: Routes[R]) -> tuple[RequestHead, ServedRoute[R]]:
        """Decide from the header alone.

        Raises:
            Refusal: the request is refused.
        """
        head = self._head(request, "POST")
        route = routes.find(request.match_info["route"])
        self._check_size(request, head, route)
        self._check_proof(head)
        return head, route

    def _head(self, request: web.Request, method: str) -> RequestHead:
        """Read the header, and check everything that is cheap to check.

        Raises:
            Refusal: the request is refused.
        """
        foreign = refuse_foreign(request, self._allowed_hosts(), own_origin_allowed=False)
        if foreign is not None:
            raise Refusal(403, foreign)
        if request.method != method:
            raise Refusal(405, "peer routes take POST only")
        if request.headers.get("Content-Type") != CONTENT_TYPE:
            raise Refusal(415, f"peer routes take {CONTENT_TYPE} only")
        if "Content-Encoding" in request.headers:
            raise Refusal(415, "no Content-Encoding is accepted")
        try:
            head = RequestHead.from_headers(request.raw_path, request.headers, method)
        except WireError as error:
            raise Refusal(400, str(error)) from error
        self._check_parties(head)
        return head

    def _check_parties(self, head: RequestHead) -> None:
        if head.protocol != PROTOCOL_VERSION:
            versions = f"this node speaks protocol {PROTOCOL_VERSION}, yours {head.protocol}"
            raise Refusal(403, f"{versions}: install the same p2pdrl on both machines")
        if head.swarm != self._swarm_id:
            raise Refusal(
                403,
                f"this node belongs to another swarm ({self._swarm_id}, yours is {head.swarm}): "
                "give both the same --swarm-key-file, or --swarm when there is no key",
            )
        if head.target not in (NO_TARGET, self._node_id):
            raise Refusal(403, f"meant for node {head.target}, this is {self._node_id}")

    def _check_size(self, request: web.Request, head: RequestHead, route: ServedRoute[R]) -> None:
        route.admit(head.meta_nbytes, head.vector_nbytes)
        announced = request.content_length
        expected = body_nbytes(head.meta_nbytes, head.vector_nbytes, self._keys.mac_nbytes)
        if announced is not None and announced > expected:
            raise Refusal(413, f"Content-Length {announced} is more than the parts' {expected}")
        if announced is not None and announced < expected:
            raise Refusal(400, f"Content-Length {announced} is less than the parts' {expected}")

    def _check_proof(self, head: RequestHead) -> None:
        if not self._keys.mac_nbytes:
            return
        if not head.authentic(self._keys):
            raise Refusal(401, "the request isn't signed with this swarm's key")
        stale = self._replays.stale(parse_time(head.time) or 0.0)
        if stale is not None:
            raise Refusal(401, stale)
        fresh = self._replays.take(head.nonce)
        if fresh is None:
            raise Refusal(429, "too many requests to remember: try again later")
        if not fresh:
            raise Refusal(409, "this request was seen before")

    async def _run(self, request: web.Request, head: RequestHead, route: ServedRoute[R]) -> R:
        """Read the metadata and run the handler.

        Raises:
            Refusal: of the handler, or because of the body.
        """
        mac = self._keys.request_pieces(head.nonce)
        body = BodyReader(request.content, mac, self._limits.stall_deadline_s)
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
            report_end(request.match_info["route"], reply, written)
        return response

    async def _write(self, request: web.Request, head: RequestHead, reply: Reply) -> web.StreamResponse:
        views = views_of(reply.vector)
        vector_nbytes = sum(view.nbytes for view in views)
        meta_nbytes = len(reply.meta)
        answer = AnswerHead.answering(
            head, self._node_id, self._keys, meta_nbytes=meta_nbytes, vector_nbytes=vector_nbytes
        )
        mac = self._keys.answer_pieces(head.nonce, answer.nonce)
        response = web.StreamResponse(headers=answer.to_headers())
        response.content_length = body_nbytes(meta_nbytes, vector_nbytes, mac.nbytes)
        await response.prepare(request)
        async for chunk in body_chunks(reply.meta, views, mac):
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
        response = web.Response(status=status, text=reason)
        length = request.content_length
        if request.can_read_body and (length is None or length > _SMALL_BODY_BYTES):
            response.force_close()
        return response
