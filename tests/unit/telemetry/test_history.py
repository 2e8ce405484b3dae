"""Rings and rate meters against slow, obvious formulas."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2pdrl.telemetry.history import RateMeter, Ring


def ring_of(samples: list[tuple[float, float]], capacity: int = 100) -> Ring:
    ring = Ring(capacity)
    for t_s, value in samples:
        ring.add(t_s, value)
    return ring


def test_the_newest_samples_are_kept() -> None:
    ring = ring_of([(float(t), float(t * t)) for t in range(10)], capacity=3)
    assert len(ring) == 3
    assert ring.window(-1.0) == [(7.0, 49.0), (8.0, 64.0), (9.0, 81.0)]
    assert ring.last == (9.0, 81.0)
    assert Ring(1).last is None


def test_a_window_is_open_at_its_old_end() -> None:
    ring = ring_of([(1.0, 1.0), (2.0, 2.0), (3.0, 3.0)])
    assert ring.window(1.0) == [(2.0, 2.0), (3.0, 3.0)]
    assert ring.window(3.0) == []


def test_what_json_cannot_say_is_left_out() -> None:
    ring = Ring(3)
    assert [ring.add(0.0, value) for value in (math.nan, math.inf, -math.inf, 1.0)] == [False] * 3 + [True]
    assert len(ring) == 1


def test_time_does_not_go_back() -> None:
    ring = ring_of([(2.0, 0.0)])
    with pytest.raises(ValueError, match="back"):
        ring.add(1.0, 0.0)
    with pytest.raises(ValueError, match="one sample"):
        Ring(0)


def test_mean_of_a_window() -> None:
    ring = ring_of([(1.0, 10.0), (2.0, 20.0), (3.0, 60.0)])
    assert ring.mean(window_s=2.0, now_s=3.0) == 40.0
    assert ring.mean(window_s=2.0, now_s=9.0) is None


def test_rate_of_a_running_count() -> None:
    ring = ring_of([(float(t), 5.0 * t) for t in range(20)])
    assert ring.rate(window_s=10.0, now_s=19.0) == pytest.approx(5.0)
    assert ring.rate(window_s=10.0, now_s=24.0) == pytest.approx(2.5)  # nothing for half the window
    assert ring.rate(window_s=10.0, now_s=100.0) == 0.0
    assert ring_of([(0.0, 7.0)]).rate(10.0, 5.0) == 0.0
    assert Ring(3).rate(10.0, 5.0) == 0.0
    assert ring_of([(5.0, 7.0), (5.0, 9.0)]).rate(10.0, 5.0) == 0.0


def test_a_count_that_drops_began_again() -> None:
    assert ring_of([(0.0, 100.0), (1.0, 110.0), (2.0, 4.0), (3.0, 6.0)]).rate(10.0, 4.0) == (10 + 4 + 2) / 4


GAPS = st.lists(st.tuples(st.floats(0, 5), st.floats(0, 100)), max_size=40)


@given(GAPS, st.floats(0.1, 20), st.floats(0, 20))
def test_rate_is_never_negative_and_bounded_by_what_was_counted(
    gaps: list[tuple[float, float]], window_s: float, later_s: float
) -> None:
    ring, t_s, count = Ring(50), 0.0, 0.0
    for gap_s, growth in gaps:
        t_s, count = t_s + gap_s, count + growth
        ring.add(t_s, count)
    now_s = t_s + later_s
    rate = ring.rate(window_s, now_s)
    assert rate >= 0
    if rate and len(ring):
        first_s = ring.window(-1.0)[0][0]
        assert rate * (now_s - first_s) <= count * max(1.0, (now_s - first_s) / window_s) + 1e-6


@given(st.integers(0, 60), st.integers(1, 20))
def test_thinned_keeps_the_newest(size: int, points: int) -> None:
    ring = ring_of([(float(t), 0.0) for t in range(size)])
    thin = ring.thinned(points)
    assert len(thin) <= points
    assert thin == sorted(thin)
    assert (thin[-1:] or [None])[-1] == ring.last


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


@given(st.lists(st.tuples(st.floats(0, 3), st.integers(0, 50)), max_size=60))
def test_memory_is_bounded_and_nothing_is_counted_twice(events: list[tuple[float, int]]) -> None:
    meter, now_s, log = RateMeter(10.0, 0.0), 0.0, []
    for gap_s, count in events:
        now_s += gap_s
        meter.add(count, now_s)
        log.append((now_s, count))
    first = math.floor(now_s) - 9
    expected = sum(count for t_s, count in log if math.floor(t_s) >= first)
    assert meter.rate(now_s) == pytest.approx(expected / max(1.0, now_s - max(0, first)))
    assert len(meter._slots) <= RateMeter.SLOTS
