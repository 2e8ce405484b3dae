"""Answers peers: ``POST /p2p/<route>`` on the application that the node's port serves.

A request is judged from its header alone, in the order cheap to dear: Host and Origin,
content type, protocol, swarm and target, sizes, MAC, freshness, rate. Only then its body is
read and its handler runs. `http_transport` owns this; aiohttp calls `handle`.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.ids import PROTOCOL_VERSION
from p2pdrl.transport.admission import Admission
from p2pdrl.transport.auth import ReplayGuard, SwarmKeys, new_nonce, parse_time
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.guard import refuse_foreign
from p2pdrl.transport.headers import CONTENT_TYPE, NO_TARGET, AnswerHead, RequestHead
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pieces import BodyReader, OverlongError, body_chunks, body_nbytes, views_of
from p2pdrl.transport.protocol import Refusal, Reply
from p2pdrl.transport.routes import MAX_REASON_CHARS, Route, Routes, report_end, run_handler

__all__ = ["PREFIX", "HttpServer"]

PREFIX = "/p2p/"
"""Where peer routes live."""

_SMALL_BODY_BYTES = 65536


class _HttpIncoming:
    """A request over HTTP; the attributes are those of `Incoming`."""

    def __init__(
        self, head: RequestHead, route: str, meta: bytes, remote_host: str, body: BodyReader
    ) -> None:
        self.sender = head.sender
        self.route = route
        self.meta = meta
        self.vector_nbytes = head.vector_nbytes
        self.remote_host = remote_host
        self._body: BodyReader | None = body

    async def read_vector_into(self, out: memoryview) -> None:
        """Read the vector; see `Incoming`."""
        view = out.cast("B")
        if self._body is None:
            raise ValueError("the vector was read already")
        if view.nbytes != self.vector_nbytes:
            raise ValueError(f"the buffer holds {view.nbytes} bytes, the vector has {self.vector_nbytes}")
        body, self._body = self._body, None
        await body.vector_into(view)


class HttpServer:
    """The serving half of `HttpTransport`.

    Args:
        node_id: our id; requests for others are refused.
        swarm_id: requests of other swarms are refused.
        keys: the swarm's keys; None accepts requests without a MAC.
        clock: time for freshness and rates.
        limits: all bounds.
        counters: written to.
        allowed_hosts: our names that a Host header may hold.

    Attributes:
        routes: what is served.
    """

    def __init__(
        self,
        node_id: str,
        swarm_id: str,
        keys: SwarmKeys | None,
        *,
        clock: Clock,
        limits: TransportLimits,
        counters: TrafficCounters,
        allowed_hosts: Callable[[], set[str]],
    ) -> None:
        self.routes = Routes()
        self._node_id = node_id
        self._swarm_id = swarm_id
        self._keys = keys
        self._limits = limits
        self._counters = counters
        self._allowed_hosts = allowed_hosts
        self._admission = Admission(limits, clock)
        self._replays = ReplayGuard(clock, limits.clock_skew_s, limits.max_nonces)

    def mount(self, app: web.Application) -> None:
        """Add the peer routes, for every method, to ``app``."""
        app.router.add_route("*", PREFIX + "{route:.*}", self.handle)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request; never raises for anything that a peer did."""
        try:
            head, route = self._judge(request)
            with self._admission.slot(head.sender):
                reply = await self._run(request, head, route)
                return await self._answer(request, head, reply)
        except Refusal as refusal:
            return self._refuse(request, refusal)
        except ConnectionError:
            return web.Response(status=408)  # nobody is there to read it

    def _judge(self, request: web.Request) -> tuple[RequestHead, Route]:
        """Decide from the header alone.

        Raises:
            Refusal: with the status of the abuse table.
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
        self._check_parties(head)
        route = self.routes.find(request.match_info["route"])
        self._check_size(request, head, route)
        self._check_proof(head)
        return head, route

    def _check_parties(self, head: RequestHead) -> None:
        if head.protocol != PROTOCOL_VERSION:
            raise Refusal(403, f"this node speaks protocol {PROTOCOL_VERSION}, not {head.protocol}")
        if head.swarm != self._swarm_id:
            raise Refusal(
                403,
                f"this node belongs to another swarm ({self._swarm_id}, yours is {head.swarm}): "
                "give both the same --swarm-key-file, or --swarm when there is no key",
            )
        if head.target not in (NO_TARGET, self._node_id):
            raise Refusal(403, f"meant for node {head.target}, this is {self._node_id}")

    def _check_size(self, request: web.Request, head: RequestHead, route: Route) -> None:
        route.admit(head.meta_nbytes, head.vector_nbytes)
        announced = request.content_length
        expected = body_nbytes(head.meta_nbytes, head.vector_nbytes, self._keys is not None)
        if announced is not None and announced > expected:
            raise Refusal(413, f"Content-Length {announced} is more than the parts' {expected}")
        if announced is not None and announced < expected:
            raise Refusal(400, f"Content-Length {announced} is less than the parts' {expected}")

    def _check_proof(self, head: RequestHead) -> None:
        if self._keys is None:
            return
        if not head.mac or not head.authentic(self._keys):
            raise Refusal(401, "the request isn't signed with this swarm's key")
        stale = self._replays.stale(parse_time(head.time) or 0.0)
        if stale is not None:
            raise Refusal(401, stale)
        fresh = self._replays.take(head.nonce)
        if fresh is None:
            raise Refusal(429, "too many requests to remember: try again later")
        if not fresh:
            raise Refusal(409, "this request was seen before")

    async def _run(self, request: web.Request, head: RequestHead, route: Route) -> Reply:
        """Read the metadata and run the handler.

        Raises:
            Refusal: of the handler, or because of the body.
        """
        mac = self._keys.request_pieces(head.nonce) if self._keys is not None else None
        body = BodyReader(request.content, mac, self._limits.stall_deadline_s)
        try:
            meta = await body.meta(head.meta_nbytes)
            if head.vector_nbytes == 0:
                await body.end()
            incoming = _HttpIncoming(head, route.name, meta, request.remote or "", body)
            return await run_handler(route, incoming)
        except OverlongError as error:
            raise Refusal(413, str(error)) from error
        except WireError as error:
            raise Refusal(400, str(error)) from error
        except PeerTimeoutError as error:
            raise Refusal(408, str(error)) from error
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
        answer = AnswerHead(
            sender=self._node_id,
            meta_nbytes=len(reply.meta),
            vector_nbytes=vector_nbytes,
            nonce=new_nonce(),
        )
        mac = None
        if self._keys is not None:
            answer = answer.sign(self._keys, head.nonce)
            mac = self._keys.answer_pieces(head.nonce, answer.nonce)
        response = web.StreamResponse(headers=answer.to_headers())
        response.content_length = body_nbytes(len(reply.meta), vector_nbytes, mac is not None)
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

    def _refuse(self, request: web.Request, refusal: Refusal) -> web.Response:
        self._counters.refused[refusal.status] += 1
        status, reason = refusal.status, refusal.reason[:MAX_REASON_CHARS]
        if status in (400, 401, 403) and not self._admission.tell_failure(request.remote or ""):
            status, reason = 429, "too many bad requests from your address"
        response = web.Response(status=status, text=reason)
        length = request.content_length
        if request.can_read_body and (length is None or length > _SMALL_BODY_BYTES):
            response.force_close()
        return response
