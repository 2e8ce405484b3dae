"""Rules that no single key can break: combinations that make no sense together.

`loader` applies them to what it has merged; a node applies `task_problems` to a task that it
receives from its swarm, before it starts anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from p2pdrl.config.node import NodeConfig
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import AdpsgdConfig, StrategyConfig
from p2pdrl.config.task import PPOConfig, TaskConfig

__all__ = ["Problem", "problems", "task_problems"]


class Problem(msgspec.Struct, frozen=True):
    """A broken rule: the key to change first, and what is wrong, in words."""

    key: str
    message: str


def problems(config: Config) -> list[Problem]:
    """Every rule that ``config`` breaks."""
    return [*task_problems(config.task), *_node_problems(config.node)]


def task_problems(task: TaskConfig) -> Iterator[Problem]:
    """Every rule that ``task`` breaks."""
    algorithm = task.algorithm
    batch = task.env.num_envs * algorithm.unroll_steps
    steps = f"env.num_envs × algorithm.unroll_steps = {batch} steps"
    if isinstance(algorithm, PPOConfig) and algorithm.minibatches > batch:
        yield Problem(
            "task.algorithm.minibatches",
            f"{algorithm.minibatches} minibatches can't be cut from {steps}; lower it, or gather more steps",
        )
    if algorithm.normalize_advantages and batch < 2:
        yield Problem(
            "task.algorithm.normalize_advantages",
            f"a batch of {steps} has no deviation to divide by; turn it off, or gather more steps",
        )
    if algorithm.anneal == "linear" and task.stop.env_steps == 0:
        yield Problem(
            "task.algorithm.anneal",
            "linear lowers the learning rate until task.stop.env_steps, so it must be set",
        )
    yield from _strategy_problems(task.strategy)


def _strategy_problems(strategy: StrategyConfig) -> Iterator[Problem]:
    if not isinstance(strategy, AdpsgdConfig):
        return
    if strategy.every_updates == 0 and strategy.every_s == 0:
        yield Problem(
            "task.strategy.every_updates",
            "with this and every_s both 0 no exchange ever begins; set one, or task.strategy.name = local",
        )


def _node_problems(node: NodeConfig) -> Iterator[Problem]:
    learner = node.learner
    if learner.restart_min_s > learner.restart_max_s:
        yield Problem(
            "node.learner.restart_min_s",
            f"{learner.restart_min_s:g} s is beyond restart_max_s = {learner.restart_max_s:g} s",
        )
