"""Which learners share out an update, and whose rates grow."""

from __future__ import annotations

import pytest

from p2pdrl.config.loader import resolve
from p2pdrl.config.task import rate_power


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
