"""The port: binding it, what is spoken there, and what happens when files run out."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import UsageError
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.http.listener import APP_TRANSPORT, Listener, ServedConnection
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import HELLO, OPENED, TOKEN_BYTES
from p2pdrl.transport.protocol import Address, TrafficCounters
from p2pdrl.transport.tls import SwarmTls, client_context

from ..conftest import CLIENT_TLS, KEY, SERVER, Served, answer_of, until, until_closed


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    made = Listener(TransportLimits(), SystemClock(), TrafficCounters())
    yield made
    await made.close()
    await made.close()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


async def test_a_free_port_is_told(listener: Listener) -> None:
    address = await listener.listen(web.Application(), "localhost", 0)
    assert address.host == "localhost"
    with socket.create_connection(("127.0.0.1", address.port), 1):
        pass


async def test_a_taken_port_that_was_asked_for(listener: Listener, taken: int) -> None:
    with pytest.raises(UsageError, match=f"port {taken} of 127.0.0.1 is taken"):
        await listener.listen(web.Application(), "127.0.0.1", taken)


async def test_a_taken_port_that_nobody_asked_for(listener: Listener, taken: int) -> None:
    address = await listener.listen(web.Application(), "127.0.0.1", taken, port_is_default=True)
    assert taken < address.port < taken + 100


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_beyond_loopback_a_key_is_needed(listener: Listener, host: str) -> None:
    with pytest.raises(UsageError, match="--insecure"):
        await listener.listen(web.Application(), host, 0)


@pytest.mark.parametrize("allow", [{"has_key": True}, {"insecure": True}])
async def test_beyond_loopback_with_a_key_or_on_demand(listener: Listener, allow: dict[str, bool]) -> None:
    address = await listener.listen(web.Application(), "0.0.0.0", 0, **allow)
    assert address == Address("0.0.0.0", address.port)


@pytest.mark.parametrize("host", ["192.0.2.1", "name.invalid"])
async def test_hosts_that_are_not_ours(listener: Listener, host: str) -> None:
    with pytest.raises(UsageError, match="can't listen"):
        await listener.listen(web.Application(), host, 0, has_key=True)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("10.0.0.1", "localhost", "", "::", "0.0.0.0")))


# What is spoken

TOKEN = b"7" * TOKEN_BYTES


class Echo:
    """A connection that says everything again."""

    def __init__(self, sock: socket.socket) -> None:
        self.proven = True
        self.slow = False
        self.aborted = False
        self.sock = sock

    def too_slow(self, _: float) -> bool:
        return self.slow

    def abort(self) -> None:
        self.aborted = True
        self.sock.close()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while data := await loop.sock_recv(self.sock, 100):
            await loop.sock_sendall(self.sock, data)


class Echoes:
    """Makes one of each connection that shows the token; shares the port."""

    def __init__(self, tls: SwarmTls | None) -> None:
        self.tls = tls
        self.echoes: list[Echo] = []
        self.hosts: list[str] = []
        self.kept: list[socket.socket] = []
        self.keeps = False

    def redeem(self, token: bytes) -> Callable[[socket.socket, str], ServedConnection | None] | None:
        return self.take if token == TOKEN else None

    def take(self, sock: socket.socket, host: str) -> ServedConnection | None:
        self.hosts.append(host)
        if self.keeps:
            self.kept.append(sock)
            return None
        self.echoes.append(Echo(sock))
        return self.echoes[-1]


@contextmanager
def hung_up(*writers: asyncio.StreamWriter) -> Iterator[None]:
    try:
        yield
    finally:
        for writer in writers:
            writer.transport.abort()


async def hello(_: web.Request) -> web.Response:
    return web.Response(text="hello")


async def closed_twice(request: web.Request) -> web.Response:
    assert request.transport is not None
    request.transport.close()
    request.transport.close()
    await asyncio.sleep(5.0)
    return web.Response()


QUICK = TransportLimits(watchdog_tick_s=0.01, shutdown_grace_s=0.05, header_deadline_s=5.0)


class Port:
    """A listener with all that it speaks."""

    def __init__(self, keyed: bool = True) -> None:
        self.counters = TrafficCounters()
        self.listener = Listener(QUICK, SystemClock(), self.counters)
        self.user = Echoes(SERVER.tls([KEY]) if keyed else None)
        self.address = Address("", 0)

    async def __aenter__(self) -> Port:
        app = web.Application()
        app[APP_TRANSPORT] = self.user
        app.router.add_get("/", hello)
        app.router.add_get("/twice", closed_twice)
        self.address = await self.listener.listen(app, "127.0.0.1", 0, has_key=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.listener.close()
        for sock in self.user.kept:
            sock.close()

    async def connect(self, **more: object) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection(self.address.host, self.address.port, **more)  # type: ignore[arg-type]


GET = b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def test_three_protocols_share_the_port() -> None:
    async with Port() as port:
        for tls in (None, client_context([KEY]), CLIENT_TLS):
            reader, writer = await port.connect(ssl=tls)
            with hung_up(writer):
                writer.write(GET)
                assert await answer_of(reader) == (200, b"hello")
        reader, writer = await port.connect()
        with hung_up(writer):
            writer.write(HELLO + TOKEN + b"word")
            assert await asyncio.wait_for(reader.readexactly(5), 5) == OPENED + b"word"
            assert port.user.hosts == ["127.0.0.1"]
            await until(lambda: port.listener.connections == 1)
        await until(lambda: port.listener.connections == 0)
        assert port.user.echoes[0].aborted, "it is told when it has ended"


async def test_without_a_key_nobody_speaks_tls() -> None:
    async with Port(keyed=False) as port:
        reader, writer = await port.connect()
        with hung_up(writer):
            writer.write(GET)
            assert await answer_of(reader) == (200, b"hello")
        with pytest.raises(OSError, match="WRONG_VERSION_NUMBER"):
            await port.connect(ssl=CLIENT_TLS)
        assert port.counters.failed_handshakes == 0


async def test_a_connection_that_was_given_away_is_nobodys_here() -> None:
    async with Port() as port:
        port.user.keeps = True
        reader, writer = await port.connect()
        with hung_up(writer):
            writer.write(HELLO + TOKEN)
            assert await asyncio.wait_for(reader.readexactly(1), 5) == OPENED
            await until(lambda: port.listener.connections == 0)
            await port.listener.close()
            port.user.kept[0].sendall(b"still here")
            assert await asyncio.wait_for(reader.readexactly(10), 5) == b"still here"


async def test_what_is_served_is_watched() -> None:
    async with Port() as port:
        reader, writer = await port.connect()
        with hung_up(writer):
            writer.write(HELLO + TOKEN)
            assert await asyncio.wait_for(reader.readexactly(1), 5) == OPENED
            await until(lambda: len(port.user.echoes) == 1)
            port.user.echoes[0].slow = True
            await until(lambda: port.user.echoes[0].aborted)
            assert port.counters.dropped_connections >= 1


async def test_a_tls_connection_that_was_closed_twice_leaves_the_others_watched() -> None:
    """While its other end doesn't say goodbye."""
    async with Port() as port:
        _, deaf = await port.connect(ssl=CLIENT_TLS)
        deaf.transport.pause_reading()  # type: ignore[attr-defined]
        reader, writer = await port.connect()
        with hung_up(deaf, writer):
            deaf.write(GET.replace(b"/", b"/twice", 1))
            writer.write(HELLO + TOKEN)
            assert await asyncio.wait_for(reader.readexactly(1), 5) == OPENED
            await asyncio.sleep(5 * QUICK.watchdog_tick_s)
            port.user.echoes[0].slow = True
            await until(lambda: port.user.echoes[0].aborted)


