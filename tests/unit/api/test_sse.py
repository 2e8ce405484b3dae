"""The event stream: order, resuming, keep-alive, slow readers, shutdown."""

from __future__ import annotations

import asyncio
import json

import pytest
from aiohttp import web

from p2pdrl.api.answers import answers_errors
from p2pdrl.api.sse import EventStreams
from p2pdrl.testing.fake_node import FakeEvents


@pytest.fixture
def start(serve):
    """Serve an event log, or streams over one; returns the test client."""

    async def _start(events, **options):
        app = web.Application()
        streams = events if isinstance(events, EventStreams) else EventStreams(events, **options)
        app.router.add_get("/v1/events", answers_errors(streams.handle))
        app.on_shutdown.append(streams.close)
        return await serve(app)

    return _start


async def read_events(answer, count):
    found = []
    while len(found) < count:
        line = await asyncio.wait_for(answer.content.readline(), 5)
        if line.startswith(b"data: "):
            found.append(json.loads(line[6:]))
    return found


async def test_old_events_come_first_then_new_ones(start):
    events = FakeEvents()
    events.emit("join", "node-1 joined")
    client = await start(events)
    async with client.get("/v1/events") as answer:
        assert answer.headers["Content-Type"].startswith("text/event-stream")
        assert [event["seq"] for event in await read_events(answer, 1)] == [1]
        events.emit("join", "node-2\njoined <b>")
        [event] = await read_events(answer, 1)
        assert (event["seq"], event["text"]) == (2, "node-2\njoined <b>")


@pytest.mark.parametrize("headers", [{"Last-Event-ID": "2"}, {}])
async def test_a_reader_resumes_where_it_was(start, headers):
    events = FakeEvents()
    for number in range(4):
        events.emit("tick", str(number))
    client = await start(events)
    url = "/v1/events" if headers else "/v1/events?since=2"
    async with client.get(url, headers=headers) as answer:
        assert [event["seq"] for event in await read_events(answer, 2)] == [3, 4]


async def test_a_number_from_the_nodes_previous_life_means_everything(start):
    events = FakeEvents()
    events.emit("start", "again")
    client = await start(events)
    assert len(await (await client.get("/v1/events?since=5000&follow=0")).json()) == 1
    assert await (await client.get("/v1/events?since=1&follow=0")).json() == []


async def test_silence_is_filled_with_comments(start):
    client = await start(FakeEvents(), keep_alive_s=0.01)
    async with client.get("/v1/events") as answer:
        assert await answer.content.readline() == b": p2pdrl events\n"
        await answer.content.readline()
        for _ in range(3):
            assert await answer.content.readline() == b": keep-alive\n"
            assert await answer.content.readline() == b"\n"


async def test_a_queue_that_overflowed_loses_no_event(start):
    events = FakeEvents(capacity=2)
    client = await start(events, keep_alive_s=0.05)
    async with client.get("/v1/events") as answer:
        await answer.content.readline()
        for number in range(50):
            events.emit("burst", str(number))
        assert [event["seq"] for event in await read_events(answer, 50)] == list(range(1, 51))


async def test_a_reader_that_takes_nothing_is_dropped(start):
    events = FakeEvents()
    streams = EventStreams(events, keep_alive_s=0.01, write_deadline_s=0.05)
    client = await start(streams)
    async with client.get("/v1/events") as answer:
        await answer.content.readline()
        for _ in range(50):
            events.emit("large", "x" * 400_000)
        async with asyncio.timeout(5):
            while streams.open_streams:  # noqa: ASYNC110 - it ends on its own deadline, which no event tells
                await asyncio.sleep(0.01)
        answer.close()


async def test_shutdown_ends_open_streams(start):
    client = await start(FakeEvents())
    async with client.get("/v1/events") as answer:
        await answer.content.readline()
        await asyncio.wait_for(client.server.close(), 5)
        await answer.content.read()


async def test_too_many_streams_are_refused(start, monkeypatch):
    monkeypatch.setattr("p2pdrl.api.sse._MAX_STREAMS", 1)
    client = await start(FakeEvents())
    async with client.get("/v1/events") as answer:
        await answer.content.readline()
        assert (await client.get("/v1/events")).status == 503
