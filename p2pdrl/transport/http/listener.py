"""The node's one port: binds it, caps connections, cuts slow ones, and closes it in good order.

    listener = Listener(transport.limits, clock, transport.counters)
    transport.mount(app)
    address = await listener.listen(app, "127.0.0.1", 7700, port_is_default=True, has_key=False)

What a connection speaks is seen from its first byte: TLS (peers of a swarm with a key), HTTP (the API; peers
of one without), or the hello of a stream or pipe, see `opening`. The `Watchdog` counts all of them from the
moment they are accepted, before a byte is read. When the port is full, or the process is out of file
descriptors, the connection that has proven nothing for longest gives way: so no crowd of strangers keeps
members and the operator out.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import select
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Literal, Protocol

from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Handler, Middleware

from p2pdrl.clock import Clock
from p2pdrl.errors import UsageError
from p2pdrl.transport.auth import Verdict
from p2pdrl.transport.certificates import NodeCertificate
from p2pdrl.transport.dial import is_loopback, network_of
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import HELLO, OPENED, TOKEN_BYTES
from p2pdrl.transport.protocol import Address, TrafficCounters
from p2pdrl.transport.tls import SwarmTls

__all__ = [
    "APP_TRANSPORT",
    "Connection",
    "ConnectionPace",
    "Listener",
    "PortUser",
    "ServedConnection",
    "Watchdog",
    "Watched",
    "watched",
]


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


class Connection(Protocol):
    """One connection as the `Watchdog` sees it.

    Attributes:
        proven: its caller has shown that it is a member, or an operator.
    """

    proven: bool

    def too_slow(self, now_s: float) -> bool:
        """Look at it, once per tick; return whether it has to be cut."""

    def abort(self) -> None:
        """Cut it, without waiting for unsent bytes."""


class Watchdog:
    """All connections of one port; refused, dropped and displaced ones are counted."""

    def __init__(self, limits: TransportLimits, clock: Clock, counters: TrafficCounters) -> None:
        self.limits = limits
        self.clock = clock
        self.counters = counters
        self._hosts: dict[Connection, str] = {}
        """In the order in which they came."""
        self._by_host: dict[str, int] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._hosts)

    def start(self) -> None:
        """Begin to look at connections, once per tick."""
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self.limits.watchdog_tick_s, self._tick)

    def stop(self) -> None:
        """Stop looking."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def admit(self, connection: Connection, host: str) -> bool:
        """Count a new connection; False when there is no room for it."""
        host = network_of(host)
        limits = self.limits
        crowded = self._by_host.get(host, 0) >= limits.max_connections_per_host and not is_loopback(host)
        if (crowded and not self.displace(host)) or (
            len(self._hosts) >= limits.max_connections and not self.displace()
        ):
            self.counters.refused_connections += 1
            return False
        strangers = sum(not known.proven for known in self._hosts)
        if strangers >= max(_FEW_STRANGERS, limits.max_connections // 4):
            self.displace()
        self._hosts[connection] = host
        self._by_host[host] = self._by_host.get(host, 0) + 1
        return True

    def displace(self, host: str | None = None) -> bool:
        """Cut the oldest connection that has proven nothing, of ``host`` or of who has most such.

        Returns:
            False when there is none.
        """
        strangers = [
            known for known in self._hosts if not known.proven and host in (None, self._hosts[known])
        ]
        if not strangers:
            return False
        counts = Counter(self._hosts[stranger] for stranger in strangers)
        found = max(strangers, key=lambda stranger: counts[self._hosts[stranger]])  # the first of equals
        self.counters.displaced_connections += 1
        self.forget(found)
        found.abort()
        return True

    def replace(self, arrived: Connection, by: Connection) -> bool:
        """Watch another object for a connection from now on.

        Returns:
            False when it was cut meanwhile, or its node has too many.
        """
        host = self._hosts.get(arrived)
        node_id = getattr(by, "node_id", None)
        if host is None or (
            node_id is not None
            and sum(getattr(known, "node_id", None) == node_id for known in self._hosts)
            >= self.limits.max_connections_per_host
        ):
            return False
        del self._hosts[arrived]
        self._hosts[by] = host
        return True

    def forget(self, connection: Connection) -> None:
        """A connection ended; one that isn't counted any more is passed over."""
        host = self._hosts.pop(connection, None)
        if host is None:
            return
        self._by_host[host] -= 1
        if self._by_host[host] == 0:
            del self._by_host[host]

    def cut(self) -> None:
        """Cut all of them."""
        for connection in tuple(self._hosts):
            self.forget(connection)
            connection.abort()

    def _tick(self) -> None:
        self.start()  # first: a bug in one connection must leave the others watched
        now_s = self.clock.monotonic()
        for connection in tuple(self._hosts):
            if connection.too_slow(now_s):
                self.counters.dropped_connections += 1
                connection.abort()


_FEW_STRANGERS = 64
"""So many connections may have proven nothing at any time; or a quarter of all, where that is more."""


class Watched(asyncio.Protocol):
    """One HTTP connection, between the socket and aiohttp's protocol, to which everything goes on.

    Args:
        inner: aiohttp's.
        made: called when the connection is up; False cuts it.
        lost: called when it has ended.

    Attributes:
        proven: see `Connection`; whoever checks credentials sets it.
        shown: what the certificate at the other end says; None for none.
    """

    def __init__(
        self,
        watchdog: Watchdog,
        inner: asyncio.Protocol,
        made: Callable[[Watched], bool],
        lost: Callable[[Watched], None],
    ) -> None:
        self.proven = False
        self.shown: NodeCertificate | None = None
        self.inner = inner
        self._watchdog = watchdog
        self._pace = ConnectionPace(watchdog.limits, watchdog.clock.monotonic())
        self._made, self._lost = made, lost
        self._transport: asyncio.Transport | None = None
        self._request: web.Request | None = None

    @property
    def node_id(self) -> str | None:
        """Who has shown a certificate at the other end; None for nobody."""
        return self.shown.node_id if self.shown is not None else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to be watched."""
        assert isinstance(transport, asyncio.Transport)  # noqa: S101 - TCP gives no other
        self._transport = transport
        self.shown = SwarmTls.shown_by(transport.get_extra_info("ssl_object"))
        self.proven = self.shown is not None
        self.inner.connection_made(transport)
        if not self._made(self):
            transport.abort()

    def data_received(self, data: bytes) -> None:
        """Pass it on."""
        self._pace.arrived(len(data), self._watchdog.clock.monotonic())
        self.inner.data_received(data)

    def eof_received(self) -> bool | None:
        """Pass it on."""
        return self.inner.eof_received()

    def pause_writing(self) -> None:
        """Pass it on."""
        self.inner.pause_writing()

    def resume_writing(self) -> None:
        """Pass it on."""
        self.inner.resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """It ended."""
        self._lost(self)
        self.inner.connection_lost(exc)
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
        try:
            body_open = (
                self._request is not None and not self._request.content.is_eof() and transport.is_reading()
            )
            unsent_bytes = transport.get_write_buffer_size()
        except AttributeError:
            # Closed twice, a TLS transport of asyncio's forgets its other half. That ends by itself.
            return False
        return self._pace.verdict(now_s, body_open=body_open, unsent_bytes=unsent_bytes) is not None

    def abort(self) -> None:
        """Cut the connection without waiting for unsent bytes."""
        if self._transport is not None:
            self._transport.abort()


_KEY = web.RequestKey("watched", Watched)


def watched(request: web.BaseRequest) -> Watched | None:
    """Return the watched connection of a request; None when it came to another kind of server."""
    found: Watched | None = request.get(_KEY)
    return found


class ServedConnection(Connection, Protocol):
    """A connection that speaks something else than HTTP."""

    async def run(self) -> None:
        """Serve it until it ends; raises nothing that a peer can cause."""


class PortUser(Protocol):
    """What shares the port with HTTP; see `APP_TRANSPORT`.

    Attributes:
        tls: for callers who speak it; None where nobody does.
    """

    tls: SwarmTls | None

    def redeem(self, token: bytes) -> Callable[[socket.socket, str], ServedConnection | None] | None:
        """Return what takes a connection over that has shown ``token``; None for an unknown one.

        It is given the socket, which is its own from then on, and the caller's IP, and returns what is to be
        run and watched here, if anything.
        """


APP_TRANSPORT = web.AppKey("transport", PortUser)
"""Set by `HttpTransport.mount` on the application that is served."""

_TLS_HANDSHAKE = b"\x16"
_RECORD_HEAD, _LONGEST_HELLO, _LOOK_AGAIN_S = 5, 4096, 0.02
_FULL = b"too many connections"
_REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\nContent-Type: text/plain\r\nConnection: close\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(_FULL), _FULL)
)


class _Arriving:
    """A connection that was accepted, until it is known what it speaks.

    Attributes:
        served: whether it turned out to be something that isn't HTTP, which runs now.
    """

    def __init__(self, port: _Port, sock: socket.socket, host: str) -> None:
        self.proven = False
        self.served = False
        self._port = port
        self._watchdog = port.watchdog
        self._sock = sock
        self._host = host
        self._since_s = self._watchdog.clock.monotonic()
        self._given = False
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> asyncio.Task[None]:
        """Find out, and hand it on."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="connection")
        return self._task

    def too_slow(self, now_s: float) -> bool:
        """Tell whether its first bytes, or the handshake, take too long."""
        return now_s - self._since_s >= self._watchdog.limits.header_deadline_s

    def abort(self) -> None:
        """Cut it."""
        if self._task is not None:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._hand_on()
        except (OSError, asyncio.CancelledError):
            pass  # it went, its TLS is no good, or it was cut
        except Exception as error:  # noqa: BLE001 - a bug of ours, and no reason to stop listening
            context = {"message": "a connection couldn't be served", "exception": error}
            asyncio.get_running_loop().call_exception_handler(context)
        finally:
            self._watchdog.forget(self)
            if not self._given:
                self._sock.close()

    async def _hand_on(self) -> None:
        user = self._port.user
        if user is None:
            await self._http(None)
            return
        first = await _first_byte(self._sock)
        if first == HELLO[:1]:
            await self._raw(user)
        elif first == _TLS_HANDSHAKE and user.tls is not None:
            await _client_hello(self._sock)
            await self._http(user.tls)
        else:
            await self._http(None)

    async def _http(self, tls: SwarmTls | None) -> None:
        """Give it to aiohttp, after a handshake when there is ``tls``."""
        bound_s = self._watchdog.limits.header_deadline_s if tls is not None else None
        inner = self._port.make()
        connection = Watched(self._watchdog, inner, self._made, self._port.lost)
        self._given = True
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection,
                self._sock,
                ssl=tls.server if tls is not None else None,
                ssl_handshake_timeout=bound_s,
                ssl_shutdown_timeout=self._watchdog.limits.lingering_s if tls is not None else None,
            )
        except OSError:
            self._watchdog.counters.failed_handshakes += tls is not None
            raise

    def _made(self, connection: Watched) -> bool:
        self._port.made(connection)
        return self._watchdog.replace(self, connection)

    async def _raw(self, user: PortUser) -> None:
        """Take the hello of a stream or a pipe; no answer to one that nobody knows."""
        loop = asyncio.get_running_loop()
        hello = b""
        while len(hello) < len(HELLO) + TOKEN_BYTES:
            more = await loop.sock_recv(self._sock, len(HELLO) + TOKEN_BYTES - len(hello))
            if not more:
                return
            hello += more
        take = user.redeem(hello[len(HELLO) :]) if hello.startswith(HELLO) else None
        if take is None:
            self._watchdog.counters.refused_connections += 1
            return
        try:
            self._sock.send(OPENED)  # nothing was sent before, so it fits
        except OSError:
            pass  # whoever takes the connection will notice, and has to be told of it
        served = take(self._sock, self._host)
        self._given = True
        if served is None:
            return
        self.served = True
        try:
            if self._watchdog.replace(self, served):
                await served.run()
        finally:
            served.abort()
            self._watchdog.forget(served)


