"""The engine of streams, over a pair of sockets."""

from __future__ import annotations

import asyncio
import socket

import numpy as np
import pytest

from p2pdrl.errors import PeerTimeoutError
from p2pdrl.transport.cipher import OPEN
from p2pdrl.transport.framing import STAGE_BYTES, Filling, batches
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.stream.socket import StreamSocket

Ends = tuple[StreamSocket, StreamSocket]


async def say(stream: StreamSocket, data: bytes) -> None:
    assert await stream.send(iter([[data]]), len(data))


async def test_short_messages(ends: Ends) -> None:
    one, other = ends
    await say(one, b"abcdef")
    assert await other.read(2) == b"ab"
    assert other.staged_nbytes == 4
    assert await other.read(0) == b""
    assert await other.read(4, 1.0) == b"cdef"
    reading = asyncio.create_task(other.read(3))
    await say(one, b"g")
    await asyncio.sleep(0)
    assert other.receiving
    await say(one, b"hij")
    assert await reading == b"ghi"
    assert await other.read(1) == b"j"
    assert not other.receiving


async def test_messages_as_long_as_the_stage(ends: Ends) -> None:
    one, other = ends
    data = np.random.default_rng(1).bytes(3 * STAGE_BYTES)
    sending = asyncio.create_task(say(one, data))
    got = b"".join([await other.read(count) for count in (1, STAGE_BYTES, STAGE_BYTES - 1, 5)])
    got += await other.read(STAGE_BYTES - 5)
    await sending
    assert got == data


async def test_long_messages_both_ways_at_once(ends: Ends) -> None:
    one, other = ends
    vectors = [np.random.default_rng(seed).bytes(9 * PIECE_BYTES + 3) for seed in range(2)]
    outs = [memoryview(bytearray(len(vector))) for vector in vectors]

    def send(stream: StreamSocket, vector: bytes) -> asyncio.Task[bool]:
        views = [memoryview(vector)[:5000], memoryview(vector)[5000:]]
        return asyncio.create_task(stream.send(batches(b"", b"head", views, OPEN), 4 + len(vector)))

    async def take(stream: StreamSocket, out: memoryview) -> None:
        assert await stream.read(4) == b"head"
        await stream.fill(Filling(out), 5.0)

    tasks = [send(one, vectors[0]), send(other, vectors[1])]
    await asyncio.gather(take(one, outs[1]), take(other, outs[0]), *tasks)
    assert list(map(bytes, outs)) == vectors
    assert one.unsent_nbytes == other.unsent_nbytes == 0
    assert one.sent_nbytes == 4 + len(vectors[0])


async def test_what_came_before_the_end_can_be_read(ends: Ends) -> None:
    one, other = ends
    await say(one, b"last words")
    one.close()
    await asyncio.sleep(0.01)
    assert not other.open
    assert await other.read(10) == b"last words"
    for _ in range(2):
        with pytest.raises(ConnectionError):
            await other.read(1)
    with pytest.raises(ConnectionError):
        await other.fill(Filling(memoryview(bytearray(3))), 1.0)
    with pytest.raises(ConnectionError):
        await say(other, b"x")
    with pytest.raises(ConnectionError):
        other.check()


async def test_the_end_wakes_reader_and_writer(ends: Ends) -> None:
    one, other = ends
    big = bytes(64 * PIECE_BYTES)
    sending = asyncio.create_task(say(one, big))
    reading = asyncio.create_task(one.read(1))
    await asyncio.sleep(0.01)
    assert one.unsent_nbytes > 0
    other.close()
    for result in await asyncio.gather(sending, reading, return_exceptions=True):
        assert isinstance(result, ConnectionError)


async def test_closing_wakes_ourselves(ends: Ends) -> None:
    reading = asyncio.create_task(ends[0].read(1))
    await asyncio.sleep(0)
    ends[0].close("enough")
    with pytest.raises(ConnectionError, match="enough"):
        await reading


async def test_check_sees_an_end_that_nobody_read(ends: Ends) -> None:
    one, other = ends
    one.check()
    other.close()
    with pytest.raises(ConnectionError):
        one.check()


async def test_a_peer_that_speaks_first_stops_the_sender(ends: Ends) -> None:
    one, other = ends
    big = bytes(64 * PIECE_BYTES)
    sending = asyncio.create_task(one.send(iter([[big]]), len(big), until_answered=True))
    await asyncio.sleep(0.01)
    await say(other, b"no")
    assert await sending is False
    assert await one.read(2) == b"no"


async def test_a_late_event_of_bytes_that_were_taken_stops_no_sender(ends: Ends) -> None:
    one, other = ends
    vector = memoryview(bytearray(4 * PIECE_BYTES))

    async def drain() -> None:
        assert await other.read(4, 1.0) == b"call"
        await other.fill(Filling(memoryview(bytearray(len(vector)))), 1.0)

    draining = asyncio.create_task(drain())
    await asyncio.sleep(0)
    await say(other, b"a")
    await asyncio.sleep(0)  # the loop has seen that "a" came, and hasn't yet called back
    one.check()
    assert await one.read(1) == b"a"
    sent = await one.send(batches(b"", b"call", [vector], OPEN), 4 + len(vector), until_answered=True)
    assert sent, "the peer said nothing more"
    await draining


async def test_the_reason_is_heard_even_when_the_peer_hung_up(ends: Ends) -> None:
    one, other = ends
    await say(other, b"no")
    other.close()
    big = bytes(64 * PIECE_BYTES)
    assert await one.send(iter([[big]]), len(big), until_answered=True) is False
    assert await one.read(2) == b"no"


async def test_silence_is_a_timeout_and_bytes_put_it_off(ends: Ends) -> None:
    one, other = ends
    with pytest.raises(PeerTimeoutError, match="no byte"):
        await one.read(1, 0.02)
    started = asyncio.get_running_loop().time()
    filling = asyncio.create_task(one.fill(Filling(memoryview(bytearray(6))), 0.1))
    for _ in range(5):
        await say(other, b"x")
        await asyncio.sleep(0.04)
    with pytest.raises(PeerTimeoutError):
        await filling
    assert asyncio.get_running_loop().time() - started > 0.2


async def test_a_cancelled_reader_leaves_its_buffer_alone(ends: Ends) -> None:
    one, other = ends
    out = bytearray(10)
    filling = asyncio.create_task(one.fill(Filling(memoryview(out)), 5.0))
    await asyncio.sleep(0)
    filling.cancel()
    await asyncio.gather(filling, return_exceptions=True)
    await say(other, b"0123456789")
    await asyncio.sleep(0.01)
    assert out == bytes(10)
    assert await one.read(10) == b"0123456789"


async def test_arrivals_are_told() -> None:
    one, other = socket.socketpair()
    other.setblocking(False)
    one.setblocking(False)
    counts: list[int] = []
    stream = StreamSocket(other, counts.append)
    one.send(b"abc")
    assert await stream.read(3) == b"abc"
    assert sum(counts) == 3
    stream.close()
    one.close()
