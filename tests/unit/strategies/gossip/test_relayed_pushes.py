"""Pushes beyond the graph."""

from __future__ import annotations

from p2pdrl.strategies.gossip.gala import ASK_AFTER, MOST_RELAYED, RELAYED, RelayedPushes


def pushes(relayed: RelayedPushes, count: int) -> None:
    for _ in range(count):
        relayed.pushed()


def test_who_gets_pushes_asks_nobody():
    relayed = RelayedPushes("c")
    for _ in range(5):
        pushes(relayed, ASK_AFTER - 1)
        assert relayed.whom_to_ask("abde") is None
        relayed.came("b")


def test_who_gets_none_asks_down_the_ring_and_around():
    relayed = RelayedPushes("c")
    asked = []
    for _ in range(5):
        pushes(relayed, ASK_AFTER)
        asked.append(relayed.whom_to_ask("abde"))
        assert relayed.whom_to_ask("abde") is None  # it has just asked
    assert asked == ["b", "a", "e", "d", "b"]


def test_it_begins_with_the_nearest_again_once_somebody_pushed():
    relayed = RelayedPushes("c")
    for expected in ("b", "a"):
        pushes(relayed, ASK_AFTER)
        assert relayed.whom_to_ask("abde") == expected
    relayed.came("a")
    pushes(relayed, ASK_AFTER)
    assert relayed.whom_to_ask("abde") == "b"


def test_alone_there_is_nobody_to_ask():
    relayed = RelayedPushes("c")
    pushes(relayed, ASK_AFTER)
    assert relayed.whom_to_ask("") is None
    assert relayed.whom_to_ask("c") is None


def test_the_only_one_is_who_pushed_of_late_when_nobody_else_did():
    relayed = RelayedPushes("c")
    assert relayed.only("a")
    relayed.came("b")
    assert not relayed.only("a")
    assert relayed.only("b")
    pushes(relayed, RELAYED - 1)
    relayed.came("a")
    assert not relayed.only("a")
    pushes(relayed, 1)
    assert relayed.only("a")


def test_who_asked_gets_so_many_pushes_unless_it_asks_for_more():
    relayed = RelayedPushes("a")
    assert relayed.accept("c")
    pushes(relayed, RELAYED - 1)
    assert relayed.peers == {"c"}
    relayed.renew("c")
    pushes(relayed, RELAYED - 1)
    assert relayed.peers == {"c"}
    pushes(relayed, 1)
    assert relayed.peers == set()
    relayed.renew("c")  # it didn't ask
    assert relayed.peers == set()


def test_only_so_many_are_pushed_to():
    relayed = RelayedPushes("a")
    peers = [f"p{number}" for number in range(MOST_RELAYED + 1)]
    assert [relayed.accept(peer) for peer in peers] == [True] * MOST_RELAYED + [False]
    assert relayed.accept(peers[0])
    assert relayed.peers == set(peers[:-1])
