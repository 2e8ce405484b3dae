from __future__ import annotations

from p2pdrl.group.compatibility import Summary
from p2pdrl.strategies.gossip.gala import MOST_IN_PEERS, GalaInbox
from p2pdrl.strategies.gossip.push import PushHead


def head(number: int, version: int = 10, boot: str = "boot") -> PushHead:
    return PushHead(boot, number, "float32", Summary("n", "task", "layout", 1, "aa", 100, version))


def put(inbox: GalaInbox, peer: str, number: int, version: int = 10, value: float = 0.0) -> None:
    received = inbox.open(peer)
    received.vector[:] = value
    inbox.seal(received, head(number, version), 8)


def test_each_in_peers_latest_is_used_once():
    inbox = GalaInbox(2)
    put(inbox, "b", 1, value=1.0)
    put(inbox, "b", 2, value=2.0)
    put(inbox, "a", 7, value=3.0)
    assert inbox.any_fresh
    others, late = inbox.take(10, 50)
    assert [(received.peer, received.vector[0]) for received in others] == [("a", 3.0), ("b", 2.0)]
    assert late == ()
    assert not inbox.any_fresh
    assert inbox.take(10, 50) == ([], ())


def test_what_lags_too_far_is_left_out():
    inbox = GalaInbox(2)
    put(inbox, "a", 1, version=40)
    put(inbox, "b", 1, version=39)
    put(inbox, "c", 1, version=500)
    others, late = inbox.take(90, 50)
    assert [received.peer for received in others] == ["a", "c"]
    assert late == ("b",)
    assert not inbox.any_fresh


def test_repeats_and_overtaken_pushes_are_known():
    inbox = GalaInbox(2)
    put(inbox, "a", 5)
    assert inbox.known("a", "boot", 5)
    assert inbox.known("a", "boot", 4)
    assert not inbox.known("a", "boot", 6)
    assert not inbox.known("a", "another boot", 5)
    assert not inbox.known("b", "boot", 5)


def test_only_so_many_are_kept():
    inbox = GalaInbox(2)
    for number in range(MOST_IN_PEERS):
        put(inbox, f"{number:02}", 1)
    assert inbox.open("one more") is None
    inbox.take(10, 50)
    assert inbox.open("one more") is not None
    assert sum(inbox.known(f"{number:02}", "boot", 1) for number in range(MOST_IN_PEERS)) == MOST_IN_PEERS - 1


def test_a_vector_being_written_isnt_used():
    inbox = GalaInbox(2)
    put(inbox, "a", 1)
    inbox.open("a")
    assert not inbox.any_fresh
    put(inbox, "a", 2)
    inbox.clear()
    assert not inbox.any_fresh