async def _first_byte(sock: socket.socket) -> bytes:
    """Return the first byte that comes, and leave it there; raises ``ConnectionError`` when none does."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    loop.add_reader(sock, _settle, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)
    if not (first := sock.recv(1, socket.MSG_PEEK)):
        raise ConnectionResetError("the caller went away")
    return first


async def _client_hello(sock: socket.socket) -> None:
    """Wait for the whole first record of TLS: its machinery costs 300 kB, which a byte isn't worth."""
    while True:
        seen = sock.recv(_LONGEST_HELLO, socket.MSG_PEEK)
        if not seen:
            raise ConnectionResetError("the caller went away")
        if len(seen) >= _RECORD_HEAD and len(seen) >= min(
            _RECORD_HEAD + int.from_bytes(seen[3:5], "big"), _LONGEST_HELLO
        ):
            break
        await asyncio.sleep(_LOOK_AGAIN_S)
    if _hung_up(sock):
        raise ConnectionResetError("the caller went away")


def _hung_up(sock: socket.socket) -> bool:
    """Whether the caller has closed its end already, behind what it sent, where the system tells (Linux).

    When a machine was frozen, all whose calls ran out of time meanwhile are still in line: a hundred at once.
    """
    try:
        return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _CLOSED
    except (AttributeError, OSError):  # not there; or the socket isn't one of TCP
        return False


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_CLOSED = frozenset({7, 8})
"""TCP_CLOSE and TCP_CLOSE_WAIT, the first byte of ``struct tcp_info`` (``linux/tcp.h``)."""
_STARVED = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
_ACCEPTED_AT_ONCE = 8
"""Few, so that a crowd can't push a member's connection out between two turns of its handshake."""
_PAUSE_S = 0.25
"""How long nothing is accepted by a process that is out of file descriptors."""


