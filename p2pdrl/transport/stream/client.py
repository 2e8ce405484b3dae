"""The calling half of streams: opens them, keeps each peer's idle ones, makes calls over them.

Errors of the connection leave here as ``ConnectionError``; all others are those of `Transport.call`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerRefusedError, WireError
from p2pdrl.transport.calls import OutgoingCall, refused
from p2pdrl.transport.cipher import Cipher
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame, Filling, batches, body_nbytes
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import ConnectionOpening, NotOfferedError, Opener
from p2pdrl.transport.protocol import Address, Answer, TrafficCounters
from p2pdrl.transport.rate import NodeRates
from p2pdrl.transport.stream.socket import StreamSocket

__all__ = ["CallerStream", "StaleError", "StreamClient"]


class StaleError(ConnectionError):
    """The stream was dead before the peer can have got the whole head of the call."""


class CallerStream:
    """One open stream.

    Args:
        sock: opened.
        peer_id: who answers.
        ciphers: of our calls and of the answers.
        limits: bounds of answers.
        counters: written to.

    Attributes:
        usable: whether there can be another call.
    """

    def __init__(
        self,
        sock: StreamSocket,
        peer_id: str,
        ciphers: tuple[Cipher, Cipher],
        limits: TransportLimits,
        counters: TrafficCounters,
    ) -> None:
        self._sock = sock
        self._peer_id = peer_id
        self._out, self._in = ciphers
        self._limits = limits
        self._counters = counters
        self.idle_since_s = 0.0
        self.usable = True

    def fresh(self, not_before_s: float) -> bool:
        """Whether it can be used again: up, silent, and not idle since before ``not_before_s``."""
        try:
            self._sock.check()
        except ConnectionError:
            return False
        return self.idle_since_s >= not_before_s and not self._sock.staged_nbytes

    def close(self) -> None:
        """Close the connection; a call on it ends with a ``ConnectionError``."""
        self._sock.close()

    async def call(self, call: OutgoingCall) -> Answer:
        """Make one call.

        Raises:
            StaleError: nothing was done.
            ConnectionError: the connection broke before an answer.
            PeerRefusedError: the peer said no.
            WireError: the answer breaks the protocol.
            PeerTimeoutError: the answer stopped coming.
        """
        self.usable = False
        whole = await self._send(call)
        frame = AnswerFrame.decode(head := await self._sock.read(HEAD_BYTES))
        # The rest has to come steadily, and its end is no longer the end of the connection.
        try:
            answer = await self._answer(call, frame, head)
        except ConnectionError as error:
            raise WireError(f"the answer broke off: {error}") from error
        self.usable = whole and not frame.last
        if frame.status != 200:
            raise refused(frame.status, answer.meta)
        return answer

    async def _send(self, call: OutgoingCall) -> bool:
        """Send a call; return whether all of it was taken before the peer spoke."""
        route = call.route.encode()
        head = CallFrame(len(route), len(call.meta), call.vector_nbytes).encode() + route
        nbytes = body_nbytes(len(call.meta), call.vector_nbytes, self._out.nbytes)
        frame_nbytes = HEAD_BYTES + len(route) + nbytes
        before = self._sock.sent_nbytes
        try:
            whole = await self._sock.send(
                batches(head, call.meta, call.views, self._out),
                frame_nbytes,
                until_answered=True,
                bulk=bool(call.views),
            )
        except ConnectionError as error:
            if self._sock.sent_nbytes - before < len(head) + len(call.meta):
                raise StaleError(str(error)) from error
            raise
        unsent_nbytes = frame_nbytes - (self._sock.sent_nbytes - before)
        self._counters.sent(call.target_id, max(nbytes - unsent_nbytes, 0))
        return whole

    async def _answer(self, call: OutgoingCall, frame: AnswerFrame, head: bytes) -> Answer:
        most = self._limits.max_answer_meta_bytes if frame.status == 200 else self._limits.max_refusal_bytes
        if frame.meta_nbytes > most:
            raise WireError(f"the answer announces {frame.meta_nbytes} bytes of metadata")
        if frame.status != 200 and frame.vector_nbytes:
            raise WireError("a refusal carries a vector")
        stall_s = self._limits.stall_deadline_s
        nbytes = 0
        try:
            sealed = await self._sock.read(frame.meta_nbytes + self._in.nbytes, stall_s)
            nbytes += len(sealed)
            meta = self._in.unseal(sealed, head, "the answer")
            if frame.vector_nbytes:
                filling = Filling(call.buffer(meta, frame.vector_nbytes), self._in)
                try:
                    await self._sock.fill(filling, stall_s)
                finally:
                    nbytes += filling.taken_nbytes
        finally:
            self._counters.received(call.target_id or self._peer_id, nbytes)
        return Answer(meta, frame.vector_nbytes, self._peer_id)


@dataclass(slots=True)
class _StreamPool:
    """The streams to one peer: idle ones, the latest used last, and how many calls run or wait."""

    gate: asyncio.Semaphore
    idle: deque[CallerStream] = field(default_factory=deque)
    users: int = 0


_MAX_PEERS = 4096
_NO_STREAMS = frozenset({404, 405, 426, 501})
"""Statuses of a peer, or of something on the way to it, that offers no streams."""


Asks = Callable[[Address, str | None], Awaitable[tuple[str, ConnectionOpening]]]
"""``(IP address, who must answer)`` -> who answered, and what opens a stream to it; errors as for a call."""


class StreamClient:
    """Streams to all peers.

    Args:
        ask: asks a peer for a stream.
        rates: what they keep to.
    """

    def __init__(
        self,
        ask: Asks,
        opener: Opener,
        *,
        clock: Clock,
        counters: TrafficCounters,
        rates: NodeRates | None = None,
    ) -> None:
        self._ask = ask
        self._opener = opener
        self._rates = rates
        self._limits = opener.limits
        self._clock = clock
        self._counters = counters
        self._pools: dict[tuple[Address, str | None], _StreamPool] = {}
        self._busy: set[CallerStream] = set()
        self._without: dict[Address, float] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False
        self._epoch = 0

    def start(self) -> None:
        """Make calls possible."""
        self._closed = False

    def offered(self, address: Address) -> bool:
        """Whether ``address`` may offer streams: unknown peers may."""
        until_s = self._without.get(address)
        return until_s is None or until_s <= self._clock.monotonic()

    def close(self) -> None:
        """Close all streams; calls on them end with a ``ConnectionError``."""
        self._closed = True
        self._epoch += 1
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for stream in (*self._busy, *(idle for pool in self._pools.values() for idle in pool.idle)):
            stream.close()
        for pool in self._pools.values():
            pool.idle.clear()

    async def call(self, address: Address, call: OutgoingCall) -> Answer:
        """Make ``call`` at one IP address over a stream.

        Raises:
            NotOfferedError: it has to be posted.
            NotConnectedError: nothing listens there.
            ConnectionError: the connection broke before an answer.
            TransportError: as in `Transport.call`.
        """
        key = (address, call.target_id)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _StreamPool(asyncio.Semaphore(self._limits.bulk_connections_per_host))
        pool.users += 1
        try:
            async with pool.gate:
                return await self._over_a_stream(pool, address, call)
        finally:
            pool.users -= 1
            if not pool.users and not pool.idle:
                self._pools.pop(key, None)

    async def _over_a_stream(self, pool: _StreamPool, address: Address, call: OutgoingCall) -> Answer:
        while True:
            if self._closed:
                raise ConnectionResetError("our transport is closed")
            stream, reused = self._idle(pool), True
            if stream is None:
                stream, reused = await self._open(address, call.target_id), False
            self._busy.add(stream)
            try:
                return await stream.call(call)
            except StaleError:
                if not reused:
                    raise
            finally:
                self._busy.discard(stream)
                self._put_back(pool, stream)

    def _idle(self, pool: _StreamPool) -> CallerStream | None:
        not_before_s = self._clock.monotonic() - self._limits.client_keepalive_s
        while pool.idle:
            stream = pool.idle.pop()
            if stream.fresh(not_before_s):
                return stream
            stream.close()
        return None

    def _put_back(self, pool: _StreamPool, stream: CallerStream) -> None:
        if self._closed or not stream.usable:
            stream.close()
            return
        stream.idle_since_s = self._clock.monotonic()
        pool.idle.append(stream)
        if self._sweeper is None:
            delay_s = self._limits.client_keepalive_s
            self._sweeper = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    def _sweep(self) -> None:
        """Close what has been idle for too long."""
        self._sweeper = None
        not_before_s = self._clock.monotonic() - self._limits.client_keepalive_s
        for key, pool in tuple(self._pools.items()):
            while pool.idle and not pool.idle[0].fresh(not_before_s):
                pool.idle.popleft().close()
            if not pool.users and not pool.idle:
                del self._pools[key]
        if any(pool.idle for pool in self._pools.values()):
            delay_s = self._limits.client_keepalive_s / 4
            self._sweeper = asyncio.get_running_loop().call_later(delay_s, self._sweep)

    async def _open(self, address: Address, target_id: str | None) -> CallerStream:
        """Open a stream; remember for a while when none is offered."""
        epoch = self._epoch
        try:
            sender, opening = await self._ask(address, target_id)
        except PeerRefusedError as error:
            if error.status not in _NO_STREAMS:
                raise
            if len(self._without) >= _MAX_PEERS:
                self._without.clear()
            self._without[address] = self._clock.monotonic() + self._limits.stream_retry_s
            raise NotOfferedError from error
        async with self._opener.open(address, opening.token) as sock:
            if sock.staged_nbytes:
                raise WireError("the peer spoke before it was asked")
        sock.keep_to(self._rates)
        stream = CallerStream(sock, sender, opening.ciphers(), self._limits, self._counters)
        if self._closed or self._epoch != epoch:
            stream.close()
            raise ConnectionResetError("our transport is closed")
        return stream
