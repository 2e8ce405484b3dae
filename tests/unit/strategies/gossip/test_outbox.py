from __future__ import annotations

from p2pdrl.group.compatibility import Summary
from p2pdrl.strategies.gossip.sgp import ABSENT_S, AGAIN_MAX_S, OPEN, Outbox, PushInFlight, UnacknowledgedPush

SUMMARY = Summary("me", "task", "layout", 1, "aa", 1, 1)


def begin(outbox: Outbox, number: int, peer: str = "b") -> UnacknowledgedPush:
    push = UnacknowledgedPush(PushInFlight(number, peer, 0.5, 0.5), SUMMARY, outbox.buffers.take())
    outbox.add(push)
    return push


def test_only_so_many_are_under_way():
    outbox = Outbox(8)
    pushes = [begin(outbox, number) for number in range(OPEN)]
    assert not outbox.buffers.any_free
    assert outbox.buffers.take() is None
    outbox.remove(pushes[0])
    outbox.remove(pushes[0])
    assert outbox.buffers.take() is pushes[0].message
    assert not outbox.buffers.any_free


def test_unknown_ones_go_out_again_ever_more_seldom():
    outbox = Outbox(8)
    push, rests = begin(outbox, 1), []
    assert outbox.due({"b"}, 0.0) is None  # it wasn't sent even once
    for _ in range(8):
        push.attempts += 1
        outbox.retry(push, 100.0)
        rests.append(push.next_s - 100.0)
        assert outbox.due({"b"}, push.next_s - 0.01) is None
        assert outbox.due({"b"}, push.next_s) is push
        assert outbox.due({"c"}, push.next_s) is None
    assert rests == [0.25, 0.5, 1.0, 2.0, 4.0, AGAIN_MAX_S, AGAIN_MAX_S, AGAIN_MAX_S]


def test_only_who_is_gone_for_long_is_dead():
    outbox = Outbox(8)
    push = begin(outbox, 1)
    assert outbox.dead({"c"}, 0.0) == []
    assert outbox.dead({"b"}, ABSENT_S - 1) == []
    assert outbox.dead({"c"}, ABSENT_S) == []
    assert outbox.dead({"c"}, 2 * ABSENT_S) == [push]
    assert outbox.peers == {"b"}
    outbox.clear()
    assert outbox.peers == set()
