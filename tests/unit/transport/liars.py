"""Peers that hold the key and answer as a test says, and a caller that asks them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from p2pdrl.clock import SystemClock
from p2pdrl.transport.auth import SwarmKeys
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address

KEY, KEYS = b"key", SwarmKeys(b"key")
US, PEER = "a" * 32, "b" * 32
LIMITS = TransportLimits(stall_deadline_s=0.1, max_answer_meta_bytes=1000, shutdown_grace_s=0.05)

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def listening(talk: Talk) -> AsyncIterator[Address]:
    """A server that does ``talk`` on each connection, and drops all of them at the end."""
    writers: list[asyncio.StreamWriter] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            await talk(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()
        await server.wait_closed()


async def request_of(reader: asyncio.StreamReader) -> tuple[str, str]:
    """Read the header of a request; return its first line and its nonce."""
    lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    return lines[0], next(line.split(": ")[1] for line in lines if line.startswith("P2PDRL-Nonce"))


@asynccontextmanager
async def client(limits: TransportLimits = LIMITS, node_id: str = US) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(node_id, "default", KEY, clock=SystemClock(), limits=limits)
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
