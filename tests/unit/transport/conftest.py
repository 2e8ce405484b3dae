"""A served node that tests can send raw bytes to."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.http.guard import guard_middleware
from p2pdrl.transport.http.headers import RequestHead
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import PIECE_BYTES, TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Reply

KEY = b"the swarm's key"
SERVER, CLIENT, OTHER = (Identity(name * 32) for name in (b"b", b"a", b"d"))
SERVER_ID, CLIENT_ID, OTHER_ID = SERVER.node_id, CLIENT.node_id, OTHER.node_id
CLIENT_TLS, OTHER_TLS = CLIENT.tls([KEY]).client, OTHER.tls([KEY]).client
QUICK = TransportLimits(
    header_deadline_s=0.4,
    stall_deadline_s=0.4,
    watchdog_tick_s=0.02,
    lingering_s=0.3,
    shutdown_grace_s=0.05,
    max_connections=8,
    requests_per_s=1e-9,
    requests_burst=40,
    failures_per_s=1e-9,
    failures_burst=40,
)
PATIENT = replace(QUICK, header_deadline_s=5.0, stall_deadline_s=5.0)

Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Served:
    """One node on a real port; ``taken`` holds the vectors that its handler got."""

    transport: HttpTransport
    listener: Listener
    address: Address
    taken: list[bytes] = field(default_factory=list)
    starved: list[str] = field(default_factory=list)

    def head(self, meta: bytes = b"", vector: bytes = b"", path: str = "/p2p/take") -> RequestHead:
        return RequestHead(
            path=path,
            sender=CLIENT_ID,
            target=SERVER_ID,
            swarm="default",
            meta_nbytes=len(meta),
            vector_nbytes=len(vector),
        )

    def request(
        self,
        meta: bytes = b"",
        vector: bytes = b"",
        *,
        change: Callable[[RequestHead], RequestHead] = lambda head: head,
        headers: dict[str, str | None] | None = None,
        body: Callable[[bytes], bytes] = lambda body: body,
        method: str = "POST",
        route: str = "take",
        path: str | None = None,
    ) -> bytes:
        """A request, right in all that isn't overridden."""
        head = change(self.head(meta, vector, path if path is not None else f"/p2p/{route}"))
        content = body(meta + vector)
        lines: dict[str, str | None] = {
            "Host": str(self.address),
            "Content-Length": str(len(content)),
            **head.to_headers(),
            **(headers or {}),
        }
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
        return f"{method} {head.path} HTTP/1.1\r\n{text}\r\n".encode() + content

    async def connect(self, tls: ssl.SSLContext | None = CLIENT_TLS) -> Ends:
        """A new connection, over TLS unless it shall speak in the open."""
        return await asyncio.open_connection(self.address.host, self.address.port, ssl=tls)

    async def exchange(self, raw: bytes, tls: ssl.SSLContext | None = CLIENT_TLS) -> tuple[int, bytes]:
        """Send bytes on a new connection; return status and body of the answer."""
        reader, writer = await self.connect(tls)
        try:
            writer.write(raw)
            return await answer_of(reader)
        finally:
            writer.transport.abort()

    async def send(self, raw: bytes, tls: ssl.SSLContext | None = CLIENT_TLS) -> tuple[int, str]:
        """Send bytes on a new connection; return status and text of the answer."""
        status, body = await self.exchange(raw, tls)
        return status, body.decode("utf-8", "replace")

    async def closes_within(
        self, raw: bytes, deadline_s: float, tls: ssl.SSLContext | None = CLIENT_TLS
    ) -> bytes:
        """Send bytes, then wait for the end of the connection; return what came before it."""
        reader, writer = await self.connect(tls)
        try:
            writer.write(raw)
            return await asyncio.wait_for(until_closed(reader), deadline_s)
        finally:
            writer.transport.abort()


async def answer_of(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """Read an answer; return its status and body."""
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode()
    length = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
    body = await asyncio.wait_for(reader.readexactly(int(length[0].split(":")[1])), 5)
    return int(head.split()[1]), body


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    """Read until the connection ends, however it does."""
    try:
        return await reader.read()
    except (ConnectionError, ssl.SSLError):
        return b""


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - the listener has nothing to wait on
            await asyncio.sleep(0.005)


async def serve(limits: TransportLimits, *, hides: bool = True) -> AsyncIterator[Served]:
    clock = SystemClock()
    transport = HttpTransport(
        SERVER_ID,
        "default",
        SERVER.tls([KEY]),
        hides=hides,
        clock=clock,
        limits=limits,
        allowed_hosts=lambda: {"node.lan"},
    )
    guard = guard_middleware(lambda: {"node.lan"}, transport.counters)
    app = web.Application(client_max_size=limits.max_api_body_bytes, middlewares=[guard])

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app.router.add_route("*", "/v1/echo", echo)
    transport.mount(app)
    starved: list[str] = []
    listener = Listener(limits, clock, transport.counters, on_starved=starved.append)
    address = await listener.listen(app, "127.0.0.1", 0, has_key=True)
    await transport.start()
    served = Served(transport, listener, address, starved=starved)

    async def take(incoming: Incoming) -> Reply:
        got = bytearray(incoming.vector_nbytes)
        if got:
            await incoming.read_vector_into(memoryview(got))
        served.taken.append(bytes(got))
        return Reply(incoming.meta)

    transport.serve("take", take, max_meta_bytes=4096, max_vector_bytes=2 * PIECE_BYTES)
    yield served
    await transport.close()
    await listener.close()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A node that waits for slow callers, so that a busy machine spoils no test."""
    async for node in serve(PATIENT):
        yield node


@pytest.fixture
async def impatient() -> AsyncIterator[Served]:
    """A node that gives up soon, for tests of its deadlines: on a busy machine a handshake may take long."""
    async for node in serve(QUICK):
        yield node


@pytest.fixture
def quick() -> TransportLimits:
    return replace(QUICK)


@pytest.fixture
def serve_with() -> Callable[[TransportLimits], AsyncIterator[Served]]:
    return serve


@pytest.fixture
async def trusting() -> AsyncIterator[Served]:
    """A patient node that hides what goes over streams and pipes only from whoever wants it."""
    async for node in serve(PATIENT, hides=False):
        yield node
