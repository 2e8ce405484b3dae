from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.membership.suspicion import Awareness, SuspicionTimer, suspicion_timeout_s


def test_the_formula_of_lifeguard() -> None:
    assert suspicion_timeout_s(0, 3, 2.0, 30.0) == 30.0
    assert suspicion_timeout_s(1, 3, 2.0, 30.0) == pytest.approx(16.0)  # ln 2 / ln 4 = 1/2
    assert suspicion_timeout_s(2, 3, 2.0, 30.0) == pytest.approx(30 - math.log(3) / math.log(4) * 28)
    assert suspicion_timeout_s(3, 3, 2.0, 30.0) == 2.0
    assert suspicion_timeout_s(9, 3, 2.0, 30.0) == 2.0
    assert suspicion_timeout_s(0, 0, 2.0, 30.0) == 2.0


@given(st.integers(0, 8), st.floats(0.1, 10), st.floats(1, 10))
def test_more_accusers_never_lengthen_it(needed: int, min_s: float, factor: float) -> None:
    times = [suspicion_timeout_s(n, needed, min_s, min_s * factor) for n in range(needed + 2)]
    assert times == sorted(times, reverse=True)
    assert times[-1] == min_s


def test_each_accuser_counts_once_and_no_more_than_needed() -> None:
    timer = SuspicionTimer("a", 2, 4.0, 24.0, started=100.0)
    assert timer.deadline == 124.0
    assert not timer.confirm("a")
    assert timer.confirm("b")
    assert not timer.confirm("b")
    assert not timer.settled
    assert timer.confirm("c")
    assert timer.settled
    assert not timer.confirm("d")
    assert timer.deadline == 104.0
    assert timer.accusers == ("a", "b", "c")


def test_enough_who_gave_it_up_end_the_wait() -> None:
    timer = SuspicionTimer("a", 2, 4.0, 24.0, started=100.0)
    assert timer.confirm_dead("x", 3, now=101.0)
    assert not timer.confirm_dead("x", 3, now=101.0)
    assert timer.confirm_dead("y", 3, now=101.0)
    assert timer.deadline == 124.0
    assert timer.confirm_dead("z", 3, now=101.0)
    assert timer.deadline == 101.0
    assert not timer.confirm_dead("w", 3, now=101.0)


def test_heard_from_again_gives_it_the_minimum() -> None:
    timer = SuspicionTimer("a", 2, 4.0, 24.0, started=100.0)
    timer.restart(124.0)
    assert timer.deadline == 128.0


def test_local_health_stays_within_its_bounds_and_scales() -> None:
    awareness = Awareness(7)
    awareness.add(-1)
    assert awareness.score == 0
    assert awareness.scale(0.5) == 0.5
    awareness.add(3)
    assert awareness.scale(0.5) == 2.0
    awareness.add(99)
    assert awareness.score == 7
    awareness.add(-1)
    assert awareness.score == 6
