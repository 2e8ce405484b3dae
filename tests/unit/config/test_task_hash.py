"""The task hash: what must be equal to train together, and nothing else."""

from __future__ import annotations

import msgspec
import pytest

from p2pdrl.config import schema
from p2pdrl.config.loader import resolve
from p2pdrl.config.strategy import AdpsgdConfig, LocalConfig
from p2pdrl.config.task import (
    HASHED,
    A2CConfig,
    EnvConfig,
    RegressionConfig,
    StopConfig,
    TaskConfig,
    task_hash,
)


def test_it_is_32_hex_digits_and_stable() -> None:
    assert len(task_hash(TaskConfig())) == 32
    assert int(task_hash(TaskConfig()), 16)
    assert task_hash(TaskConfig()) == task_hash(TaskConfig(env=EnvConfig(id="CartPole-v1")))


@pytest.mark.parametrize(
    "change",
    [
        {"strategy": LocalConfig()},
        {"strategy": AdpsgdConfig(weight=0.1)},
        {"stop": StopConfig(env_steps=5)},
    ],
)
def test_strategy_and_stop_may_differ(change: dict[str, object]) -> None:
    assert task_hash(msgspec.structs.replace(TaskConfig(), **change)) == task_hash(TaskConfig())


OTHER = {bool: lambda v: not v, int: lambda v: v + 1, float: lambda v: v + 0.125, str: lambda v: v + "x"}


@pytest.mark.parametrize(
    "base",
    [TaskConfig(), TaskConfig(algorithm=A2CConfig()), TaskConfig(algorithm=RegressionConfig())],
)
def test_every_fixed_value_counts(base: TaskConfig) -> None:
    seen = {task_hash(base)}
    changed = 0
    for path, value in schema.leaves(base):
        if path[0] not in HASHED or path[-1] == schema.TAG:
            continue
        changed += 1
        tree = msgspec.to_builtins(base)
        table = tree
        for part in path[:-1]:
            table = table[part]
        table[path[-1]] = OTHER[type(value)](value) if type(value) in OTHER else 7
        fixed = _unchecked(base, path, table[path[-1]])
        seen.add(task_hash(fixed))
    assert len(seen) == changed + 1


def _unchecked(config: msgspec.Struct, path: tuple[str, ...], value: object) -> TaskConfig:
    """``config`` with another value, whether the schema allows it or not."""
    head, rest = path[0], path[1:]
    inner = _unchecked(getattr(config, head), rest, value) if rest else value
    return msgspec.structs.replace(config, **{head: inner})  # type: ignore[return-value]


def test_the_order_of_kwargs_does_not_count() -> None:
    one, two = ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert task_hash(TaskConfig(env=EnvConfig(kwargs=one))) == task_hash(
        TaskConfig(env=EnvConfig(kwargs=two))
    )


def test_a_number_is_hashed_as_its_field_takes_it() -> None:
    as_integer = resolve(sets=["task.algorithm.clip=1"]).config.task
    as_float = resolve(sets=["task.algorithm.clip=1.0"]).config.task
    assert task_hash(as_integer) == task_hash(as_float)
