"""Pushes beyond the graph."""

from __future__ import annotations

from p2pdrl.strategies.gossip.gala import HUNGRY, LENT, MOST_LENT, RelayedPushes


def pushes(lending: RelayedPushes, count: int) -> None:
    for _ in range(count):
        lending.pushed()


def test_who_gets_pushes_asks_nobody():
    lending = RelayedPushes("c")
    for _ in range(5):
        pushes(lending, HUNGRY - 1)
        assert lending.whom_to_ask("abde") is None
        lending.came("b")


def test_who_gets_none_asks_down_the_ring_and_around():
    lending = RelayedPushes("c")
    asked = []
    for _ in range(5):
        pushes(lending, HUNGRY)
        asked.append(lending.whom_to_ask("abde"))
        assert lending.whom_to_ask("abde") is None  # it has just asked
    assert asked == ["b", "a", "e", "d", "b"]


def test_it_begins_with_the_nearest_again_once_somebody_pushed():
    lending = RelayedPushes("c")
    for expected in ("b", "a"):
        pushes(lending, HUNGRY)
        assert lending.whom_to_ask("abde") == expected
    lending.came("a")
    pushes(lending, HUNGRY)
    assert lending.whom_to_ask("abde") == "b"


def test_alone_there_is_nobody_to_ask():
    lending = RelayedPushes("c")
    pushes(lending, HUNGRY)
    assert lending.whom_to_ask("") is None
    assert lending.whom_to_ask("c") is None


def test_the_only_one_is_who_pushed_of_late_when_nobody_else_did():
    lending = RelayedPushes("c")
    assert lending.only("a")
    lending.came("b")
    assert not lending.only("a")
    assert lending.only("b")
    pushes(lending, LENT - 1)
    lending.came("a")
    assert not lending.only("a")
    pushes(lending, 1)
    assert lending.only("a")


def test_who_asked_gets_so_many_pushes_unless_it_asks_for_more():
    lending = RelayedPushes("a")
    assert lending.lend("c")
    pushes(lending, LENT - 1)
    assert lending.lent == {"c"}
    lending.renew("c")
    pushes(lending, LENT - 1)
    assert lending.lent == {"c"}
    pushes(lending, 1)
    assert lending.lent == set()
    lending.renew("c")  # it didn't ask
    assert lending.lent == set()


def test_only_so_many_are_lent_to():
    lending = RelayedPushes("a")
    peers = [f"p{number}" for number in range(MOST_LENT + 1)]
    assert [lending.lend(peer) for peer in peers] == [True] * MOST_LENT + [False]
    assert lending.lend(peers[0])
    assert lending.lent == set(peers[:-1])
