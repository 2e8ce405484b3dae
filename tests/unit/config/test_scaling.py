"""Which learners share out an update, and whose rates grow."""

from __future__ import annotations

import math

import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.config.task import LEAST_SPEED, rate_power, relative_speeds


@pytest.mark.parametrize(
    ("preset", "sets", "power"),
    [
        ("adpsgd", "", 0.5),
        ("adpsgd", "task.scaling=batch", 0.0),
        ("adpsgd", "task.scaling=none", None),
        ("adpsgd", "task.strategy.exchanges=gradients", 0.0),
        ("dsgd", "", 0.5),
        ("sgp", "", 0.5),
        ("param_average", "", 0.5),
        ("grad_average", "", 0.0),
        ("grad_average", "task.strategy.reduce=sum", None),
        ("mapreduce_sync", "", 0.0),
        ("local", "", None),
        ("hogwild", "", None),
        ("downpour", "", None),
        ("strom", "", None),
        ("federated", "", None),
        ("amb_pp", "", None),
        ("impala", "", 0.5),
        ("dqn", "", None),
        ("sac", "", None),
        ("mapreduce_shards", "", 0.0),
        ("gala", "", None),
        ("ddppo", "", None),
        ("rapid", "", None),
    ],
)
def test_who_divides(preset: str, sets: str, power: float | None) -> None:
    task = resolve(files=[preset], sets=[*sets.split()]).config.task
    assert rate_power(task, task.strategy) == power


@pytest.mark.parametrize(
    ("steps_per_s", "relative"),
    [
        ([], []),
        ([500.0], [1.0]),
        ([500.0, 480.0, 430.0], [1.0, 1.0, 1.0]),
        ([500.0, 250.0, 88.0], [1.0, 0.5, 2.0**-2.5]),
        ([500.0, 51.0], [1.0, LEAST_SPEED]),
        ([0.0, 500.0], [1.0, 1.0]),  # one isn't known yet
        ([0.0, 0.0], [1.0, 1.0]),
        ([1e300, 1.0, math.inf, 1e-300], [1.0, 0.25, 1.0, LEAST_SPEED]),
        ([1e300, 100.0, 120.0], [1.0, 2.0**-2.5, 0.25]),
    ],
)
def test_parts_go_by_what_learners_do_alone(steps_per_s, relative):
    assert relative_speeds(steps_per_s) == pytest.approx(relative, rel=0.06)


def test_who_is_much_slower_has_no_part_of_what_is_averaged():
    assert relative_speeds([500.0, 480.0, 88.0, 51.0, 0.0], 0.5) == pytest.approx([1, 1, 2.0**-2.5, 0, 1])
    assert relative_speeds([1e300, 100.0, 120.0], 0.5)[1:] == pytest.approx([2.0**-2.5, 0.25])
    assert relative_speeds([1000.0, 10.0, 10.0], 0.5) == [1.0, 0.25, 0.25], "most have a part"
    assert relative_speeds([0.0], 0.5) == relative_speeds([3.0], 0.5) == [1.0]
