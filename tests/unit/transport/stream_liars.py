"""Peers that answer on streams as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from p2pdrl.transport.auth import MAC_BYTES, PieceMac, new_nonce
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame, batches
from p2pdrl.transport.http.headers import AnswerHead
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Address

from .liars import KEYS, PEER, listening, request_of
from .liars import ask as ask_over


@dataclass
class Liar:
    """The server's end of a stream in the hands of a liar."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    out: PieceMac

    async def call(self) -> CallFrame:
        frame = CallFrame.decode(await self.reader.readexactly(HEAD_BYTES))
        await self.reader.readexactly(frame.route_nbytes + frame.meta_nbytes + MAC_BYTES)
        return frame

    def answer(
        self, meta: bytes = b"meta", vector: bytes = b"vector", frame: AnswerFrame | None = None
    ) -> bytes:
        head = frame if frame is not None else AnswerFrame(200, len(meta), len(vector), False)
        lists = batches(head.encode() + meta, [memoryview(vector)] if vector else [], self.out)
        return b"".join(bytes(buffer) for batch in lists for buffer in batch)


Talk = Callable[[Liar], Awaitable[None]]
Open = Callable[[str], bytes]


def opened(
    nonce: str,
    *,
    change: Callable[[AnswerHead], AnswerHead] = lambda head: head,
    forge: Callable[[AnswerHead], AnswerHead] = lambda head: head,
    upgrade: str = "p2pdrl",
    answer_nonce: str | None = None,
    extra: bytes = b"",
) -> bytes:
    """The answer to a request for a stream, right in all that isn't overridden."""
    head = AnswerHead(sender=PEER, meta_nbytes=0, vector_nbytes=0, nonce=answer_nonce or new_nonce())
    head = forge(change(head).sign(KEYS, nonce))
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.to_headers().items())
    return f"HTTP/1.1 101 Switching\r\nUpgrade: {upgrade}\r\n{lines}\r\n".encode() + extra


@asynccontextmanager
async def peer(
    talk: Talk | None = None, opening: Open | None = None
) -> AsyncIterator[tuple[Address, list[str]]]:
    """A server that opens streams and then talks; ``seen`` holds the request lines."""
    seen: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, nonce = await request_of(reader)
        seen.append(line)
        if opening is not None:
            writer.write(opening(nonce))
        else:
            ours = new_nonce()
            writer.write(opened(nonce, answer_nonce=ours))
            assert talk is not None
            await talk(Liar(reader, writer, KEYS.stream(nonce, ours)[1]))

    async with listening(connected) as address:
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
