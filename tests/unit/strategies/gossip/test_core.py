from __future__ import annotations

import random

from p2pdrl.config.strategy import SgpConfig
from p2pdrl.strategies.gossip.push import PushCore, out_peers


def core(partners: str) -> PushCore:
    return PushCore(SgpConfig(partners=partners), "c", random.Random(0))


def test_out_peers_lie_up_the_ring():
    assert out_peers("ring", "c", "abcdefgh") == ["d"]
    assert out_peers("ring", "h", "abcdefgh") == ["a"]
    assert out_peers("exponential", "c", "abcdefgh") == ["d", "e", "g"]
    assert out_peers("random", "c", "abc") == ["a", "b"]
    assert out_peers("exponential", "c", "") == out_peers("ring", "c", "c") == []


def test_exponential_takes_turns():
    one = core("exponential")
    assert [one.choose("abcdefgh", 0.0) for _ in range(4)] == ["d", "e", "g", "d"]
    assert one.choose("abcdefgh", 0.0, without={"e"}) == "g"
    one.failed("d", 0.0)
    assert [one.choose("abcdefgh", 0.04) for _ in range(2)] == ["e", "g"]
    assert one.choose_all("abcdefgh", 0.04) == ["e", "g"]


def test_on_a_ring_the_next_that_accepts_takes_the_place_of_one_that_rests():
    one = core("ring")
    one.failed("d", 0.0)
    assert one.choose("abcdef", 0.04) == "e"
    assert one.choose_all("abcdef", 0.04) == ["e"]
    one.failed("e", 0.0)
    assert one.choose_all("abcdef", 0.04) == ["f"]
    assert one.choose_all("cde", 0.04) == []
    assert one.choose_all("abcdef", 0.06) == ["d"]  # it has rested
    assert one.choose("abcdef", 0.06, without={"d"}) is None  # a push to it is under way


def test_random_takes_anyone_and_ring_the_next():
    assert {core("random").choose("abc", 0.0) for _ in range(1)} <= {"a", "b"}
    one = core("random")
    assert {one.choose("abcd", 0.0) for _ in range(50)} == {"a", "b", "d"}
    assert len(one.choose_all("abcd", 0.0)) == 1
    assert core("ring").choose_all("abcd", 0.0) == ["d"]
    assert core("ring").choose("", 0.0) is None
    assert core("random").choose_all("", 0.0) == []
