"""The transport's rows of the abuse table once more, for callers on streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.transport.auth import MAC_BYTES, format_time, new_nonce
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.protocol import Incoming, Reply

from .stream_callers import BIG, Caller, Served, asking, stream, until


async def test_right_calls_are_served_one_after_another(patient: Served) -> None:
    async with stream(patient) as caller:
        for meta, vector in ((b"one", b""), (b"", BIG), (b"x" * 4096, b"short")):
            frame, answer = await caller.call(caller.frame(meta, vector))
            assert (frame.status, answer, frame.last) == (200, meta, False)
        assert patient.taken == [b"", BIG, b"short"]
        assert patient.listener.connections == 1
    await until(lambda: patient.listener.connections == 0)


async def test_right_frames_in_small_portions(patient: Served) -> None:
    async with stream(patient) as caller:
        for byte in caller.frame(b"meta", b"vector"):
            caller.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        assert (await caller.answer())[1] == b"meta"
        assert patient.taken == [b"vector"]


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
async def test_streams_that_are_refused(patient: Served, name: str) -> None:
    status, changes = REFUSED[name]
    assert (await patient.send(asking(patient, **changes)[1]))[0] == status
    assert patient.transport.counters.refused == {status: 1}
    async with stream(patient) as caller:
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200


async def test_an_opening_cannot_be_replayed(patient: Served) -> None:
    _, raw = asking(patient)
    reader, writer = await asyncio.open_connection(patient.address.host, patient.address.port)
    writer.write(raw)
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 101 ")
    assert (await patient.send(raw))[0] == 409
    writer.close()


async def test_what_is_sent_before_the_answer_is_not_taken_for_calls(patient: Served) -> None:
    evil = f"GET /v1/echo HTTP/1.1\r\nHost: {patient.address}\r\n\r\n".encode()
    for extra in (b"\0\xff garbage", evil, CallFrame(4, 0, 0).encode() + b"take" + bytes(16)):
        _, raw = asking(patient)
        reader, writer = await asyncio.open_connection(patient.address.host, patient.address.port)
        writer.write(raw + extra)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 101 ")
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(reader.read(1), 0.05)
        writer.close()
    assert not patient.taken
    await until(lambda: patient.listener.connections == 0)


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
async def test_bad_frames_end_the_stream(patient: Served, name: str) -> None:
    status, make = BAD[name]
    async with stream(patient) as caller:
        frame, reason = await caller.call(make(caller))
        assert (frame.status, frame.last) == (status, True)
        assert reason
        assert await caller.ended()
    assert not patient.taken
    assert patient.transport.counters.refused == {status: 1}
    await until(lambda: patient.listener.connections == 0)


async def test_a_replayed_frame_is_refused(patient: Served) -> None:
    async with stream(patient) as caller:
        raw = caller.frame(b"once")
        assert (await caller.call(raw))[0].status == 200
        assert (await caller.call(raw))[0].status == 401
        assert await caller.ended()
    assert len(patient.taken) == 1


async def test_frames_of_another_stream_are_refused(patient: Served) -> None:
    async with stream(patient) as one, stream(patient) as other:
        assert (await other.call(one.frame(b"x")))[0].status == 401
    assert not patient.taken


GOES_ON: dict[str, tuple[int, Callable[[Caller], bytes]]] = {
    "unknown route": (404, lambda c: c.frame(b"abc", b"vector", route=b"other")),
    "route that isn't ASCII": (404, lambda c: c.frame(b"abc", b"vector", route=b"\xff\xfe")),
    "metadata a little too long": (413, lambda c: c.frame(bytes(4097), b"vector")),
}


@pytest.mark.parametrize("name", GOES_ON)
async def test_after_small_refusals_the_stream_goes_on(patient: Served, name: str) -> None:
    status, make = GOES_ON[name]
    async with stream(patient) as caller:
        for _ in range(3):
            frame, _ = await caller.call(make(caller))
            assert (frame.status, frame.last) == (status, False)
        assert (await caller.call(caller.frame(b"ok", b"vector")))[0].status == 200
    assert patient.taken == [b"vector"]


async def test_a_handler_that_leaves_the_vector_unread(patient: Served) -> None:
    async def nothing(_: Incoming) -> Reply:
        return Reply(b"no thanks")

    patient.transport.serve("nothing", nothing, max_vector_bytes=8 * PIECE_BYTES)
    async with stream(patient) as caller:
        assert (await caller.call(caller.frame(b"", b"short", route=b"nothing")))[0].last is False
        frame, meta = await caller.call(caller.frame(b"", bytes(8 * PIECE_BYTES), route=b"nothing"))
        assert (frame.status, frame.last, meta) == (200, True, b"no thanks")
        assert await caller.ended()
