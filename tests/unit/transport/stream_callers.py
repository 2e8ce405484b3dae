"""Callers on streams that do as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from p2pdrl.transport.auth import MAC_BYTES, PieceMac
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame, batches
from p2pdrl.transport.http.headers import AnswerHead, RequestHead
from p2pdrl.transport.http.upgrade import read_header
from p2pdrl.transport.limits import PIECE_BYTES

Served = Any
Change = Callable[[RequestHead], RequestHead]
BIG = bytes(range(256)) * (PIECE_BYTES // 256) + b"tail"


def same(head: RequestHead) -> RequestHead:
    return head


def asking(
    served: Served,
    *,
    change: Change = same,
    forge: Change = same,
    headers: dict[str, str | None] | None = None,
) -> tuple[str, bytes]:
    """A request for a stream, right in all that isn't overridden; and its nonce."""
    head = replace(served.head(), path="/p2p/stream", method="GET")
    head = forge(change(head).sign(served.keys))
    lines: dict[str, str | None] = {
        "Host": str(served.address),
        "Connection": "Upgrade",
        "Upgrade": "p2pdrl",
        **head.to_headers(),
        **(headers or {}),
    }
    text = "".join(f"{name}: {value}\r\n" for name, value in lines.items() if value is not None)
    return head.nonce, f"GET /p2p/stream HTTP/1.1\r\n{text}\r\n".encode()


class Caller:
    """A stream in the hands of a liar."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.out = self.into = PieceMac(bytes(32))

    def frame(
        self, meta: bytes = b"", vector: bytes = b"", route: bytes = b"take", frame: CallFrame | None = None
    ) -> bytes:
        head = frame if frame is not None else CallFrame(len(route), len(meta), len(vector))
        views = [memoryview(vector)] if vector else []
        lists = batches(head.encode() + route + meta, views, self.out)
        return b"".join(bytes(buffer) for batch in lists for buffer in batch)

    async def answer(self) -> tuple[AnswerFrame, bytes]:
        raw = await asyncio.wait_for(self.reader.readexactly(HEAD_BYTES), 5)
        frame = AnswerFrame.decode(raw)
        meta = await self.reader.readexactly(frame.meta_nbytes)
        assert self.into.good(raw + meta, await self.reader.readexactly(MAC_BYTES))
        return frame, meta

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
async def stream(served: Served, **changes: Any) -> AsyncIterator[Caller]:
    reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
    caller = Caller(reader, writer)
    try:
        nonce, raw = asking(served, **changes)
        writer.write(raw)
        status, headers = read_header(await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5))
        assert status == 101
        answer = AnswerHead.from_headers(headers)
        assert answer.authentic(served.keys, nonce)
        caller.out, caller.into = served.keys.stream(nonce, answer.nonce)
        yield caller
    finally:
        writer.transport.abort()


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - the listener has nothing to wait on
            await asyncio.sleep(0.005)