async def test_closing_cuts_what_is_still_open() -> None:
    """However far it came."""
    async with Port() as port:
        silent = await port.connect()
        half = await port.connect()
        half[1].write(b"\x16\3\1")
        idle = await port.connect(ssl=CLIENT_TLS)
        idle[1].write(GET)
        assert await answer_of(idle[0]) == (200, b"hello")
        echo = await port.connect()
        echo[1].write(HELLO + TOKEN)
        assert await asyncio.wait_for(echo[0].readexactly(1), 5) == OPENED
        with hung_up(*(writer for _, writer in (silent, half, idle, echo))):
            await until(lambda: port.listener.connections == 4)
            await asyncio.wait_for(port.listener.close(), 3)
            assert port.listener.connections == 0
            for reader, _ in (silent, half, idle, echo):
                assert await asyncio.wait_for(until_closed(reader), 3) == b""
            with pytest.raises(ConnectionError):
                await port.connect()


async def test_everybody_can_be_cut_and_may_come_again() -> None:
    async with Port() as port:
        silent = await port.connect()
        idle = await port.connect(ssl=CLIENT_TLS)
        idle[1].write(GET)
        assert await answer_of(idle[0]) == (200, b"hello")
        echo = await port.connect()
        echo[1].write(HELLO + TOKEN)
        assert await asyncio.wait_for(echo[0].readexactly(1), 5) == OPENED
        with hung_up(*(writer for _, writer in (silent, idle, echo))):
            await until(lambda: port.listener.connections == 3)
            port.listener.cut()
            assert port.listener.connections == 0
            for reader, _ in (silent, idle, echo):
                assert await asyncio.wait_for(until_closed(reader), 3) == b""
        reader, writer = await port.connect(ssl=CLIENT_TLS)
        with hung_up(writer):
            writer.write(GET)
            assert await answer_of(reader) == (200, b"hello")
        assert port.counters.displaced_connections == port.counters.dropped_connections == 0


