"""The serving half of streams: answers one call after the other.

Who asked for a stream was judged as a caller is, and so is each call on it: sizes from its head, then whether
it is authentic, then how much its sender asks. The listener runs a stream, and watches it with all others.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from aiohttp import web

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerTimeoutError, WireError
from p2pdrl.transport.calls import (
    CALLERS_FAULTS,
    Admission,
    IncomingCall,
    Routes,
    ServedRoute,
    refusal_of,
    report_end,
    run_handler,
)
from p2pdrl.transport.cipher import Cipher
from p2pdrl.transport.framing import (
    HEAD_BYTES,
    STAGE_BYTES,
    AnswerFrame,
    CallFrame,
    Filling,
    batches,
    body_nbytes,
    pieces_of,
    views_of,
)
from p2pdrl.transport.http.listener import ConnectionPace
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import ConnectionOpening
from p2pdrl.transport.protocol import Refusal, Reply, TrafficCounters
from p2pdrl.transport.rate import NodeRates
from p2pdrl.transport.stream.socket import StreamSocket

__all__ = ["ServedStream", "Shared", "StreamServer"]

_SMALL_REST_BYTES = 65536


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    """What all streams of a node share.

    Attributes:
        tell: ``(refusal, host) -> (status, reason)``: counts a refusal, and says what ``host`` is answered.
        barred: why a node isn't answered; None for one that is.
        rates: of the node; None without bounds.
    """

    routes: Routes[Reply]
    admission: Admission
    tell: Callable[[Refusal, str], tuple[int, str]]
    barred: Callable[[str], str | None]
    clock: Clock
    limits: TransportLimits
    counters: TrafficCounters
    rates: NodeRates | None = None


class ServedStream:
    """One stream: serves its calls one after another.

    Args:
        shared: what all streams of a node share.
        sock: carries the stream.
        peer: node id of the caller.
        remote_host: IP of the caller.
        ciphers: of calls and of answers.
        allowed: roles that the caller's certificate allows it; None without a limit.
        until_s: wall time at which that ends; None for never.
        ended: told when it is over; may be told twice.
    """

    def __init__(
        self,
        shared: Shared,
        sock: socket.socket,
        peer: str,
        remote_host: str,
        ciphers: tuple[Cipher, Cipher],
        *,
        allowed: frozenset[str] | None,
        until_s: float | None,
        ended: Callable[[ServedStream], None],
    ) -> None:
        self.peer = peer
        self.busy = False
        self._shared = shared
        self._limits = shared.limits
        self._clock = shared.clock
        self._remote_host = remote_host
        self._in, self._out = ciphers
        self._allowed, self._until_s = allowed, until_s
        self._ended = ended
        self.proven = not self._in.nbytes
        self.idle_since_s = self._clock.monotonic()
        self._pace = ConnectionPace(self._limits, self.idle_since_s)
        self._pace.request_ended()
        self._sock = StreamSocket(sock, self._arrived)
        self._sock.keep_to(shared.rates)
        self._closing = False
        self._rest_nbytes = 0
        self._rest_pieces = 0
        self._broken = False

    def too_slow(self, now_s: float) -> bool:
        """Look at the stream; return whether it is too slow to be kept."""
        if not self.proven and now_s - self.idle_since_s >= self._limits.header_deadline_s:
            return True  # whoever has read a token on its way to us has no key
        if not self.busy and self._sock.open and now_s - self.idle_since_s >= self._limits.keepalive_s:
            self._sock.close("idle for too long")
            return False
        body_open = self.busy and self._sock.receiving
        verdict = self._pace.verdict(now_s, body_open=body_open, unsent_bytes=self._sock.awaiting_nbytes)
        return verdict is not None

    def abort(self) -> None:
        """Cut the connection."""
        self._sock.close()
        self._ended(self)

    def end(self) -> None:
        """Close the stream when the call that runs is done, at once if there is none."""
        self._closing = True
        if not self.busy:
            self._sock.close()

    def _arrived(self, nbytes: int) -> None:
        self._pace.arrived(nbytes, self._clock.monotonic())

    async def run(self) -> None:
        """Serve until the stream ends; raises nothing that a peer can cause."""
        try:
            while not self._closing:
                raw = await self._sock.read(HEAD_BYTES)
                self.busy = True
                await self._serve(raw)
                self.busy = False
                self.idle_since_s = self._clock.monotonic()
                self._pace.request_ended()
        except (ConnectionError, PeerTimeoutError):
            pass  # the caller is gone, or was cut
        finally:
            self._sock.close()
            self._ended(self)

    async def _serve(self, raw: bytes) -> None:
        """Serve one call.

        Raises:
            ConnectionError: there can be no further one.
        """
        try:
            route, incoming = await self._incoming(raw)
            with self._shared.admission.slot(self.peer):
                reply = await run_handler(route, incoming)
                await self._answer(route.name, reply)
        except Refusal as refusal:
            status, reason = self._shared.tell(refusal, self._remote_host)
            await self._send(status, reason.encode(), ())
        await self._finish()

    async def _incoming(self, raw: bytes) -> tuple[ServedRoute[Reply], IncomingCall]:
        """Judge a call by its head, then read and check its metadata.

        Raises:
            Refusal: the call is refused.
            ConnectionError: the caller went away.
        """
        self._broken = True  # until it is known where this call ends
        try:
            frame = CallFrame.decode(raw)
            name = await self._sock.read(frame.route_nbytes, self._limits.stall_deadline_s)
            self._pace.request_started(self._clock.monotonic())
            self._rest_nbytes = body_nbytes(frame.meta_nbytes, frame.vector_nbytes, self._in.nbytes)
            self._rest_pieces = 1 + pieces_of(frame.vector_nbytes)
            self._broken = False
            if (why := self._shared.barred(self.peer)) is not None:
                raise Refusal(403, why)
            if self._until_s is not None and self._clock.wall() >= self._until_s:
                self._closing = True
                raise Refusal(403, "the membership of your node has ended")
            route = self._shared.routes.find(name.decode("ascii", "replace"))
            route.admit_caller(self._allowed)
            route.admit(frame.meta_nbytes, frame.vector_nbytes)
            self._broken = True
            meta = await self._meta(raw + name, frame.meta_nbytes)
        except CALLERS_FAULTS as error:
            raise refusal_of(error) from error
        self._broken = False
        self._rest_nbytes -= frame.meta_nbytes + self._in.nbytes
        self._rest_pieces -= 1
        incoming = IncomingCall(
            sender=self.peer,
            route=route.name,
            meta=meta,
            vector_nbytes=frame.vector_nbytes,
            remote_host=self._remote_host,
            read_vector=self._vector_into,
        )
        return route, incoming

    async def _meta(self, before: bytes, nbytes: int) -> bytes:
        sealed = await self._sock.read(nbytes + self._in.nbytes, self._limits.stall_deadline_s)
        self._shared.counters.received(self.peer, len(sealed))
        try:
            meta = self._in.unseal(sealed, before, "the call")
            self.proven = True
            return meta
        except WireError as error:
            raise Refusal(401, str(error)) from error

    async def _vector_into(self, out: memoryview) -> None:
        """Read the vector of the call that runs."""
        self._rest_nbytes = 0
        self._broken = True
        filling = Filling(out, self._in)
        try:
            await self._sock.fill(filling, self._limits.stall_deadline_s)
        except ConnectionError as error:
            raise WireError(f"the body broke off: {error}") from error
        finally:
            self._shared.counters.received(self.peer, filling.taken_nbytes)
        self._broken = False

    async def _answer(self, route: str, reply: Reply) -> None:
        """Send an answer, and tell the handler whether that went well.

        Raises:
            ConnectionError: the caller went away.
        """
        sent = False
        try:
            await self._send(200, reply.meta, views_of(reply.vector))
            if reply.on_end is not None:
                self._sock.check()
            sent = True
        finally:
            report_end(route, reply, sent)

    async def _send(self, status: int, meta: bytes, views: Sequence[memoryview]) -> None:
        vector_nbytes = sum(view.nbytes for view in views)
        self._closing = self._closing or self._broken or self._rest_nbytes > _SMALL_REST_BYTES
        head = AnswerFrame(status, len(meta), vector_nbytes, self._closing).encode()
        nbytes = body_nbytes(len(meta), vector_nbytes, self._out.nbytes)
        await self._sock.send(batches(head, meta, views, self._out), nbytes + HEAD_BYTES, bulk=bool(views))
        self._shared.counters.sent(self.peer, nbytes)

    async def _finish(self) -> None:
        """Pass over what nobody read of the call; when that is much, only for a moment.

        Raises:
            ConnectionError: the caller went away.
        """
        if self._broken or (self._closing and self._rest_nbytes):
            try:
                async with asyncio.timeout(self._limits.lingering_s):
                    while True:
                        await self._sock.read(1)
                        await self._sock.read(self._sock.staged_nbytes)
                        await self._sock.keep_pace()
            except TimeoutError:
                return
        while self._rest_nbytes:
            count = min(self._rest_nbytes, STAGE_BYTES)
            await self._sock.read(count, self._limits.stall_deadline_s)
            await self._sock.keep_pace()
            self._rest_nbytes -= count
            if not self._rest_nbytes:
                self._in.skip(self._rest_pieces)


class StreamServer:
    """Every stream that peers have opened here."""

    def __init__(self, shared: Shared) -> None:
        self._shared = shared
        self._streams: dict[str, set[ServedStream]] = {}

    def mount(self, app: web.Application) -> None:
        """End streams in good order when ``app`` does."""

        async def end(_: web.Application) -> None:
            for stream in [stream for streams in self._streams.values() for stream in streams]:
                stream.end()

        app.on_shutdown.append(end)

    def taker(
        self,
        peer: str,
        opening: ConnectionOpening,
        allowed: frozenset[str] | None,
        *,
        until_s: float | None = None,
    ) -> Callable[[socket.socket, str], ServedStream | None]:
        """Return what makes a stream of a peer's connection, to be run until it ends."""

        def take(sock: socket.socket, host: str) -> ServedStream | None:
            try:
                self.make_room(peer)  # others may have come since it was promised
            except Refusal:
                sock.close()
                return None
            stream = ServedStream(
                self._shared,
                sock,
                peer,
                host,
                opening.ciphers(),
                allowed=allowed,
                until_s=until_s,
                ended=self._forget,
            )
            self._streams.setdefault(peer, set()).add(stream)
            return stream

        return take

    def _forget(self, stream: ServedStream) -> None:
        streams = self._streams.get(stream.peer, set())
        streams.discard(stream)
        if not streams:
            self._streams.pop(stream.peer, None)

    def make_room(self, peer: str) -> None:
        """Close the peer's longest idle stream when it has too many.

        Raises:
            Refusal: 429, none is idle.
        """
        streams = self._streams.get(peer, ())
        if len(streams) < self._shared.limits.max_streams_per_peer:
            return
        idle = [stream for stream in streams if not stream.busy]
        if not idle:
            raise Refusal(429, f"{len(streams)} of your streams are busy: wait for their answers")
        min(idle, key=lambda stream: stream.idle_since_s).abort()