class _Port:
    """The listening socket, and all that came in by it."""

    def __init__(
        self,
        sock: socket.socket,
        make: Callable[[], asyncio.Protocol],
        user: PortUser | None,
        watchdog: Watchdog,
        on_starved: Callable[[str], None],
    ) -> None:
        self.make = make
        self.user = user
        self.watchdog = watchdog
        self.watched: dict[asyncio.Protocol, Watched] = {}
        """HTTP connections by aiohttp's protocol."""
        self._sock = sock
        self._on_starved = on_starved
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._tasks: dict[asyncio.Task[None], _Arriving] = {}
        self._empty = asyncio.Event()
        """Set while there is no HTTP connection."""
        self._empty.set()

    def start(self) -> None:
        """Accept connections."""
        self._timer = None
        self._loop.add_reader(self._sock, self._accept)

    def made(self, connection: Watched) -> None:
        """An HTTP connection is up."""
        self.watched[connection.inner] = connection
        self._empty.clear()

    def lost(self, connection: Watched) -> None:
        """An HTTP connection ended."""
        self.watchdog.forget(connection)
        self.watched.pop(connection.inner, None)
        if not self.watched:
            self._empty.set()

    def mute(self) -> None:
        """Accept no more, and drop what has just come."""
        if self._timer is not None:
            self._timer.cancel()
        self._loop.remove_reader(self._sock)
        self._sock.close()
        for task, arriving in self._tasks.items():
            if not arriving.served:
                task.cancel()

    async def close(self, until_s: float) -> None:
        """Wait for what is about to end, until ``until_s`` of the event loop's time; cut the rest."""
        try:
            async with asyncio.timeout_at(until_s):
                await asyncio.gather(*self._tasks, return_exceptions=True)
                await self._empty.wait()
        except TimeoutError:
            for connection in tuple(self.watched.values()):
                connection.abort()
            await self._empty.wait()

    def _accept(self) -> None:
        for count in range(_ACCEPTED_AT_ONCE):
            try:
                sock, where = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno not in _STARVED:
                    continue  # this one broke while it waited
                if self._somebody_waits():
                    self._pause(error, displace=not count)
                return
            sock.setblocking(False)
            self.take(sock, str(where[0]))

    def take(self, sock: socket.socket, host: str) -> None:
        """Serve a connection, like one that was accepted here."""
        arriving = _Arriving(self, sock, host)
        if not self.watchdog.admit(arriving, host):
            try:
                sock.send(_REFUSAL)
            except OSError:
                pass  # it went
            sock.close()
            return
        task = arriving.begin()
        self._tasks[task] = arriving
        task.add_done_callback(self._tasks.pop)

    def _somebody_waits(self) -> bool:
        """Tell whether there is a connection to be accepted; without a descriptor `accept` doesn't."""
        waiting = select.poll()
        waiting.register(self._sock, select.POLLIN)
        return bool(waiting.poll(0))

    def _pause(self, error: OSError, *, displace: bool) -> None:
        """Wait: asyncio's own server logs a trace for each connection that can't be accepted.

        A stranger has to go, unless some have just come: they get the time to prove themselves.
        """
        self.watchdog.counters.starved += 1
        if displace:
            self.watchdog.displace()
        self._on_starved(error.strerror or str(error))
        self._loop.remove_reader(self._sock)
        self._timer = self._loop.call_later(_PAUSE_S, self.start)


