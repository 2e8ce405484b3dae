"""Served streams: slow callers, how many there may be, and how they end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.transport.framing import HEAD_BYTES
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.opening import HELLO
from p2pdrl.transport.protocol import Incoming, Reply

from ..conftest import OTHER_ID, OTHER_TLS, answer_of, until
from ..stream_callers import BIG, Caller, Served, asking, opened, promised, stream

SLOW: dict[str, Callable[[Caller], bytes]] = {
    "half a head": lambda c: c.frame(b"meta")[:7],
    "head without its route": lambda c: c.frame(b"meta")[: HEAD_BYTES + 2],
    "no metadata": lambda c: c.frame(b"meta")[: HEAD_BYTES + 4],
    "metadata without a whole tag": lambda c: c.frame(b"meta")[:-1],
    "half a vector": lambda c: c.frame(b"", BIG)[:-1000],
}


@pytest.mark.parametrize("name", SLOW)
async def test_stalled_frames_are_cut(impatient: Served, name: str) -> None:
    started = time.monotonic()
    async with stream(impatient) as caller:
        caller.writer.write(SLOW[name](caller))
        try:
            assert (await caller.answer())[0].status == 408  # it may be told, or cut without a word
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
    assert time.monotonic() - started >= 0.1
    await until(lambda: impatient.listener.connections == 0)
    assert not impatient.taken


@pytest.mark.parametrize("start", [0, HEAD_BYTES + 4 + 100])
async def test_a_trickle_is_cut(impatient: Served, start: int) -> None:
    async with stream(impatient) as caller:
        raw = caller.frame(b"m" * 4000)
        caller.writer.write(raw[:start])

        async def trickle() -> None:
            for byte in raw[start:]:
                caller.writer.write(bytes([byte]))
                await asyncio.sleep(0.02)

        task = asyncio.create_task(trickle())
        try:
            await until(lambda: impatient.listener.connections == 0)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    assert impatient.transport.counters.dropped_connections == 1
    assert not impatient.taken


async def test_a_caller_that_does_not_read_its_answer_is_cut(impatient: Served) -> None:
    ends: list[bool] = []
    vector = memoryview(bytearray(32 * PIECE_BYTES))

    async def give(_: Incoming) -> Reply:
        return Reply(b"", vector, on_end=ends.append)

    impatient.transport.serve("give", give)
    async with stream(impatient) as caller:
        caller.reader._transport.pause_reading()  # type: ignore[attr-defined]  # noqa: SLF001 - asyncio has no other
        caller.writer.write(caller.frame(route=b"give"))
        await until(lambda: impatient.transport.counters.dropped_connections == 1)
        await until(lambda: ends == [False])
    await until(lambda: impatient.listener.connections == 0)


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


async def test_streams_count_as_connections_and_are_kept(served: Served) -> None:
    async with stream(served) as one, stream(served) as two:
        for caller in (one, two):  # a stream has proven itself with its first call
            assert (await caller.call(caller.frame(b"ok")))[0].status == 200
        held = [await served.connect() for _ in range(6)]
        for reader, writer in held:
            writer.write(served.request(b"ok"))
            assert await answer_of(reader) == (200, b"ok")
        assert served.listener.connections == 8
        assert (await served.closes_within(b"", 3.0, None)).startswith(b"HTTP/1.1 429 ")
        for caller in (one, two):
            assert (await caller.call(caller.frame(b"ok")))[0].status == 200
        for _, writer in held:
            writer.transport.abort()


async def test_strangers_displace_no_stream(served: Served) -> None:
    async with stream(served) as caller:
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200
        held = [await served.connect(None) for _ in range(20)]
        await until(lambda: served.transport.counters.displaced_connections == 13)
        assert (await caller.call(caller.frame(b"ok")))[0].status == 200
        for _, writer in held:
            writer.transport.abort()


def serve_hanging(served: Served) -> tuple[asyncio.Event, asyncio.Semaphore]:
    """Serve ``hang``, whose calls end at the event; each that has begun releases the semaphore."""
    release, started = asyncio.Event(), asyncio.Semaphore(0)

    async def hang(_: Incoming) -> Reply:
        started.release()
        await release.wait()
        return Reply(b"")

    served.transport.serve("hang", hang)
    return release, started


async def test_one_peer_has_a_few_streams_only(serve_with: Any, quick: Any) -> None:
    async for served in serve_with(replace(quick, header_deadline_s=5.0, max_streams_per_peer=2)):
        release, started = serve_hanging(served)
        async with stream(served) as oldest, stream(served) as second:
            await second.call(second.frame(b"ok"))
            async with stream(served) as third:
                assert await oldest.ended(), "the one idle for longest makes room"
                for caller in (second, third):
                    caller.writer.write(caller.frame(route=b"hang"))
                    await asyncio.wait_for(started.acquire(), 5)
                assert (await served.send(asking(served)))[0] == 429
                as_other = {"tls": OTHER_TLS, "change": lambda head: replace(head, sender=OTHER_ID)}
                async with stream(served, **as_other) as other:
                    assert (await other.call(other.frame(b"ok")))[0].status == 200
                release.set()
                assert (await third.answer())[0].status == 200


async def test_promises_do_not_exceed_how_many_there_may_be(serve_with: Any, quick: Any) -> None:
    async for served in serve_with(replace(quick, header_deadline_s=5.0, max_streams_per_peer=2)):
        release, started = serve_hanging(served)
        openings = [await promised(served) for _ in range(4)]
        async with (
            opened(served, openings[0]) as first,
            opened(served, openings[1]) as second,
            opened(served, openings[2]) as third,
        ):
            assert await first.ended(), "the one idle for longest makes room"
            for caller in (second, third):
                caller.writer.write(caller.frame(route=b"hang"))
                await asyncio.wait_for(started.acquire(), 5)
            async with opened(served, openings[3]) as fourth:
                assert await fourth.ended(), "none is idle"
            release.set()
            for caller in (second, third):
                assert (await caller.answer())[0].status == 200


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


async def test_what_was_promised_by_an_old_key_is_not_kept(served: Served) -> None:
    opening = await promised(served)
    served.transport.use_keys([b"the next key"], anew=True)
    reader, writer = await served.connect(None)
    writer.write(HELLO + opening.token)
    assert await Caller(reader, writer).ended()
    writer.transport.abort()


async def test_who_shows_a_token_and_no_key_is_cut(impatient: Served) -> None:
    """A token can be read on its way."""
    async with stream(impatient) as caller:
        assert await caller.ended()
    await until(lambda: impatient.transport.counters.dropped_connections == 1)
