"""A served node that tests can send raw bytes to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.transport.auth import SwarmKeys, format_time, new_nonce
from p2pdrl.transport.http.guard import guard_middleware
from p2pdrl.transport.http.headers import RequestHead
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import PIECE_BYTES, TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Reply

KEY = b"the swarm's key"
SERVER_ID, CLIENT_ID = "b" * 32, "a" * 32
QUICK = TransportLimits(
    header_deadline_s=0.15,
    stall_deadline_s=0.15,
    watchdog_tick_s=0.02,
    lingering_s=0.3,
    shutdown_grace_s=0.05,
    max_connections=8,
    requests_per_s=1e-9,
    requests_burst=40,
    failures_per_s=1e-9,
    failures_burst=40,
)


class WallClock(SystemClock):
    """The real clock, with a wall that tests can move."""

    def __init__(self) -> None:
        self.offset_s = 0.0

    def wall(self) -> float:
        return super().wall() + self.offset_s


@dataclass
class Served:
    """One node on a real port; ``taken`` holds the vectors that its handler got."""

    transport: HttpTransport
    listener: Listener
    address: Address
    keys: SwarmKeys
    clock: WallClock
    taken: list[bytes] = field(default_factory=list)

    def head(self, meta: bytes = b"", vector: bytes = b"", route: str = "take") -> RequestHead:
        return RequestHead(
            path=f"/p2p/{route}",
            sender=CLIENT_ID,
            target=SERVER_ID,
            swarm="default",
            meta_nbytes=len(meta),
            vector_nbytes=len(vector),
            time=format_time(self.clock.wall()),
            nonce=new_nonce(),
        )

    def body(self, head: RequestHead, meta: bytes = b"", vector: bytes = b"") -> bytes:
        mac = self.keys.request_pieces(head.nonce)
        pieces = [meta, *(vector[i : i + PIECE_BYTES] for i in range(0, len(vector), PIECE_BYTES))]
        return b"".join(piece + mac.of(piece) for piece in pieces)

    def request(
        self,
        meta: bytes = b"",
        vector: bytes = b"",
        *,
        change: Callable[[RequestHead], RequestHead] = lambda head: head,
        forge: Callable[[RequestHead], RequestHead] = lambda head: head,
        headers: dict[str, str | None] | None = None,
        body: Callable[[bytes], bytes] = lambda body: body,
        method: str = "POST",
        route: str = "take",
    ) -> bytes:
        """A request, right in all that isn't overridden: ``change`` before signing, ``forge`` after."""
        head = forge(change(self.head(meta, vector, route)).sign(self.keys))
        content = body(self.body(head, meta, vector))
        lines: dict[str, str | None] = {
            "Host": str(self.address),
            "Content-Length": str(len(content)),
            **head.to_headers(),
            **(headers or {}),
        }
        text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
        return f"{method} {head.path} HTTP/1.1\r\n{text}\r\n".encode() + content

    async def send(self, raw: bytes) -> tuple[int, str]:
        """Send bytes on a new connection; return status and text of the answer."""
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        try:
            writer.write(raw)
            head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).decode()
            length = [line for line in head.lower().split("\r\n") if line.startswith("content-length:")]
            text = await asyncio.wait_for(reader.readexactly(int(length[0].split(":")[1])), 5)
            return int(head.split()[1]), text.decode("utf-8", "replace")
        finally:
            writer.close()

    async def closes_within(self, raw: bytes, deadline_s: float) -> bytes:
        """Send bytes, then wait for the end of the connection; return what came before it."""
        reader, writer = await asyncio.open_connection(self.address.host, self.address.port)
        try:
            writer.write(raw)
            return await asyncio.wait_for(_until_closed(reader), deadline_s)
        finally:
            writer.close()


async def _until_closed(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except ConnectionResetError:
        return b""


async def serve(limits: TransportLimits) -> AsyncIterator[Served]:
    clock = WallClock()
    transport = HttpTransport(
        SERVER_ID, "default", KEY, clock=clock, limits=limits, allowed_hosts=lambda: {"node.lan"}
    )
    guard = guard_middleware(lambda: {"node.lan"}, transport.counters)
    app = web.Application(client_max_size=limits.max_api_body_bytes, middlewares=[guard])

    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app.router.add_route("*", "/v1/echo", echo)
    transport.mount(app)
    listener = Listener(limits, clock, transport.counters)
    address = await listener.listen(app, "127.0.0.1", 0, has_key=True)
    await transport.start()
    served = Served(transport, listener, address, SwarmKeys(KEY), clock)

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
    async for node in serve(QUICK):
        yield node


@pytest.fixture
def quick() -> TransportLimits:
    return replace(QUICK)


@pytest.fixture
def serve_with() -> Callable[[TransportLimits], AsyncIterator[Served]]:
    return serve


@pytest.fixture
async def patient() -> AsyncIterator[Served]:
    """A node that waits for slow callers, so that a busy machine spoils no test."""
    async for node in serve(replace(QUICK, header_deadline_s=5.0, stall_deadline_s=5.0)):
        yield node
