"""The transport's rows of the abuse table once more, for callers on streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.transport.auth import MAC_BYTES, SerialMac, format_time, new_nonce
from p2pdrl.transport.headers import AnswerHead, RequestHead
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.protocol import Incoming, Reply
from p2pdrl.transport.stream_frames import HEAD_BYTES, AnswerFrame, CallFrame, batches, read_header

Served = Any
Change = Callable[[RequestHead], RequestHead]
BIG = bytes(range(256)) * (PIECE_BYTES // 256) + b"tail"


@pytest.fixture
async def served(serve_with: Any, quick: Any) -> AsyncIterator[Served]:
    """A node that waits for slow callers, so that a busy machine spoils no test."""
    async for node in serve_with(replace(quick, header_deadline_s=5.0, stall_deadline_s=5.0)):
        yield node


@pytest.fixture
async def hasty(serve_with: Any, quick: Any) -> AsyncIterator[Served]:
    async for node in serve_with(quick):
        yield node


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
        self.out = self.into = SerialMac(bytes(32))

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


async def test_right_calls_are_served_one_after_another(served: Served) -> None:
    async with stream(served) as caller:
        for meta, vector in ((b"one", b""), (b"", BIG), (b"x" * 4096, b"short")):
            frame, answer = await caller.call(caller.frame(meta, vector))
            assert (frame.status, answer, frame.last) == (200, meta, False)
        assert served.taken == [b"", BIG, b"short"]
        assert served.listener.connections == 1
    await until(lambda: served.listener.connections == 0)


async def test_right_frames_in_small_portions(served: Served) -> None:
    async with stream(served) as caller:
        for byte in caller.frame(b"meta", b"vector"):
            caller.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await caller.answer())[1] == b"meta"
        assert served.taken == [b"vector"]


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "foreign host": (403, {"headers": {"Host": "evil.example"}}),
    "foreign origin": (403, {"headers": {"Origin": "http://evil.example"}}),
    "null origin": (403, {"headers": {"Origin": "null"}}),
    "no content type": (415, {"headers": {"Content-Type": None}}),
    "encoding": (415, {"headers": {"Content-Encoding": "gzip"}}),
    "no upgrade": (405, {"headers": {"Upgrade": None}}),
    "another protocol": (426, {"headers": {"Upgrade": "h2c"}}),
    "a body": (413, {"headers": {"Content-Length": "4"}}),
    "metadata": (413, {"change": lambda h: replace(h, meta_nbytes=1)}),
    "no sender": (400, {"headers": {"P2PDRL-Sender": None}}),
    "other protocol": (403, {"change": lambda h: replace(h, protocol=99)}),
    "wrong swarm": (403, {"change": lambda h: replace(h, swarm="0123456789abcdef")}),
    "wrong target": (403, {"change": lambda h: replace(h, target="c" * 32)}),
    "no mac": (401, {"forge": lambda h: replace(h, mac="")}),
    "bad mac": (401, {"forge": lambda h: replace(h, mac="0" * 64)}),
    "signed for a post": (401, {"change": lambda h: replace(h, method="POST")}),
    "forged sender": (401, {"forge": lambda h: replace(h, sender="c" * 32)}),
    "forged nonce": (401, {"forge": lambda h: replace(h, nonce=new_nonce())}),
    "clock behind": (401, {"change": lambda h: replace(h, time=format_time(time.time() - 61))}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_streams_that_are_refused(served: Served, name: str) -> None:
    status, changes = REFUSED[name]
    assert (await served.send(asking(served, **changes)[1]))[0] == status
    assert served.transport.counters.refused == {status: 1}
    async with stream(served) as caller:
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200


async def test_an_opening_cannot_be_replayed(served: Served) -> None:
    _, raw = asking(served)
    reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
    writer.write(raw)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    assert (await served.send(raw))[0] == 409
    writer.close()


async def test_what_is_sent_before_the_answer_is_not_taken_for_calls(served: Served) -> None:
    evil = f"GET /v1/echo HTTP/1.1\r\nHost: {served.address}\r\n\r\n".encode()
    for extra in (b"\0\xff garbage", evil, CallFrame(4, 0, 0).encode() + b"take" + bytes(16)):
        _, raw = asking(served)
        reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
        writer.write(raw + extra)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 101 ")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        writer.close()
    assert not served.taken
    await until(lambda: served.listener.connections == 0)


BAD: dict[str, tuple[int, Callable[[Caller], bytes]]] = {
    "garbage": (400, lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "zeros": (400, lambda _: bytes(HEAD_BYTES)),
    "an answer": (400, lambda c: AnswerFrame(200, 0, 0, False).encode() + c.out.of(b"")),
    "route of no bytes": (400, lambda c: c.frame(route=b"")),
    "vector beyond all bounds": (400, lambda _: CallFrame(4, 0, 0).encode()[:8] + b"\xff" * 8),
    "metadata too long": (413, lambda c: c.frame(bytes(70_000))),
    "metadata of 4 GB": (413, lambda _: CallFrame(4, 2**32 - 1, 0).encode() + b"take"),
    "vector too long": (413, lambda _: CallFrame(4, 0, 10**14).encode() + b"take"),
    "no mac": (401, lambda _: CallFrame(4, 0, 0).encode() + b"take" + bytes(16)),
    "changed metadata": (401, lambda c: c.frame(b"abc").replace(b"abc", b"abd")),
    "changed route": (401, lambda c: c.frame(b"abc", route=b"tako").replace(b"tako", b"take")),
    "changed piece": (400, lambda c: _change(c.frame(b"", BIG), 500)),
    "changed last piece": (400, lambda c: _change(c.frame(b"", BIG), -18)),
    "changed mac": (400, lambda c: _change(c.frame(b"", BIG), -1)),
    "a frame left out": (401, lambda c: c.frame(b"first")[:0] + c.frame(b"second")),
    "swapped pieces": (400, lambda c: _swap(c.frame(b"", BIG[:PIECE_BYTES] * 2))),
}


def _change(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1
    return bytes(changed)


def _swap(raw: bytes) -> bytes:
    start = HEAD_BYTES + 4 + MAC_BYTES
    middle = start + PIECE_BYTES + MAC_BYTES
    return raw[:start] + raw[middle:] + raw[start:middle]


@pytest.mark.parametrize("name", BAD)
async def test_bad_frames_end_the_stream(served: Served, name: str) -> None:
    status, make = BAD[name]
    async with stream(served) as caller:
        frame, reason = await caller.call(make(caller))
        assert (frame.status, frame.last) == (status, True)
        assert reason
        assert await caller.ended()
    assert not served.taken
    assert served.transport.counters.refused == {status: 1}
    await until(lambda: served.listener.connections == 0)


async def test_a_replayed_frame_is_refused(served: Served) -> None:
    async with stream(served) as caller:
        raw = caller.frame(b"once")
        assert (await caller.call(raw))[0].status == 200
        assert (await caller.call(raw))[0].status == 401
        assert await caller.ended()
    assert len(served.taken) == 1


async def test_frames_of_another_stream_are_refused(served: Served) -> None:
    async with stream(served) as one, stream(served) as other:
        assert (await other.call(one.frame(b"x")))[0].status == 401
    assert not served.taken


GOES_ON: dict[str, tuple[int, Callable[[Caller], bytes]]] = {
    "unknown route": (404, lambda c: c.frame(b"abc", b"vector", route=b"other")),
    "route that isn't ASCII": (404, lambda c: c.frame(b"abc", b"vector", route=b"\xff\xfe")),
    "metadata a little too long": (413, lambda c: c.frame(bytes(4097), b"vector")),
}


@pytest.mark.parametrize("name", GOES_ON)
async def test_after_small_refusals_the_stream_goes_on(served: Served, name: str) -> None:
    status, make = GOES_ON[name]
    async with stream(served) as caller:
        for _ in range(3):
            frame, _ = await caller.call(make(caller))
            assert (frame.status, frame.last) == (status, False)
        assert (await caller.call(caller.frame(b"ok", b"vector")))[0].status == 200
    assert served.taken == [b"vector"]


async def test_a_handler_that_leaves_the_vector_unread(served: Served) -> None:
    async def nothing(_: Incoming) -> Reply:
        return Reply(b"no thanks")

    served.transport.serve("nothing", nothing, max_vector_bytes=8 * PIECE_BYTES)
    async with stream(served) as caller:
        assert (await caller.call(caller.frame(b"", b"short", route=b"nothing")))[0].last is False
        frame, meta = await caller.call(caller.frame(b"", bytes(8 * PIECE_BYTES), route=b"nothing"))
        assert (frame.status, frame.last, meta) == (200, True, b"no thanks")
        assert await caller.ended()


SLOW: dict[str, Callable[[Caller], bytes]] = {
    "half a head": lambda c: c.frame(b"meta")[:7],
    "head without its route": lambda c: c.frame(b"meta")[: HEAD_BYTES + 2],
    "no metadata": lambda c: c.frame(b"meta")[: HEAD_BYTES + 4],
    "half a vector": lambda c: c.frame(b"", BIG)[:-1000],
}


@pytest.mark.parametrize("name", SLOW)
async def test_stalled_frames_are_cut(hasty: Served, name: str) -> None:
    started = time.monotonic()
    async with stream(hasty) as caller:
        caller.writer.write(SLOW[name](caller))
        try:
            assert (await caller.answer())[0].status == 408  # it may be told, or cut without a word
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
    assert time.monotonic() - started >= 0.1
    await until(lambda: hasty.listener.connections == 0)
    assert not hasty.taken


@pytest.mark.parametrize("start", [0, HEAD_BYTES + 4 + 100])
async def test_a_trickle_is_cut(hasty: Served, start: int) -> None:
    async with stream(hasty) as caller:
        raw = caller.frame(b"m" * 4000)
        caller.writer.write(raw[:start])

        async def trickle() -> None:
            for byte in raw[start:]:
                caller.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        task = asyncio.create_task(trickle())
        try:
            await until(lambda: hasty.listener.connections == 0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert hasty.transport.counters.dropped_connections == 1
    assert not hasty.taken


async def test_a_caller_that_does_not_read_its_answer_is_cut(hasty: Served) -> None:
    ends: list[bool] = []
    vector = memoryview(bytearray(32 * PIECE_BYTES))

    async def give(_: Incoming) -> Reply:
        return Reply(b"", vector, on_end=ends.append)

    hasty.transport.serve("give", give)
    async with stream(hasty) as caller:
        caller.reader._transport.pause_reading()  # type: ignore[attr-defined]
        caller.writer.write(caller.frame(route=b"give"))
        await until(lambda: hasty.transport.counters.dropped_connections == 1)
        await until(lambda: ends == [False])
    await until(lambda: hasty.listener.connections == 0)


async def test_a_caller_that_hangs_up_is_not_taken_for_served(served: Served) -> None:
    ends: list[bool] = []
    gone = asyncio.Event()

    async def give(_: Incoming) -> Reply:
        await gone.wait()
        await asyncio.sleep(0.02)
        return Reply(b"short", on_end=ends.append)

    served.transport.serve("give", give)
    async with stream(served) as caller:
        caller.writer.write(caller.frame(route=b"give"))
        await asyncio.sleep(0.02)
    gone.set()
    await until(lambda: ends == [False])
    await until(lambda: served.listener.connections == 0)


async def test_idle_streams_are_kept_for_a_while(serve_with: Any, quick: Any) -> None:
    async for served in serve_with(replace(quick, header_deadline_s=5.0, keepalive_s=0.6)):
        async with stream(served) as caller:
            for _ in range(2):
                assert (await caller.call(caller.frame(b"ok")))[0].status == 200
                await asyncio.sleep(0.3)
            assert await caller.ended()
        listener = served.listener
        await until(lambda: listener.connections == 0)  # noqa: B023
        assert served.transport.counters.dropped_connections == 0


async def test_streams_count_as_connections(served: Served) -> None:
    async with stream(served) as one, stream(served) as two:
        others = [await asyncio.open_connection(served.address.host, served.address.port) for _ in range(6)]
        await until(lambda: served.listener.connections == 8)
        assert (await served.closes_within(b"", 3.0)).startswith(b"HTTP/1.1 429 ")
        for caller in (one, two):
            assert (await caller.call(caller.frame(b"ok")))[0].status == 200
        for _, writer in others:
            writer.close()


async def test_one_peer_has_a_few_streams_only(serve_with: Any, quick: Any) -> None:
    async for served in serve_with(replace(quick, header_deadline_s=5.0, max_streams_per_peer=2)):
        release = asyncio.Event()

        async def hang(_: Incoming, release: asyncio.Event = release) -> Reply:
            await release.wait()
            return Reply(b"")

        served.transport.serve("hang", hang)
        async with stream(served) as oldest, stream(served) as second:
            await second.call(second.frame(b"ok"))
            async with stream(served) as third:
                assert await oldest.ended(), "the one idle for longest makes room"
                for caller in (second, third):
                    caller.writer.write(caller.frame(route=b"hang"))
                await asyncio.sleep(0.05)
                assert (await served.send(asking(served)[1]))[0] == 429
                async with stream(served, change=lambda head: replace(head, sender="d" * 32)) as other:
                    assert (await other.call(other.frame(b"ok")))[0].status == 200
                release.set()
                assert (await third.answer())[0].status == 200


async def test_a_flood_on_a_stream_is_told_429(served: Served) -> None:
    async with stream(served) as caller:
        statuses = [(await caller.call(caller.frame(b"x")))[0].status for _ in range(45)]
    assert statuses == [200] * 39 + [429] * 6, "the opening counts too"


async def test_closing_ends_idle_streams_at_once_and_running_calls_after_a_moment(
    serve_with: Any, quick: Any
) -> None:
    async for served in serve_with(replace(quick, header_deadline_s=5.0, shutdown_grace_s=1.0)):
        ends: list[bool] = []

        async def slow(_: Incoming, ends: list[bool] = ends) -> Reply:
            await asyncio.sleep(0.1)
            return Reply(b"done", on_end=ends.append)

        served.transport.serve("slow", slow)
        async with stream(served) as idle, stream(served) as running:
            running.writer.write(running.frame(route=b"slow"))
            await asyncio.sleep(0.05)
            started = time.monotonic()
            closing = asyncio.create_task(served.listener.close())
            assert await idle.ended()
            frame, meta = await running.answer()
            assert (frame.last, meta) == (True, b"done")
            assert await running.ended()
            await closing
            assert time.monotonic() - started < 0.8
            assert ends == [True]


async def test_a_handler_that_does_not_end_is_cancelled_when_the_listener_closes(served: Served) -> None:
    started = asyncio.Event()

    async def hang(_: Incoming) -> Reply:
        started.set()
        await asyncio.sleep(60)
        return Reply(b"")

    served.transport.serve("hang", hang)
    async with stream(served) as caller:
        caller.writer.write(caller.frame(route=b"hang"))
        await started.wait()
        await asyncio.wait_for(served.listener.close(), 3)
        assert await caller.ended()
    assert served.listener.connections == 0