async def test_a_bug_of_ours_is_told_to_the_loop_and_others_are_served() -> None:
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))
    async with Port() as port:

        def broken(_sock: socket.socket, _host: str) -> None:
            raise KeyError("a bug")

        port.user.take = broken  # type: ignore[method-assign]
        reader, writer = await port.connect()
        with hung_up(writer):
            writer.write(HELLO + TOKEN)
            await until(lambda: bool(told))
        assert isinstance(told[0]["exception"], KeyError)
        reader, writer = await port.connect()
        with hung_up(writer):
            writer.write(GET)
            assert await answer_of(reader) == (200, b"hello")


# Without file descriptors

_OPEN = Path("/proc/self/fd")
needs_proc = pytest.mark.skipif(not _OPEN.exists(), reason="needs to know which files are open")


class Files:
    """Leaves this process no file descriptor but those that are given back."""

    def __init__(self) -> None:
        self._before = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._fillers: list[int] = []

    def __enter__(self) -> Files:
        gc.collect()  # which would give some back at any time
        most = max(int(entry.name) for entry in _OPEN.iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (most + 8, self._before[1]))
        try:
            while True:
                self._fillers.append(os.dup(0))
        except OSError:
            return self

    def give_back(self) -> None:
        os.close(self._fillers.pop())

    def __exit__(self, *_: object) -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, self._before)
        while self._fillers:
            self.give_back()


@contextmanager
def waiting(address: Address, count: int = 1) -> Iterator[Callable[[], list[socket.socket]]]:
    """Sockets that are made now and connected later, when no more could be made."""
    with_files = [socket.socket() for _ in range(count)]

    def connect() -> list[socket.socket]:
        for sock in with_files:
            sock.settimeout(5)
            sock.connect((address.host, address.port))
            sock.setblocking(False)
        return with_files

    try:
        yield connect
    finally:
        for sock in with_files:
            sock.close()


async def got(sock: socket.socket) -> bytes:
    return await asyncio.wait_for(asyncio.get_running_loop().sock_recv(sock, 1000), 5)


@needs_proc
async def test_a_stranger_gives_way_when_files_run_out(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await served.connect(None)
    await until(lambda: served.listener.connections == 1)
    with hung_up(writer), waiting(served.address) as connect:
        with Files():
            (sock,) = connect()
            await until(lambda: len(served.starved) == 1)
            assert served.transport.counters.starved == 1
            assert served.transport.counters.displaced_connections == 1
            sock.send(f"GET /v1/echo HTTP/1.1\r\nHost: {served.address}\r\n\r\n".encode())
            assert b"200 OK" in await got(sock)
            assert served.starved == ["Too many open files"]
        assert await asyncio.wait_for(until_closed(reader), 3) == b""
    assert not caplog.records


@needs_proc
async def test_members_are_served_while_others_wait_for_files(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()
    reader, writer = await served.connect()
    writer.write(served.request(b"ok"))
    assert await answer_of(reader) == (200, b"ok")
    with hung_up(writer), waiting(served.address, 5) as connect:
        with Files() as files:
            started_s = loop.time()
            newcomers = connect()
            await until(lambda: len(served.starved) == 3)
            assert loop.time() - started_s >= 0.4, "it pauses each time, however many wait"
            writer.write(served.request(b"still here"))
            assert await answer_of(reader) == (200, b"still here")
            assert served.transport.counters.displaced_connections == 0
            assert served.listener.connections == 1
            files.give_back()
            newcomers[0].send(f"GET /v1/echo HTTP/1.1\r\nHost: {served.address}\r\n\r\n".encode())
            assert b"200 OK" in await got(newcomers[0])
        for sock in newcomers[1:]:
            sock.send(f"GET /v1/echo HTTP/1.1\r\nHost: {served.address}\r\n\r\n".encode())
            assert b"200 OK" in await got(sock)
        assert served.transport.counters.starved == len(served.starved)
    assert not caplog.records
