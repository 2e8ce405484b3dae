"""Callers on streams that do as a test says."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from p2pdrl.transport.cipher import OPEN
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame, batches
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.opening import HELLO, OPENED, ConnectionOpening

from .conftest import CLIENT_TLS

Served = Any
BIG = bytes(range(256)) * (PIECE_BYTES // 256) + b"tail"


def asking(served: Served, **changes: Any) -> bytes:
    """A request for a stream, right in all that isn't overridden."""
    raw: bytes = served.request(**{"path": "/p2p-stream", **changes})
    return raw


async def promised(
    served: Served, tls: ssl.SSLContext | None = CLIENT_TLS, **changes: Any
) -> ConnectionOpening:
    """What opens a stream."""
    status, body = await served.exchange(asking(served, **changes), tls)
    assert status == 200, body
    return ConnectionOpening.decode(body)


class Caller:
    """A stream in the hands of a liar."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.out = self.into = OPEN

    def frame(
        self, meta: bytes = b"", vector: bytes = b"", route: bytes = b"take", frame: CallFrame | None = None
    ) -> bytes:
        head = frame if frame is not None else CallFrame(len(route), len(meta), len(vector))
        views = [memoryview(vector)] if vector else []
        lists = batches(head.encode() + route, meta, views, self.out)
        return b"".join(bytes(buffer) for batch in lists for buffer in batch)

    async def answer(self) -> tuple[AnswerFrame, bytes]:
        raw = await asyncio.wait_for(self.reader.readexactly(HEAD_BYTES), 5)
        frame = AnswerFrame.decode(raw)
        sealed = await self.reader.readexactly(frame.meta_nbytes + self.into.nbytes)
        return frame, self.into.unseal(sealed, raw, "the answer")

    async def call(self, raw: bytes) -> tuple[AnswerFrame, bytes]:
        self.writer.write(raw)
        return await self.answer()

    async def ended(self) -> bool:
        """Whether the server hangs up without another word."""
        try:
            return await asyncio.wait_for(self.reader.read(), 3.0) == b""
        except ConnectionResetError:
            return True


@asynccontextmanager
async def opened(served: Served, opening: ConnectionOpening) -> AsyncIterator[Caller]:
    """The stream that was promised."""
    reader, writer = await served.connect(None)
    caller = Caller(reader, writer)
    try:
        writer.write(HELLO + opening.token)
        assert await asyncio.wait_for(reader.readexactly(len(OPENED)), 5) == OPENED
        caller.out, caller.into = opening.ciphers()
        yield caller
    finally:
        writer.transport.abort()


@asynccontextmanager
async def stream(
    served: Served, tls: ssl.SSLContext | None = CLIENT_TLS, **changes: Any
) -> AsyncIterator[Caller]:
    async with opened(served, await promised(served, tls, **changes)) as caller:
        yield caller
