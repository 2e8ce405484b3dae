"""Rate meters against slow, obvious formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.telemetry.rate import RateMeter


def test_a_steady_stream_has_its_rate() -> None:
    meter = RateMeter(window_s=10.0, began_s=100.0)
    for tick in range(1, 400):
        now_s = 100.0 + tick * 0.25
        meter.add(5, now_s)
        if tick >= 8:
            assert meter.rate(now_s) == pytest.approx(20.0, rel=0.06)


def test_a_stream_that_stops_falls_to_zero() -> None:
    meter = RateMeter(window_s=10.0, began_s=0.0)
    meter.add(100, 1.5)
    assert meter.rate(2.0) == pytest.approx(50.0)
    assert meter.rate(10.9) == pytest.approx(100 / 9.9)
    assert meter.rate(11.0) == 0.0
    meter.add(10, 1000.5)
    assert meter.rate(1000.5) == pytest.approx(10 / 9.5)


def test_the_first_instants_do_not_explode() -> None:
    meter = RateMeter(window_s=10.0, began_s=0.0)
    assert meter.rate(0.0) == 0.0
    meter.add(3, 0.0)
    assert meter.rate(0.0) == 3.0
    with pytest.raises(ValueError, match="length"):
        RateMeter(0.0, 0.0)


def test_counting_begins_with_the_first_call_unless_told() -> None:
    meter = RateMeter(window_s=10.0)
    meter.add(4, 700.0)
    assert meter.rate(702.0) == 2.0


def test_bursts_further_apart_than_the_window_have_the_rate_between_them() -> None:
    meter = RateMeter(window_s=10.0, began_s=0.0)
    for burst in range(1, 4):
        meter.add(2000, 20.0 * burst)
        meter.add(0, 20.0 * burst + 1.0)  # says nothing
    assert [meter.rate(60.0 + later_s) for later_s in (0.0, 5.0, 20.0, 40.0)] == [100.0, 100.0, 100.0, 50.0]
    assert meter.rate(100.5) == 0.0  # it has stopped
    meter.add(2000, 200.0)  # after a long pause: the pause doesn't count
    assert meter.rate(201.0) == pytest.approx(200.0, rel=0.15)


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(1, 50)), max_size=60))  # no two are bursts
def test_memory_is_bounded_and_nothing_is_counted_twice(events: list[tuple[float, int]]) -> None:
    meter, now_s, log = RateMeter(10.0, 0.0), 0.0, []
    for gap_s, count in events:
        now_s += gap_s
        meter.add(count, now_s)
        log.append((now_s, count))
    first = math.floor(now_s) - 9
    expected = sum(count for t_s, count in log if math.floor(t_s) >= first)
    assert meter.rate(now_s) == pytest.approx(expected / max(1.0, now_s - max(0, first)))
    assert len(meter._slots) <= RateMeter.SLOTS  # noqa: SLF001 - memory shows nowhere else
