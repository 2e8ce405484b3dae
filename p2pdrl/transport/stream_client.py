"""The calling half of streams: keeps the idle ones of each peer, and makes calls over them.

`http_client` asks here first and posts the call to peers that offer no streams. Errors of the
connection leave here as ``ConnectionError``; the rest is as in `Transport.call`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

from p2pdrl.clock import Clock
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.credentials import Credentials
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.outgoing import Call
from p2pdrl.transport.protocol import Address, Answer
from p2pdrl.transport.stream_caller import CallerStream, StaleError
from p2pdrl.transport.stream_opener import StreamOpener
from p2pdrl.transport.upgrading import NotOfferedError

__all__ = ["StreamClient"]

_MAX_PEERS = 4096


@dataclass(slots=True)
class _Pool:
    """The streams to one peer: idle ones, the latest used last, and how many calls run or wait."""

    gate: asyncio.Semaphore
    idle: deque[CallerStream] = field(default_factory=deque)
    users: int = 0


class StreamClient:
    """Streams to all peers.

    Args:
        credentials: sign requests, check answers.
        clock: monotonic time for idle streams.
        limits: all bounds.
        counters: written to.
    """

    def __init__(
        self,
        credentials: Credentials,
        *,
        clock: Clock,
        limits: TransportLimits,
        counters: TrafficCounters,
    ) -> None:
        self._opener = StreamOpener(credentials, limits, counters)
        self._clock = clock
        self._limits = limits
        self._pools: dict[tuple[Address, str | None], _Pool] = {}
        self._busy: set[CallerStream] = set()
        self._without: dict[Address, float] = {}
        self._sweeper: asyncio.TimerHandle | None = None
        self._closed = False

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
        self._opener.close()
        if self._sweeper is not None:
            self._sweeper.cancel()
            self._sweeper = None
        for stream in (*self._busy, *(idle for pool in self._pools.values() for idle in pool.idle)):
            stream.close()
        for pool in self._pools.values():
            pool.idle.clear()

    async def call(self, address: Address, call: Call) -> Answer:
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
            pool = self._pools[key] = _Pool(asyncio.Semaphore(self._limits.bulk_connections_per_host))
        pool.users += 1
        try:
            async with pool.gate:
                return await self._over_a_stream(pool, address, call)
        finally:
            pool.users -= 1
            if not pool.users and not pool.idle:
                self._pools.pop(key, None)

    async def _over_a_stream(self, pool: _Pool, address: Address, call: Call) -> Answer:
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

    def _idle(self, pool: _Pool) -> CallerStream | None:
        not_before_s = self._clock.monotonic() - self._limits.client_keepalive_s
        while pool.idle:
            stream = pool.idle.pop()
            if stream.fresh(not_before_s):
                return stream
            stream.close()
        return None

    def _put_back(self, pool: _Pool, stream: CallerStream) -> None:
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
        try:
            stream = await self._opener.open(address, target_id)
        except NotOfferedError:
            if len(self._without) >= _MAX_PEERS:
                self._without.clear()
            self._without[address] = self._clock.monotonic() + self._limits.stream_retry_s
            raise
        if self._closed:
            stream.close()
            raise ConnectionResetError("our transport is closed")
        return stream