_PORTS_TRIED = 100
_CONTINUE = "100-continue"
_RequestHandler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]
_log = logging.getLogger("p2pdrl.transport.http")


def _isnt_a_callers_fault(record: logging.LogRecord) -> bool:
    """Leave out what aiohttp logs with a trace for each malformed request, and for callers who have hung up.

    Anybody could fill the disk.
    """
    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, HttpProcessingError | ClientConnectionResetError)


_log.addFilter(_isnt_a_callers_fault)


async def _answer(handler: _RequestHandler, request: web.BaseRequest) -> web.StreamResponse:
    """Refuse what a caller expects of us but ``100-continue``: aiohttp quotes it in its answer.

    It fails at that where bytes of it aren't UTF-8.
    """
    if request.headers.get("Expect", _CONTINUE).lower() not in ("", _CONTINUE):
        return web.Response(status=417, text=f"this node knows no expectation but {_CONTINUE}")
    return await handler(request)


class Listener:
    """Serves one application on one port.

    Args:
        on_starved: told why, each time that a connection can't be accepted for want of file descriptors or
            memory.
    """

    def __init__(
        self,
        limits: TransportLimits,
        clock: Clock,
        counters: TrafficCounters,
        *,
        on_starved: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._limits = limits
        self._watchdog = Watchdog(limits, clock, counters)
        self._on_starved = on_starved
        self._runner: web.AppRunner | None = None
        self._port: _Port | None = None

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
        app.middlewares.insert(0, self._mark)
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
        make.request_handler = partial(_answer, make.request_handler)
        self._port = _Port(sock, make, app.get(APP_TRANSPORT), self._watchdog, self._on_starved)
        self._port.start()
        self._watchdog.start()

    @property
    def _mark(self) -> Middleware:
        """The outermost middleware of the application; it marks the span of each request."""

        @web.middleware
        async def mark(request: web.Request, handler: Handler) -> web.StreamResponse:
            port = self._port
            connection = port.watched.get(request.protocol) if port is not None else None
            if connection is None:
                return await handler(request)
            request[_KEY] = connection
            connection.request_started(request)
            try:
                return await handler(request)
            finally:
                connection.request_ended()

        return mark

    def take(self, sock: socket.socket, host: str) -> None:
        """Serve a connection that a relay has made for us, whose IP is ``host``, like one accepted here."""
        if self._port is None:
            sock.close()
        else:
            self._port.take(sock, host)

    def cut(self) -> None:
        """Cut every connection: members make new ones, and prove themselves anew."""
        self._watchdog.cut()

    async def close(self) -> None:
        """Take no more connections, let running handlers end for a moment, close the rest."""
        self._watchdog.stop()
        until_s = asyncio.get_running_loop().time() + self._limits.shutdown_grace_s
        port, self._port = self._port, None
        runner, self._runner = self._runner, None
        if port is not None:
            port.mute()
        if runner is not None:
            await runner.cleanup()
        if port is not None:
            await port.close(until_s)


async def _resolve(host: str) -> tuple[str, socket.AddressFamily]:
    """Return the IP to bind for ``host``, IPv4 when there is a choice."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"can't listen on {host!r}: that name can't be resolved; name an address of this machine"
        ) from error
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
