"""Two cores that compare their views."""

from __future__ import annotations

from p2pdrl.membership.events import Answered, Reject, Welcomed
from p2pdrl.membership.messages import Delta, Digest, Sync, Welcome

from .bench import KEYS, Bench, kill, record


def exchange(asks: Bench, asked: Bench, asked_number: int) -> None:
    """Run one push-pull from ``asks`` to ``asked``."""
    while True:
        syncs = [send for send in asks.sent if isinstance(send.message, Sync | Delta)]
        if not syncs:
            return
        for send in syncs:
            asks.sent.remove(send)
            answer = asked.ask(0, send.message)
            assert not isinstance(answer, Reject)
            asks.feed(Answered(send.call_id, answer))


def test_push_pull_merges_two_views() -> None:
    left, right = Bench(others=3), Bench(others=3)
    left.gossip(record(5), record(1, 4))
    right.gossip(record(6), record(2, 4), record(3, 1, state="left"))
    left.feed(Welcomed(KEYS[1].node_id, "10.0.0.1:7600", Welcome(())))
    exchange(left, right, 1)
    for bench in (left, right):
        assert [bench.state(number) for number in (1, 2, 3, 5, 6)] == [
            "alive",
            "alive",
            "left",
            "alive",
            "alive",
        ]
    left.sent.clear()
    left.feed(Welcomed(KEYS[1].node_id, "10.0.0.1:7600", Welcome(())))
    (sync,) = [send for send in left.sent if isinstance(send.message, Sync)]
    assert right.ask(0, sync.message) == Digest(True)


def test_push_pull_tells_of_deaths_but_hands_no_tombstones_round() -> None:
    left, right = Bench(others=4), Bench(others=3)
    kill(left, 1)
    kill(left, 4)
    left.sent.clear()
    left.feed(Welcomed(KEYS[2].node_id, "10.0.0.2:7600", Welcome(())))
    exchange(left, right, 2)
    assert right.state(4) == "unknown"
    left.gossip(record(6))
    assert right.state(1) in ("alive", "suspect")
