"""Peers that answer on streams as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from p2pdrl.transport.cipher import Cipher
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame, batches
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.opening import HELLO, OPENED, TOKEN_BYTES, ConnectionOpening
from p2pdrl.transport.protocol import Address

from .answers import answered
from .liars import ask as ask_over
from .liars import listening, request_of


@dataclass
class Liar:
    """The server's end of a stream in the hands of a liar."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    out: Cipher

    async def call(self) -> CallFrame:
        frame = CallFrame.decode(await self.reader.readexactly(HEAD_BYTES))
        await self.reader.readexactly(frame.route_nbytes + frame.meta_nbytes + self.out.nbytes)
        return frame

    def answer(
        self, meta: bytes = b"meta", vector: bytes = b"vector", frame: AnswerFrame | None = None
    ) -> bytes:
        head = frame if frame is not None else AnswerFrame(200, len(meta), len(vector), False)
        lists = batches(head.encode(), meta, [memoryview(vector)] if vector else [], self.out)
        return b"".join(bytes(buffer) for batch in lists for buffer in batch)


Talk = Callable[[Liar], Awaitable[None]]
Offer = Callable[[ConnectionOpening], bytes]


def offered(opening: ConnectionOpening, **changes: Any) -> bytes:
    """The answer to a request for a stream, right in all that isn't overridden."""
    return answered(opening.encode(), b"", **changes)


@asynccontextmanager
async def peer(
    talk: Talk | None = None, offer: Offer = offered, welcome: bytes = OPENED, *, hides: bool = True
) -> AsyncIterator[tuple[Address, list[str]]]:
    """A server that opens streams and then talks; ``seen`` holds the request lines, and "stream" for each."""
    seen: list[str] = []
    openings: dict[bytes, ConnectionOpening] = {}

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:  # connections are used again
            seen.append(await request_of(reader))
            opening = ConnectionOpening.new(sealed=True, hides=hides)
            openings[opening.token] = opening
            writer.write(offer(opening))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await reader.readexactly(len(HELLO) + TOKEN_BYTES)
        assert hello.startswith(HELLO)
        opening = openings.pop(hello[len(HELLO) :], None)
        if opening is None:
            writer.close()
            return
        seen.append("stream")
        writer.write(welcome)
        if talk is not None:
            await talk(Liar(reader, writer, opening.ciphers()[1]))

    async with listening(asked, connected) as address:
        yield address, seen


async def ask(transport: HttpTransport, to: Address, deadline_s: float = 3.0, **more: Any) -> bytes:
    """What ``to`` answers on a stream."""
    return await ask_over(transport, to, deadline_s, lane="bulk", **more)


def once(make: Callable[[Liar], bytes], then: str = "silence") -> Talk:
    async def talk(liar: Liar) -> None:
        await liar.call()
        liar.writer.write(make(liar))
        if then == "end":
            await liar.writer.drain()
            liar.writer.close()
        else:
            await asyncio.sleep(60)

    return talk


async def forever(liar: Liar) -> None:
    while True:
        await liar.call()
        liar.writer.write(liar.answer())
