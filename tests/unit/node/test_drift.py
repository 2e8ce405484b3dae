from __future__ import annotations

import pytest

from p2pdrl.node.drift import DriftWatch
from p2pdrl.strategies.protocol import Merged, RoundReport


def pulled(watch: DriftWatch, **pulls: float) -> None:
    for peer, pull in pulls.items():
        watch.round(RoundReport("ok", merged=(Merged("me", 0.5), Merged(peer, 0.5)), pulls=(0.0, pull)))


def good(watch: DriftWatch, times: int = 5) -> None:
    for number in range(times):
        assert watch.judged(400.0 + number) is None


def test_who_pulled_unusually_far_before_a_fall_counts_less_until_the_return_is_back():
    watch = DriftWatch()
    good(watch)
    pulled(watch, a=1.0, b=1.2, liar=3.0)
    blame = watch.judged(100.0)
    assert blame is not None
    assert (blame.peer, blame.after, blame.weight) == ("liar", 100.0, 0.5)
    assert blame.times == pytest.approx(3.0 / 1.2)
    pulled(watch, a=1.0, b=1.2, liar=3.0)
    watch.judged(90.0)
    assert watch.weights == {"liar": 0.25}
    assert (watch.weight("liar"), watch.weight("a")) == (0.25, 1.0)
    good(watch, 7)
    assert watch.weights == {}


def test_a_fall_after_usual_exchanges_blames_nobody():
    watch = DriftWatch()
    good(watch)
    pulled(watch, a=1.0, b=1.2, c=1.3)
    assert watch.judged(100.0) is None
    assert watch.weights == {}


def test_pulls_before_a_good_evaluation_count_no_more():
    watch = DriftWatch()
    good(watch)
    pulled(watch, a=1.0, b=1.2, c=30.0)
    good(watch, 1)
    pulled(watch, a=1.0, b=1.2, c=1.0)
    assert watch.judged(100.0) is None


def test_one_of_two_cannot_be_told_to_be_the_odd_one():
    watch = DriftWatch()
    good(watch)
    pulled(watch, a=1.0, liar=30.0)
    assert watch.judged(100.0) is None


def test_negative_returns_fall_as_well():
    watch = DriftWatch()
    for value in (-120.0, -110.0, -100.0, -105.0):
        assert watch.judged(value) is None
    pulled(watch, a=1.0, b=1.0, liar=3.0)
    assert watch.judged(-110.0) is None
    pulled(watch, a=1.0, b=1.0, liar=3.0)
    assert watch.judged(-400.0) is not None


def test_made_up_peers_fill_no_memory():
    watch = DriftWatch()
    good(watch)
    for number in range(10_000):
        pulled(watch, **{f"p{number}": 1.0})
    pulled(watch, late=1e9)
    assert watch.judged(0.0) is None
