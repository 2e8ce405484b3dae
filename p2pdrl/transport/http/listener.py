"""The node's one port: binds it, caps connections, cuts slow ones, and closes it in good order.

listener = Listener(transport.limits, clock, transport.counters)
address = await listener.listen(app, "127.0.0.1", 7700, port_is_default=True, has_key=False)

Each connection is a `Watched` between the socket and aiohttp; the `Watchdog` looks at all of them.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections.abc import Callable
from typing import Literal, Protocol

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from p2pdrl.clock import Clock
from p2pdrl.errors import UsageError
from p2pdrl.transport.auth import Verdict
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, TrafficCounters

__all__ = ["ConnectionPace", "Listener", "Upgraded", "Watchdog", "Watched", "watched"]


class ConnectionPace:
    """What one connection has done lately, and whether that is too slow; times are monotonic.

        header ──request_started──► request ──request_ended──► idle ──first byte──► header

    aiohttp has no deadline for half-sent headers, stalled bodies or callers that don't read their answer.
    """

    def __init__(self, limits: TransportLimits, now_s: float) -> None:
        self._limits = limits
        self._phase: Literal["header", "request", "idle"] = "header"
        self._since_s = now_s
        self._window_s = now_s
        self._window_bytes = 0
        self._unsent_bytes = 0
        self._unsent_since_s = now_s

    def arrived(self, nbytes: int, now_s: float) -> None:
        """Bytes came in."""
        self._window_bytes += nbytes
        if self._phase == "idle":
            self._phase = "header"
            self._since_s = now_s

    def request_started(self, now_s: float) -> None:
        """A whole header was read; its handler runs."""
        self._phase = "request"
        self._open_window(now_s)

    def request_ended(self) -> None:
        """The handler is done."""
        self._phase = "idle"

    def verdict(self, now_s: float, *, body_open: bool, unsent_bytes: int) -> Verdict:
        """Tell why the connection has to be cut now.

        Args:
            now_s: monotonic time.
            body_open: a request's body is still coming and we are ready to take it.
            unsent_bytes: bytes of ours that the kernel hasn't taken.
        """
        stall_s = self._limits.stall_deadline_s
        if self._phase == "header" and now_s - self._since_s >= self._limits.header_deadline_s:
            return f"no whole header within {self._limits.header_deadline_s:g} s"
        if self._phase != "request" or not body_open:
            self._open_window(now_s)
        elif now_s - self._window_s >= stall_s:
            if self._window_bytes < max(1.0, self._limits.min_body_bytes_s * stall_s):
                return f"the body brought {self._window_bytes} bytes in {stall_s:g} s"
            self._open_window(now_s)
        if unsent_bytes == 0 or unsent_bytes != self._unsent_bytes:
            self._unsent_bytes = unsent_bytes
            self._unsent_since_s = now_s
        elif now_s - self._unsent_since_s >= stall_s:
            return f"the peer took nothing of {unsent_bytes} bytes in {stall_s:g} s"
        return None

    def _open_window(self, now_s: float) -> None:
        self._window_s = now_s
        self._window_bytes = 0


_MakeProtocol = Callable[[], asyncio.Protocol]
_FULL = b"too many connections"
_REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


class Upgraded(Protocol):
    """What has taken a connection over from aiohttp."""

    def tick(self, now_s: float) -> bool:
        """Look at it, once per tick; return whether it is too slow to be kept."""

    def abort(self) -> None:
        """Cut the connection."""


def watched(request: web.Request) -> Watched | None:
    """Return the watched connection of a request; None when it came to another kind of server."""
    found: Watched | None = request.get(_KEY)
    return found


class Watchdog:
    """All connections of one port; refused and dropped ones are counted."""

    def __init__(self, limits: TransportLimits, clock: Clock, counters: TrafficCounters) -> None:
        self.limits = limits
        self.clock = clock
        self.counters = counters
        self._connections: dict[asyncio.Protocol, Watched] = {}
        self._by_host: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._connections)

    def factory(self, make: _MakeProtocol) -> _MakeProtocol:
        """Wrap aiohttp's protocol factory."""
        return lambda: Watched(self, make)

    @property
    def middleware(self) -> Middleware:
        """The outermost middleware of the application; it marks the span of each request."""

        @web.middleware
        async def mark(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = self._connections.get(request.protocol)
            if connection is None:
                return await handler(request)
            request[_KEY] = connection
            connection.request_started(request)
            try:
                return await handler(request)
            finally:
                connection.request_ended()

        return mark

    def start(self) -> None:
        """Begin to look at connections, once per tick."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.watchdog_tick_s, self._tick)

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def admit(self, connection: Watched, host: str) -> asyncio.Protocol | None:
        """Give a new connection its aiohttp protocol, or None when a cap is reached."""
        of_host = self._by_host.get(host, 0)
        crowded = of_host >= self.limits.max_connections_per_host and not is_loopback(host)
        if crowded or len(self._connections) >= self.limits.max_connections:
            self.counters.refused_connections += 1
            return None
        inner = connection.make()
        self._connections[inner] = connection
        self._by_host[host] = of_host + 1
        return inner

    def forget(self, inner: asyncio.Protocol, host: str) -> None:
        """A connection ended."""
        if self._connections.pop(inner, None) is None:
            return
        self._by_host[host] -= 1
        if self._by_host[host] == 0:
            del self._by_host[host]

    def _tick(self) -> None:
        now_s = self.clock.monotonic()
        for connection in tuple(self._connections.values()):
            if connection.too_slow(now_s):
                self.counters.dropped_connections += 1
                connection.abort()
        self.start()


class Watched(asyncio.Protocol):
    """One connection: everything goes on to aiohttp's protocol, which ``make`` makes."""

    def __init__(self, watchdog: Watchdog, make: _MakeProtocol) -> None:
        self.make = make
        self._watchdog = watchdog
        self._pace = ConnectionPace(watchdog.limits, watchdog.clock.monotonic())
        self._host = ""
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._request: web.Request | None = None
        self._upgraded: Upgraded | None = None

    def hand_over(self, to: Upgraded) -> None:
        """From now on ``to`` says whether this connection is too slow."""
        self._upgraded = to

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, or refuse it."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - TCP gives no other
        peer = transport.get_extra_info("peername")
        self._host = str(peer[0]) if peer else ""
        self._transport = transport
        self._inner = self._watchdog.admit(self, self._host)
        if self._inner is None:
            transport.write(_REFUSAL)
            transport.close()
        else:
            self._inner.connection_made(transport)

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._pace.arrived(len(data), self._watchdog.clock.monotonic())
            self._inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended."""
        if self._inner is not None:
            self._watchdog.forget(self._inner, self._host)
            self._inner.connection_lost(exc)
        self._request = None

    def request_started(self, request: web.Request) -> None:
        """Aiohttp read a whole header."""
        self._request = request
        self._pace.request_started(self._watchdog.clock.monotonic())

    def request_ended(self) -> None:
        """Its handler is done."""
        self._request = None
        self._pace.request_ended()

    def too_slow(self, now_s: float) -> bool:
        """Tell whether this connection has to be cut."""
        transport = self._transport
        if transport is None:
            return False
        if self._upgraded is not None:
            return self._upgraded.tick(now_s)
        body_open = (
            self._request is not None and not self._request.content.is_eof() and transport.is_reading()
        )
        unsent_bytes = transport.get_write_buffer_size()
        return self._pace.verdict(now_s, body_open=body_open, unsent_bytes=unsent_bytes) is not None

    def abort(self) -> None:
        """Cut the connection without waiting for unsent bytes."""
        if self._upgraded is not None:
            self._upgraded.abort()
        if self._transport is not None:
            self._transport.abort()


_KEY = web.RequestKey("watched", Watched)


_PORTS_TRIED = 100
_log = logging.getLogger("p2pdrl.transport.http")


def _isnt_a_bad_request(record: logging.LogRecord) -> bool:
    """Leave out the trace that aiohttp logs for each malformed request: anybody could fill the disk."""
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError)


_log.addFilter(_isnt_a_bad_request)


class Listener:
    """Serves one application on one port."""

    def __init__(self, limits: TransportLimits, clock: Clock, counters: TrafficCounters) -> None:
        self._limits = limits
        self._watchdog = Watchdog(limits, clock, counters)
        self._runner: web.AppRunner | None = None
        self._server: asyncio.Server | None = None

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._watchdog)

    async def listen(
        self,
        app: web.Application,
        host: str,
        port: int,
        *,
        port_is_default: bool = False,
        has_key: bool = False,
        insecure: bool = False,
    ) -> Address:
        """Bind, and serve ``app`` until `close`.

        Args:
            app: what to serve; nothing can be added to it afterwards.
            host: name or IP of one of this machine's interfaces.
            port: TCP port; 0 takes any free one.
            port_is_default: nobody asked for this port, so that a taken one is passed over
                for the next free one.
            has_key: requests of peers are signed.
            insecure: listen beyond loopback without a key all the same.

        Returns:
            The address that was bound, with ``host`` as given.

        Raises:
            UsageError: the port is taken or not allowed, the host isn't of this machine, or
                the address is reachable for others and there is no key.
        """
        bind_ip, family = await _resolve(host)
        if not is_loopback(bind_ip) and not has_key and not insecure:
            raise UsageError(
                f"{host} can be reached from other machines and there is no swarm key: make one with "
                "`p2pdrl keygen FILE` and give it to every node, listen on 127.0.0.1, or add --insecure"
            )
        sock = _bind(bind_ip, family, host, port, _PORTS_TRIED if port_is_default and port else 1)
        try:
            await self._serve(app, sock)
        except BaseException:
            sock.close()
            raise
        return Address(host, int(sock.getsockname()[1]))

    async def _serve(self, app: web.Application, sock: socket.socket) -> None:
        limits = self._limits
        app.middlewares.insert(0, self._watchdog.middleware)
        self._runner = web.AppRunner(
            app,
            access_log=None,
            logger=_log,
            keepalive_timeout=limits.keepalive_s,
            lingering_time=limits.lingering_s,
            shutdown_timeout=limits.shutdown_grace_s,
            read_bufsize=limits.read_buffer_bytes,
            auto_decompress=False,
        )
        await self._runner.setup()
        make = self._runner.server
        if make is None:
            raise RuntimeError("aiohttp's runner has no server after its setup")
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._watchdog.factory(make), sock=sock, backlog=256)
        self._watchdog.start()

    async def close(self) -> None:
        """Take no more connections, let running handlers end for a moment, close the rest."""
        self._watchdog.stop()
        server, self._server = self._server, None
        runner, self._runner = self._runner, None
        if server is not None:
            server.close()
        if runner is not None:
            await runner.cleanup()
        if server is not None:
            await server.wait_closed()


async def _resolve(host: str) -> tuple[str, socket.AddressFamily]:
    """Return the IP to bind for ``host``, IPv4 when there is a choice."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"can't listen on {host!r}: the name can't be resolved ({error})") from error
    family, _, _, _, where = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return str(where[0]), family


def _bind(ip: str, family: socket.AddressFamily, host: str, port: int, tries: int) -> socket.socket:
    """Return a socket bound to the first free port of ``tries``, starting at ``port``."""
    for candidate in range(port, min(port + tries, 65536)):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind((ip, candidate))
            sock.listen(256)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                continue
            if error.errno == errno.EACCES:
                raise UsageError(f"port {port} isn't allowed to this user: take one above 1023") from error
            raise UsageError(f"can't listen on {host}:{port}: {error.strerror}") from error
        sock.setblocking(False)
        return sock
    if tries > 1:
        raise UsageError(
            f"the ports {port}-{port + tries - 1} of {host} are all taken: choose one by --listen"
        )
    raise UsageError(
        f"port {port} of {host} is taken, maybe by another node: stop that one, or choose another by --listen"
    )
