from __future__ import annotations

import asyncio
import contextlib

import pytest

from p2pdrl.node.looplag import LagWindow, LoopLagMonitor


class EnoughError(Exception):
    """Ends the endless."""


def test_an_empty_window_has_no_lag():
    window = LagWindow(0.1, 60.0)
    assert window.p99_s == 0.0


def test_p99_passes_over_one_slow_waking_in_a_thousand():
    window = LagWindow(0.1, 100.0)
    for _ in range(999):
        window.add(0.01)
    window.add(0.09)
    assert window.p99_s == pytest.approx(0.01)


def test_a_stall_counts_for_all_the_wakings_it_hid():
    window = LagWindow(0.1, 60.0)
    for _ in range(600):
        window.add(0.0)
    window.add(3.05)
    # 31 of 600 wakings fell into the stall: the sixth greatest lag is 3.05 − 6 intervals.
    assert window.p99_s == pytest.approx(3.05 - 0.5, abs=0.11)


def test_the_window_forgets_and_a_long_stall_does_not_overflow_it():
    window = LagWindow(0.1, 1.0)
    window.add(1000.0)
    assert window.p99_s == pytest.approx(1000.0)
    for _ in range(10):
        window.add(0.0)
    assert window.p99_s == 0.0


def test_a_waking_too_early_is_no_lag():
    window = LagWindow(0.1, 1.0)
    window.add(-0.01)
    assert window.p99_s == 0.0


async def test_the_monitor_measures_how_late_it_wakes():
    lateness = iter([0.0, 0.25, 0.05])
    now = 0.0
    samples: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        late = next(lateness, None)
        if late is None:
            raise EnoughError
        now += seconds + late

    monitor = LoopLagMonitor(0.1, on_sample=samples.append, sleep=sleep, monotonic=lambda: now)
    with contextlib.suppress(EnoughError):
        await monitor.run()
    assert samples == pytest.approx([0.0, 0.25, 0.05])
    assert monitor.p99_s == pytest.approx(0.25)


async def test_the_monitor_runs_on_the_real_loop_and_ends_when_cancelled():
    sampled = asyncio.Event()
    monitor = LoopLagMonitor(0.001, on_sample=lambda _lag: sampled.set())
    task = asyncio.create_task(monitor.run())
    await asyncio.wait_for(sampled.wait(), 5.0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
