from __future__ import annotations

import random

import pytest

from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.strategies.gossip.adpsgd import AdpsgdCore
from p2pdrl.strategies.gossip.asynchronous import COOL_MAX_S


def core(**options) -> AdpsgdCore:
    return AdpsgdCore(AdpsgdConfig(**options), "a", random.Random(0))


def test_due_after_so_many_updates():
    one = core(every_updates=3)
    assert not one.due(0.0)
    one.updated(2)
    assert not one.due(0.0)
    one.updated(1)
    assert one.due(0.0)
    one.began(0.0)
    one.mixed("b")
    assert not one.due(10.0)


def test_due_after_so_many_seconds():
    one = core(every_updates=0, every_s=2.0)
    assert one.due(0.0)
    one.began(0.0)
    one.mixed("b")
    assert not one.due(1.9)
    assert one.due(2.0)
    one.updated(1000)
    one.began(2.0)
    assert not one.due(3.9)


def test_whichever_comes_first():
    one = core(every_updates=5, every_s=2.0)
    one.began(0.0)
    one.mixed("b")
    one.updated(5)
    assert one.due(0.5)
    one.mixed("b")
    assert not one.due(0.5)
    assert one.due(2.0)


def test_never_closer_than_the_least_interval():
    one = core(min_interval_s=0.5)
    one.updated(1)
    one.began(10.0)
    one.updated(100)
    assert not one.due(10.49)
    assert one.due(10.5)


@pytest.mark.parametrize("options", [{}, {"every_updates": 0, "every_s": 60.0}])
def test_busy_tries_again_after_a_random_moment(options):
    moments = set()
    for seed in range(5):
        one = AdpsgdCore(AdpsgdConfig(min_interval_s=1.0, **options), "a", random.Random(seed))
        one.updated(1)
        one.began(0.0)
        one.busy(0.2, took_s=0.2)
        assert 0.3 <= one.next_s <= 0.9
        assert not one.due(one.next_s - 0.001)
        assert one.due(one.next_s)
        moments.add(one.next_s)
    assert len(moments) == 5


def test_moments_after_busy_grow_up_to_a_bound():
    one = core(min_interval_s=0.0)
    for _ in range(3000):
        one.busy(0.0, took_s=1.0)
    assert one.next_s <= 8.0
    rests = []
    for _ in range(50):
        one.busy(0.0, took_s=1.0)
        rests.append(one.next_s)
    assert max(rests) > 4.0
    one.mixed("b")
    one.busy(0.0, took_s=1.0)
    assert one.next_s <= 1.0


def test_a_failed_partner_rests_twice_as_long_each_time():
    one, now_s, rests = core(), 0.0, []
    for _ in range(7):
        one.failed("b", now_s)
        assert one.choose(["b", "c"], now_s) == "c"
        began_s = now_s
        while one.choose(["b"], now_s) is None:
            now_s += 0.25
        rests.append(now_s - began_s)
    assert rests == [0.5, 1.0, 2.0, 4.0, 8.0, COOL_MAX_S, COOL_MAX_S]


def test_a_partner_that_is_only_just_starting_rests_a_second_at_most():
    one, now_s, rests = core(), 0.0, []
    for unready in [True] * 6 + [False] * 2:
        one.failed("b", now_s, unready=unready)
        began_s = now_s
        while one.choose(["b"], now_s) is None:
            now_s += 0.25
        rests.append(now_s - began_s)
    assert rests == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 4.0]


def test_an_endless_failure_keeps_the_longest_rest():
    one = core()
    for _ in range(3000):
        one.failed("b", 0.0)
    assert one.choose(["b"], COOL_MAX_S - 0.01) is None
    assert one.choose(["b"], COOL_MAX_S) == "b"


def test_a_good_exchange_forgives():
    one = core()
    for _ in range(5):
        one.failed("b", 0.0)
    one.mixed("b")
    assert one.choose(["b"], 0.0) == "b"
    one.failed("b", 0.0)
    assert one.choose(["b"], 0.5) == "b"


def test_choice_follows_the_topology():
    assert core().choose([], 0.0) is None
    assert core().choose(["a"], 0.0) is None
    ring = core(partners="ring")
    assert {ring.choose("abcdefgh", 0.0) for _ in range(50)} == {"b", "h"}
    anyone = core()
    assert {anyone.choose("abcd", 0.0) for _ in range(50)} == {"b", "c", "d"}


def test_an_exchange_that_is_skipped_is_followed_by_the_next_in_its_turn():
    one = core(every_updates=2, min_interval_s=1.0)
    one.updated(2)
    assert one.due(0.0)
    one.skipped(0.0)
    assert not one.due(5.0)
    one.updated(2)
    assert not one.due(0.5)
    assert one.due(1.0)
