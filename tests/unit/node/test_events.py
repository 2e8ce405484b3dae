from __future__ import annotations

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.node.events import LOST, EventLog


def log(capacity: int = 10, **options) -> EventLog:
    return EventLog(capacity, ManualClock(wall_s=50.0), **options)


def test_events_are_numbered_and_dated():
    events = log()
    first = events.emit("member-joined", "a joined", id="a")
    assert first == {
        "seq": 1,
        "time": 50.0,
        "kind": "member-joined",
        "text": "a joined",
        "level": "info",
        "id": "a",
    }
    assert events.emit("learner-died", "it died", level="warning")["seq"] == 2


def test_since_gives_what_is_newer_and_still_remembered():
    events = log(capacity=3)
    for number in range(1, 6):
        events.emit("k", str(number))
    assert [event["seq"] for event in events.since(0)] == [3, 4, 5]
    assert [event["seq"] for event in events.since(4)] == [5]
    assert events.since(5) == []


@pytest.mark.parametrize("name", ["seq", "time", "event"])
def test_an_events_own_fields_cannot_be_replaced(name):
    with pytest.raises(ValueError, match="its own"):
        log().emit("k", "t", **{name: 1})


async def test_subscribers_get_each_new_event_until_they_leave():
    events = log()
    events.emit("k", "before")
    async with events.subscribe() as first, events.subscribe() as second:
        event = events.emit("k", "during")
        assert (first.get_nowait(), second.get_nowait()) == (event, event)
    events.emit("k", "after")
    assert first.empty()


async def test_a_slow_reader_is_dropped_and_told():
    events = log(queue_size=2)
    async with events.subscribe() as slow, events.subscribe() as quick:
        for number in range(1, 5):
            events.emit("k", str(number))
            quick.get_nowait()
        told = slow.get_nowait()
        assert told["kind"] == LOST
        assert slow.empty()
        assert quick.empty()
        events.emit("k", "5")
        assert slow.empty()
        assert quick.get_nowait()["text"] == "5"
    assert [event["kind"] for event in events.since(0)] == ["k"] * 5


def test_what_lasts_is_told_now_and_then():
    clock = ManualClock(wall_s=50.0)
    events = EventLog(100, clock)
    for _ in range(100):
        events.remind("experience", "nobody learns")
        events.remind("experience", "no shard")
        clock.advance(1.0)
    told = [event["text"] for event in events.since(0)]
    assert told.count("nobody learns") == told.count("no shard") == 4
    assert {event["level"] for event in events.since(0)} == {"warning"}
