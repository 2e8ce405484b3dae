"""Rules that no single key can break: combinations that make no sense together.

`loader` applies them to what it has merged; a node applies `task_problems` to a task that it
receives from its swarm, before it starts anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from p2pdrl.config.batches import minibatch_rows
from p2pdrl.config.node import LearnerConfig, NodeConfig
from p2pdrl.config.pipeline_checks import idle_keys, pipeline_problems
from p2pdrl.config.problem import Problem
from p2pdrl.config.root import Config
from p2pdrl.config.strategy import (
    GradAverageConfig,
    HogwildConfig,
    ParamAverageConfig,
    PipelineConfig,
    StrategyConfig,
)
from p2pdrl.config.strategy_checks import strategy_problems
from p2pdrl.config.task import A2CConfig, NetworkConfig, PPOConfig, RegressionConfig, TaskConfig

__all__ = ["Problem", "mode_problems", "problems", "task_problems", "trust_problems"]

MAX_DATA_NUMBERS = 1 << 28
"""What a regression's made-up rows may come to: every node of the swarm holds them in memory."""


def problems(config: Config) -> list[Problem]:
    """Every rule that ``config`` breaks."""
    task, learner = config.task, config.node.learner
    idle = list(idle_keys(task.strategy, learner))
    said = {problem.key for problem in idle}
    gradients = [*_parts_problems(task, learner), *_split_problems(learner)]
    return [
        *_fixed_problems(task),
        *mode_problems(task, config.node),
        *_node_problems(config.node),
        *_actor_problems(task, config.node),
        *_role_problems(task, config.node),
        *(problem for problem in gradients if problem.key not in said),
        *idle,
    ]


def mode_problems(task: TaskConfig, node: NodeConfig) -> Iterator[Problem]:
    """Every rule that keeps the strategy of ``task`` from working for it, or on ``node``."""
    yield from _strategy_problems(task)
    yield from trust_problems(task.strategy, trusted_network=node.trusted_network)
    if node.learner.split_devices:
        yield from _no_split(task.strategy)


def task_problems(task: TaskConfig) -> Iterator[Problem]:
    """Every rule that ``task`` breaks."""
    yield from _fixed_problems(task)
    yield from _strategy_problems(task)


def _strategy_problems(task: TaskConfig) -> Iterator[Problem]:
    """Its strategy's rules, alone and with the rest of the task."""
    yield from strategy_problems(task.strategy)
    yield from pipeline_problems(task)


def _fixed_problems(task: TaskConfig) -> Iterator[Problem]:
    """Rules among what a live swarm can't change."""
    if isinstance(task.algorithm, RegressionConfig):
        yield from _regression_problems(task.algorithm)
    else:
        yield from _batch_problems(task.algorithm, task.env.num_envs)
        yield from _network_problems(task.network)
        yield from _memory_problems(task)
    if task.algorithm.anneal == "linear" and task.stop.env_steps == 0:
        yield Problem(
            "task.algorithm.anneal",
            "linear lowers the learning rate until task.stop.env_steps, so it must be set",
        )


def _batch_problems(algorithm: PPOConfig | A2CConfig, num_envs: int) -> Iterator[Problem]:
    batch = num_envs * algorithm.unroll_steps
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


def _network_problems(network: NetworkConfig) -> Iterator[Problem]:
    if network.kind == "transformer" and network.width % network.heads:
        yield Problem(
            "task.network.heads",
            f"{network.heads} heads can't share a width of {network.width} equally; "
            "width must be a multiple of heads",
        )
    if network.kind == "impala_resnet" and not network.channels:
        yield Problem(
            "task.network.channels", "a ResNet has one section at least; the paper has [16, 32, 32]"
        )


def _memory_problems(task: TaskConfig) -> Iterator[Problem]:
    """Whole unrolls of an environment go into one minibatch where the policy remembers."""
    algorithm, envs = task.algorithm, task.env.num_envs
    if task.network.core != "none" and isinstance(algorithm, PPOConfig) and algorithm.minibatches > envs:
        yield Problem(
            "task.algorithm.minibatches",
            f"a policy with a memory learns from whole unrolls: {envs} environments can't be cut into "
            f"{algorithm.minibatches} minibatches; lower it, or raise env.num_envs",
        )


def _regression_problems(algorithm: RegressionConfig) -> Iterator[Problem]:
    classes = algorithm.classes if algorithm.kind == "classifier" else 1
    numbers = algorithm.features * max(algorithm.rows, algorithm.batch_size, classes)
    if numbers > MAX_DATA_NUMBERS:
        yield Problem(
            "task.algorithm.features",
            f"rows, batch or classes of {algorithm.features} features come to {numbers} numbers, more than "
            f"{MAX_DATA_NUMBERS} (1 GiB); lower it, or rows, batch_size or classes",
        )


