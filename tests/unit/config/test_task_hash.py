"""The task hash: what must be equal to train together, and nothing else."""

from __future__ import annotations

from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from p2pdrl.config import schema
from p2pdrl.config.fields import LATER, hashed, without_defaults
from p2pdrl.config.loader import preset_names, resolve
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


def test_releases_agree_on_it() -> None:
    """A swarm with this task is trained by nodes of several releases: it never changes."""
    assert task_hash(resolve(files=["cartpole"]).config.task) == "7dcf699a23f830f48f721e2bca9a9a63"
    assert task_hash(resolve(files=["dqn"]).config.task) == "859180943c88fccb77b7649b24584d5d"


class Before(msgspec.Struct, tag_field="name", tag="it", kw_only=True):
    steps: int = 4
    kwargs: dict[str, object] = {}


class Since(Before, tag_field="name", tag="it", kw_only=True):
    added: Annotated[int, Meta(ge=1), LATER] = 1


def test_an_option_that_a_later_release_adds_counts_only_if_it_is_used() -> None:
    assert hashed(Since(kwargs={"a": 1})) == hashed(Before(kwargs={"a": 1}))
    assert hashed(Since(added=2)) != hashed(Since())


def test_what_is_as_by_default_isnt_told() -> None:
    task = TaskConfig(env=EnvConfig(num_envs=3), algorithm=A2CConfig())
    told = without_defaults(task)
    assert told == {"env": {"num_envs": 3}, "algorithm": {"name": "a2c"}}
    assert msgspec.convert(told, TaskConfig) == task
    assert without_defaults((Since(), {"x": Since(added=3)})) == [
        {"name": "it"},
        {"x": {"name": "it", "added": 3}},
    ]


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_survives_being_told(preset: str) -> None:
    task = resolve(files=[preset]).config.task
    told = msgspec.msgpack.decode(msgspec.msgpack.encode(without_defaults(task)), type=TaskConfig)
    assert told == task
    assert task_hash(told) == task_hash(task)
