from __future__ import annotations

from p2pdrl.node import swarm_view as module
from p2pdrl.node.swarm_view import Quarantine


def test_the_third_strike_counts():
    quarantine = Quarantine(3, 60.0)
    assert [quarantine.strike("b", 0.0) for _ in range(3)] == [False, False, True]
    assert quarantine.holds("b", 59.9)
    assert not quarantine.holds("b", 60.0)
    assert quarantine.total == 3


def test_afterwards_strikes_are_counted_anew():
    quarantine = Quarantine(2, 10.0)
    assert [quarantine.strike("b", now_s) for now_s in (0.0, 1.0, 20.0, 21.0)] == [False, True, False, True]


def test_peers_are_judged_apart():
    quarantine = Quarantine(2, 10.0)
    for peer in ("b", "c", "b", "d", "d"):
        quarantine.strike(peer, 0.0)
    assert quarantine.held(0.0) == ("b", "d")
    assert not quarantine.holds("c", 0.0)
    assert not quarantine.holds("unknown", 0.0)
    assert quarantine.held(10.0) == ()


def test_one_strike_may_be_enough():
    quarantine = Quarantine(1, 5.0)
    assert quarantine.strike("b", 7.0)
    assert quarantine.held(11.9) == ("b",)


def test_old_strikes_are_forgiven():
    quarantine = Quarantine(3, 60.0)
    assert [quarantine.strike("b", now_s) for now_s in (0.0, 599.0, 600.0)] == [False, False, False]
    assert quarantine.strike("b", 700.0)


def test_made_up_peers_dont_fill_the_memory(monkeypatch):
    monkeypatch.setattr(module, "MAX_PEERS", 3)
    quarantine = Quarantine(2, 60.0)
    for peer in ("a", "b", "c", "a2", "b"):  # "a" is forgotten, "b" has its second
        quarantine.strike(peer, 0.0)
    assert quarantine.held(0.0) == ("b",)
    assert not quarantine.strike("a", 0.0)
    for peer in ("d", "e", "f"):
        quarantine.strike(peer, 1.0)
        quarantine.strike(peer, 1.0)
    assert quarantine.held(1.0) == ("d", "e", "f")
