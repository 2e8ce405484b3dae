"""The self-tuned deadline."""

from __future__ import annotations

import pytest

from p2pdrl.group.adaptive_timeout import ENOUGH, AdaptiveTimeout


def test_unobserved_it_waits_longest():
    timeout = AdaptiveTimeout(10.0)
    for _ in range(ENOUGH - 1):
        timeout.observe(0.01)
    assert timeout.deadline_s == 10.0


def test_quick_rounds_bring_it_down_to_the_least():
    timeout = AdaptiveTimeout(10.0)
    for _ in range(20):
        timeout.observe(0.02)
    assert timeout.deadline_s == 0.25


def test_it_is_the_quantile_times_the_margin():
    timeout = AdaptiveTimeout(100.0, least_s=0.0, quantile=0.95, margin=3.0, window=20)
    for tenths in range(1, 21):
        timeout.observe(tenths / 10)
    assert timeout.deadline_s == pytest.approx(3 * 1.9)


def test_one_outlier_of_many_changes_nothing():
    timeout = AdaptiveTimeout(100.0, least_s=0.0, window=64)
    for _ in range(63):
        timeout.observe(1.0)
    timeout.observe(50.0)
    assert timeout.deadline_s == pytest.approx(3.0)


def test_a_slower_swarm_is_given_more_time_up_to_the_bound():
    timeout = AdaptiveTimeout(5.0, window=8)
    for seconds in (0.1,) * 8 + (1.0,) * 8:
        timeout.observe(seconds)
    assert timeout.deadline_s == pytest.approx(3.0)
    for _ in range(8):
        timeout.observe(4.0)
    assert timeout.deadline_s == 5.0


def test_what_is_no_time_is_passed_over():
    timeout = AdaptiveTimeout(5.0)
    for seconds in (float("nan"), float("inf"), -1.0) * 4:
        timeout.observe(seconds)
    assert timeout.deadline_s == 5.0


def test_the_least_gives_way_to_the_most():
    timeout = AdaptiveTimeout(0.1, least_s=0.25)
    for _ in range(8):
        timeout.observe(0.0)
    assert timeout.deadline_s == 0.1


@pytest.mark.parametrize(
    "options",
    [
        {"most_s": 0.0},
        {"least_s": -1.0},
        {"quantile": 0.0},
        {"quantile": 1.1},
        {"margin": 0.5},
        {"window": 1},
    ],
)
def test_senseless_bounds_are_refused(options):
    with pytest.raises(ValueError, match="timeout"):
        AdaptiveTimeout(**{"most_s": 1.0, **options})
