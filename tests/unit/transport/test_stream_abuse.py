"""The transport's rows of the abuse table once more, for callers on streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.transport.cipher import TAG_BYTES
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.opening import HELLO, OPENED, TOKEN_BYTES
from p2pdrl.transport.protocol import Incoming, Reply

from .conftest import OTHER_ID, SERVER_ID, until
from .stream_callers import BIG, Caller, Served, asking, opened, promised, stream


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
    "GET": (405, {"method": "GET", "headers": {"Content-Length": None}}),
    "a body": (413, {"body": lambda _: b"body"}),
    "metadata": (413, {"meta": b"meta"}),
    "a vector": (413, {"vector": b"vector"}),
    "announced metadata": (413, {"change": lambda h: replace(h, meta_nbytes=1)}),
    "no sender": (400, {"headers": {"P2PDRL-Sender": None}}),
    "other protocol": (403, {"change": lambda h: replace(h, protocol=99)}),
    "wrong swarm": (403, {"change": lambda h: replace(h, swarm="0123456789abcdef")}),
    "wrong target": (403, {"change": lambda h: replace(h, target="c" * 32)}),
    "another's name": (403, {"change": lambda h: replace(h, sender=OTHER_ID)}),
    "our own name": (403, {"change": lambda h: replace(h, sender=SERVER_ID)}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_streams_that_are_refused(served: Served, name: str) -> None:
    status, changes = REFUSED[name]
    assert (await served.send(asking(served, **changes)))[0] == status
    assert served.transport.counters.refused == {status: 1}
    async with stream(served) as caller:
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200


async def test_a_promise_is_kept_once(served: Served) -> None:
    opening = await promised(served)
    async with opened(served, opening) as caller:
        assert await served.closes_within(HELLO + opening.token, 3.0, None) == b""
        assert served.transport.counters.refused_connections == 1
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200


async def test_each_promise_is_a_stream_of_its_own(served: Served) -> None:
    openings = [await promised(served) for _ in range(3)]
    assert len({opening.token for opening in openings}) == 3
    assert len({key for opening in openings for key in opening.keys or ()}) == 6
    for opening in reversed(openings):
        async with opened(served, opening) as caller:
            assert (await caller.call(caller.frame(b"ok")))[0].status == 200


HELLOS: dict[str, Callable[[bytes], bytes]] = {
    "an unknown token": lambda _: HELLO + bytes(TOKEN_BYTES),
    "another version": lambda token: HELLO[:-1] + b"\3" + token,
    "another program": lambda token: b"\0" * len(HELLO) + token,
}


@pytest.mark.parametrize("name", HELLOS)
async def test_unknown_hellos_get_no_answer(served: Served, name: str) -> None:
    opening = await promised(served)
    assert await served.closes_within(HELLOS[name](opening.token), 3.0, None) == b""
    assert served.transport.counters.refused_connections == 1
    async with opened(served, opening) as caller:
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200


async def test_a_hello_in_small_portions(served: Served) -> None:
    opening = await promised(served)
    reader, writer = await served.connect(None)
    for byte in HELLO + opening.token:
        writer.write(bytes([byte]))
        await asyncio.sleep(0)
    assert await asyncio.wait_for(reader.readexactly(1), 5) == OPENED
    writer.transport.abort()


@pytest.mark.parametrize("count", [1, len(HELLO), len(HELLO) + TOKEN_BYTES - 1])
async def test_a_hello_that_breaks_off(served: Served, count: int) -> None:
    opening = await promised(served)
    reader, writer = await served.connect(None)
    writer.write((HELLO + opening.token)[:count])
    writer.write_eof()
    assert await asyncio.wait_for(reader.read(), 3.0) == b""
    writer.transport.abort()
    await until(lambda: served.listener.connections == 0)
    async with opened(served, opening) as caller:
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200


async def test_calls_may_come_with_the_hello(served: Served) -> None:
    opening = await promised(served)
    reader, writer = await served.connect(None)
    caller = Caller(reader, writer)
    caller.out, caller.into = opening.ciphers()
    writer.write(HELLO + opening.token + caller.frame(b"early", b"vector"))
    assert await asyncio.wait_for(reader.readexactly(1), 5) == OPENED
    assert (await caller.answer())[1] == b"early"
    assert served.taken == [b"vector"]
    writer.transport.abort()


BAD: dict[str, tuple[int, Callable[[Caller], bytes]]] = {
    "garbage": (400, lambda _: b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"),
    "zeros": (400, lambda _: bytes(HEAD_BYTES)),
    "an answer": (400, lambda _: AnswerFrame(200, 0, 0, False).encode() + bytes(TAG_BYTES)),
    "route of no bytes": (400, lambda c: c.frame(route=b"")),
    "vector beyond all bounds": (400, lambda _: CallFrame(4, 0, 0).encode()[:8] + b"\xff" * 8),
    "metadata too long": (413, lambda c: c.frame(bytes(70_000))),
    "metadata of 4 GB": (413, lambda _: CallFrame(4, 2**32 - 1, 0).encode() + b"take"),
    "vector too long": (413, lambda _: CallFrame(4, 0, 10**14).encode() + b"take"),
    "no tag": (401, lambda _: CallFrame(4, 0, 0).encode() + b"take" + bytes(16)),
    "changed metadata": (401, lambda c: _change(c.frame(b"abc"), HEAD_BYTES + 4)),
    "changed route": (401, lambda c: c.frame(b"abc", route=b"tako").replace(b"tako", b"take")),
    "changed piece": (400, lambda c: _change(c.frame(b"", BIG), 500)),
    "changed last piece": (400, lambda c: _change(c.frame(b"", BIG), -18)),
    "changed tag": (400, lambda c: _change(c.frame(b"", BIG), -1)),
    "a frame left out": (401, lambda c: c.frame(b"first")[:0] + c.frame(b"second")),
    "swapped pieces": (400, lambda c: _swap(c.frame(b"", BIG[:PIECE_BYTES] * 2))),
}


def _change(raw: bytes, at: int) -> bytes:
    changed = bytearray(raw)
    changed[at] ^= 1
    return bytes(changed)


def _swap(raw: bytes) -> bytes:
    start = HEAD_BYTES + 4 + TAG_BYTES
    middle = start + PIECE_BYTES + TAG_BYTES
    return raw[:start] + raw[middle:] + raw[start:middle]


@pytest.mark.parametrize("hides", [True, False], ids=["hidden", "proven"])
@pytest.mark.parametrize("name", BAD)
async def test_bad_frames_end_the_stream(trusting: Served, name: str, hides: bool) -> None:
    status, make = BAD[name]
    async with stream(trusting, change=lambda head: replace(head, hides=hides)) as caller:
        assert caller.out.hides is hides
        frame, reason = await caller.call(make(caller))
        assert (frame.status, frame.last) == (status, True)
        assert reason
        assert await caller.ended()
    assert not trusting.taken
    assert trusting.transport.counters.refused == {status: 1}
    await until(lambda: trusting.listener.connections == 0)


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
