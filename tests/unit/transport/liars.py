"""Peers that hold the key and answer as a test says, and a caller that asks them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from p2pdrl.clock import SystemClock
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import HELLO
from p2pdrl.transport.protocol import Address

from .conftest import CLIENT, KEY, OTHER, SERVER

US, PEER = CLIENT.node_id, SERVER.node_id
LIMITS = TransportLimits(stall_deadline_s=0.1, max_answer_meta_bytes=1000, shutdown_grace_s=0.05)
PEER_TLS, OTHER_TLS = (identity.tls([KEY]).server for identity in (SERVER, OTHER))

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(
    talk: Talk, raw: Talk | None = None, *, tls: ssl.SSLContext | None = PEER_TLS
) -> AsyncIterator[Address]:
    """A server that does ``talk`` on each connection, and drops all of them at the end.

    Args:
        talk: over TLS, unless ``tls`` is None.
        raw: done instead on connections that begin as streams and pipes do.
        tls: whose certificate is shown.
    """
    loop = asyncio.get_running_loop()
    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Task[None]] = []

    async def serve(sock: socket.socket) -> None:
        reader = asyncio.StreamReader()
        protocol = asyncio.StreamReaderProtocol(reader)
        try:
            is_raw = raw is not None and await _first(sock) == HELLO[:1]
            context = None if is_raw else tls
            transport, _ = await loop.connect_accepted_socket(lambda: protocol, sock, ssl=context)
        except OSError:
            sock.close()
            return
        except asyncio.CancelledError:
            sock.close()
            raise
        writers.append(asyncio.StreamWriter(transport, protocol, reader, loop))
        try:
            await (raw if is_raw and raw is not None else talk)(reader, writers[-1])
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    async def accept(listener: socket.socket) -> None:
        while True:
            sock, _ = await loop.sock_accept(listener)
            tasks.append(asyncio.create_task(serve(sock)))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        tasks.append(asyncio.create_task(accept(listener)))
        try:
            yield Address("127.0.0.1", listener.getsockname()[1])
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            for writer in writers:
                writer.transport.abort()
            await asyncio.sleep(0)
    for result in results:
        if isinstance(result, Exception):
            raise result


async def _first(sock: socket.socket) -> bytes:
    """The first byte that comes; it is left where it is."""
    loop = asyncio.get_running_loop()
    ready = asyncio.Event()
    loop.add_reader(sock, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(sock)
    return sock.recv(1, socket.MSG_PEEK)


async def request_of(reader: asyncio.StreamReader) -> str:
    """Read the header of a request; return its first line."""
    return (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[0]


@asynccontextmanager
async def client(
    limits: TransportLimits = LIMITS, identity: Identity = CLIENT, **more: Any
) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(
        identity.node_id, "default", identity.tls([KEY]), clock=SystemClock(), limits=limits, **more
    )
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


async def ask(transport: HttpTransport, to: Address, deadline_s: float = 3.0, **more: Any) -> bytes:
    """Call ``to`` with room for an answer's vector of up to 100 bytes."""
    out = bytearray(100)
    answer = await transport.call(
        to,
        PEER,
        "any",
        b"",
        into=lambda _meta, nbytes: memoryview(out)[:nbytes] if nbytes <= 100 else None,
        deadline_s=deadline_s,
        **more,
    )
    assert answer.sender == PEER
    return answer.meta + bytes(out[: answer.vector_nbytes])