def trust_problems(strategy: StrategyConfig, *, trusted_network: bool) -> Iterator[Problem]:
    """What ``strategy`` wants of this machine's network and may not have."""
    if trusted_network:
        return
    if isinstance(strategy, GradAverageConfig | ParamAverageConfig | PipelineConfig):
        other = "stream" if isinstance(strategy, PipelineConfig) else "own"
        if strategy.backend == "torch":
            yield Problem(
                "task.strategy.backend",
                "torch.distributed listens without authentication; where everybody who reaches this machine "
                f"may be trusted set node.trusted_network = true on each node, else take backend = {other}",
            )


def _parts_problems(task: TaskConfig, learner: LearnerConfig) -> Iterator[Problem]:
    """More parts than rows; a node that was given no task may join any swarm, and cuts as far as it can."""
    if task == TaskConfig() or learner.microbatches == "auto":
        return
    most, what = minibatch_rows(task)
    if learner.microbatches > most:
        yield Problem(
            "node.learner.microbatches",
            f"{learner.microbatches} parts can't be cut from the {most} {what} of a gradient; "
            f"take {most} at most, or auto",
        )


def _split_problems(learner: LearnerConfig) -> Iterator[Problem]:
    """A network over several devices of this node, and what doesn't go with it."""
    devices, cuts = learner.split_devices, learner.split_cuts
    if cuts and len(cuts) != len(devices) - 1:
        yield Problem(
            "node.learner.split_cuts",
            f"{len(devices)} split_devices have {max(len(devices) - 1, 0)} cuts between them, "
            f"not {len(cuts)}",
        )
    elif any(one >= other for one, other in itertools.pairwise(cuts)):
        yield Problem("node.learner.split_cuts", f"numbers of blocks must rise, not be {list(cuts)}")
    if not devices:
        return
    if len(devices) < 2:
        yield Problem(
            "node.learner.split_devices",
            f"one device is no split; name two at least, or set node.learner.device = {devices[0]}",
        )
    if learner.device not in ("auto", devices[0]):
        yield Problem(
            "node.learner.device",
            f"the first of split_devices is {devices[0]}, and experience is collected there; leave this auto",
        )


def _no_split(strategy: StrategyConfig) -> Iterator[Problem]:
    """Why several devices don't go with a strategy."""
    if isinstance(strategy, HogwildConfig | PipelineConfig):
        why = (
            "under hogwild each learner of this machine has a device for itself"
            if isinstance(strategy, HogwildConfig)
            else "under pipeline each peer has one part of the network, on one device"
        )
        yield Problem("node.learner.split_devices", f"{why}; leave it empty, or take another strategy")


def _actor_problems(task: TaskConfig, node: NodeConfig) -> Iterator[Problem]:
    """More actors than environments; a node given no task may join any swarm, and takes fewer then."""
    count = node.actors.count
    if task == TaskConfig() or count == "auto" or not count:
        return
    if isinstance(task.algorithm, RegressionConfig):
        yield Problem("node.actors.count", "a regression has no environments to act in; leave it 0")
    elif count > task.env.num_envs:
        yield Problem(
            "node.actors.count",
            f"{count} actors can't share task.env.num_envs = {task.env.num_envs} environments; "
            "lower it, or raise that",
        )


def _role_problems(task: TaskConfig, node: NodeConfig) -> Iterator[Problem]:
    """Roles that can't be played; none named are all that the task needs."""
    key, roles = "node.roles", node.roles
    if not roles:
        return
    if len(set(roles)) < len(roles):
        yield Problem(key, f"{', '.join(roles)}: one of them is named twice")
    if "replay" in roles:
        yield Problem(key, "no algorithm here has a replay that could be held for others; leave it out")
    if "learner" not in roles:
        yield Problem(key, "experience doesn't travel between nodes yet, so every node learns; add learner")
    elif "actor" not in roles and not isinstance(task.algorithm, RegressionConfig):
        yield Problem(key, "a learner needs experience, and only its own node's reaches it; add actor")


def _node_problems(node: NodeConfig) -> Iterator[Problem]:
    learner = node.learner
    if learner.activation_limit_bytes and learner.microbatches != "auto":
        yield Problem(
            "node.learner.activation_limit_bytes",
            "only microbatches = auto looks for a number of parts that keeps to it; set that, or leave it 0",
        )
    if learner.restart_min_s > learner.restart_max_s:
        yield Problem(
            "node.learner.restart_min_s",
            f"{learner.restart_min_s:g} s is beyond restart_max_s = {learner.restart_max_s:g} s",
        )
