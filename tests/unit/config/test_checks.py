"""Combinations that make no sense are refused, with the key to change and its origin."""

from __future__ import annotations

import pytest

from p2pdrl.config.checks import problems, task_problems
from p2pdrl.config.loader import resolve
from p2pdrl.config.root import Config
from p2pdrl.config.task import EnvConfig, PPOConfig, TaskConfig
from p2pdrl.errors import ConfigError


def test_the_default_breaks_no_rule() -> None:
    assert problems(Config()) == []


@pytest.mark.parametrize(
    ("sets", "key"),
    [
        (["task.algorithm.unroll_steps=1", "task.env.num_envs=3"], "task.algorithm.minibatches (by default)"),
        (
            ["task.algorithm.unroll_steps=1", "task.env.num_envs=1", "task.algorithm.minibatches=1"],
            "task.algorithm.normalize_advantages",
        ),
        (["task.algorithm.anneal=linear"], "task.algorithm.anneal (in --set)"),
        (["task.algorithm.name=a2c", "task.algorithm.anneal=linear"], "task.algorithm.anneal"),
        (["task.strategy.every_updates=0"], "task.strategy.every_updates"),
        (["node.learner.restart_min_s=60"], "node.learner.restart_min_s"),
        (["task.algorithm.name=regression", "task.algorithm.anneal=linear"], "task.algorithm.anneal"),
        (
            ["task.algorithm.name=regression", "task.algorithm.features=1000000"],
            "task.algorithm.features (in --set)",
        ),
    ],
)
def test_rules(sets: list[str], key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(sets=sets)
    assert str(caught.value).startswith(key)


@pytest.mark.parametrize(
    "sets",
    [
        ["task.algorithm.anneal=linear", "task.stop.env_steps=1000"],
        ["task.strategy.every_updates=0", "task.strategy.every_s=1"],
        ["task.strategy.name=local"],
        ["task.algorithm.name=a2c", "task.env.num_envs=1", "task.algorithm.unroll_steps=1"],
        ["task.algorithm.name=regression", "task.env.num_envs=1"],
        [
            "task.algorithm.name=regression",
            "task.algorithm.features=10000000",
            "task.algorithm.rows=16",
            "task.algorithm.batch_size=16",
        ],
    ],
)
def test_what_the_rules_let_pass(sets: list[str]) -> None:
    resolve(sets=sets)


def test_a_received_task_can_be_checked_alone() -> None:
    task = TaskConfig(env=EnvConfig(num_envs=1), algorithm=PPOConfig(unroll_steps=2, minibatches=4))
    assert [problem.key for problem in task_problems(task)] == ["task.algorithm.minibatches"]
