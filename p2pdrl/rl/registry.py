"""Builds the trainer of a task."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch

from p2pdrl.config.task import OneStepSarsaConfig, RegressionConfig, ReplayOptions, TaskConfig
from p2pdrl.rl.actor_critic_q import DeterministicActorCritic
from p2pdrl.rl.algorithms.algorithm import Loss
from p2pdrl.rl.algorithms.registry import AlgorithmContext, entry_of
from p2pdrl.rl.algorithms.regression import (
    Regression,
    RegressionEvaluation,
    regression_layers,
    regression_model,
)
from p2pdrl.rl.engines import (
    DEFAULT,
    EngineOptions,
    in_precision,
    make_engine,
    module_forward,
    policy_forward,
    resolve_device,
)
from p2pdrl.rl.envs import EnvSpec, make_vector_env
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.imports import require_allowed
from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer, observation_normalizer
from p2pdrl.rl.pipeline.messages import RowSpec
from p2pdrl.rl.pipeline.parts import ModelParts, joint_parts, module_parts, policy_parts
from p2pdrl.rl.policy import Policy
from p2pdrl.rl.rollout import Collector
from p2pdrl.rl.sources.replay import ReplayFeeder, TransitionScaler, replay_memory, sample_spec
from p2pdrl.rl.sources.rows import RowSource, make_rows
from p2pdrl.rl.sources.source import BatchT, Source
from p2pdrl.rl.sources.unrolls import (
    InlineSource,
    OverlappingUnrolls,
    RewardClipper,
    UnrollReader,
    UnrollScaler,
)
from p2pdrl.rl.trainer import Trainer

__all__ = ["RolloutContext", "SourceMaker", "build_trainer"]


@dataclass(frozen=True)
class RolloutContext(Generic[BatchT]):
    """What a source of unrolls is made from.

    Attributes:
        reader: makes a batch of each.
        replay: the memory behind it, where the algorithm has one.
        normalizer: of observations; None where the task doesn't normalise them.
    """

    task: TaskConfig
    spec: EnvSpec
    policy: Policy
    flat: FlatModule
    reader: UnrollReader[BatchT]
    normalizer: RunningNormalizer | None
    replay: ReplayFeeder | None = None


SourceMaker = Callable[[RolloutContext[Any]], Source[Any]]


@dataclass(frozen=True)
class _Options:
    """What this machine chose; see ``build_trainer``."""

    seed: int
    device: torch.device
    allow_import: bool
    step_delay_s: float
    engine: EngineOptions
    source: SourceMaker | None
    streams: int | None
    clock: Callable[[], float]
    sleep: Callable[[float], None]


def build_trainer(
    task: TaskConfig,
    seed: int,
    device: str = "auto",
    *,
    allow_import: bool = False,
    step_delay_s: float = 0.0,
    engine: EngineOptions = DEFAULT,
    source: SourceMaker | None = None,
    streams: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], None] = time.sleep,
) -> Trainer:
    """Return the trainer of a task.

    Args:
        task: the swarm's task; its seed gives the initial weights, equal on every node.
        seed: of this learner: its environments, actions, shuffles and batches.
        device: ``cpu``, ``cuda``, ``cuda:1`` … or ``auto``, which takes a GPU where there is one.
        allow_import: permit that the task imports its own ``module:name``.
        step_delay_s: seconds slept at each step of the environments, or at each update of a regression.
        engine: how this node computes its gradients.
        source: makes the source of unrolls; None has the environments in this process. A regression has its
            own.
        streams: environments that unrolls may come from, which may be more than the task's; None stands for
            those.
        clock: seconds, monotonic.
        sleep: waits for so many seconds.

    Raises:
        ConfigError: the task can't be run here as configured.
    """
    require_allowed(task, allow_import=allow_import)
    options = _Options(
        seed, resolve_device(device), allow_import, step_delay_s, engine, source, streams, clock, sleep
    )
    if isinstance(task.algorithm, RegressionConfig):
        trainer = _regression_trainer(task, task.algorithm, options)
    else:
        trainer = _policy_trainer(task, task.algorithm, options)
    if engine.split_devices:
        trainer.split(engine)
    return trainer


def _regression_trainer(task: TaskConfig, config: RegressionConfig, options: _Options) -> Trainer:
    device = options.device
    train, evaluation = make_rows(config, task.seed)
    flat = FlatModule(regression_model(config, task.seed), device)
    layers = regression_layers(flat.module)
    precision = task.gradients.precision
    forward = module_forward(layers, precision, checkpoint_activations=options.engine.checkpoint_activations)
    source = RowSource(config, options.seed, train, device)

    def parts(loss: Loss[Any]) -> ModelParts[Any]:
        classes = config.classes if config.kind == "classifier" else None
        return module_parts(
            flat.module,
            layers,
            loss.objective,
            loss.optimizer,
            inputs=RowSpec(tuple(source.inputs_RF.shape[1:]), source.inputs_RF.dtype),
            targets=RowSpec((), source.targets_R.dtype, classes),
            most_rows=config.batch_size,
            precision=precision,
        )

    engine = make_engine(options.engine, flat, forward, precision)
    algorithm = Regression(
        config, flat, engine, delay_s=options.step_delay_s, clock=options.clock, sleep=options.sleep
    )
    judge = RegressionEvaluation(config, flat.module, evaluation, device)
    return Trainer(flat, algorithm, source, parts=parts, evaluation=judge, clock=options.clock)


def _policy_trainer(task: TaskConfig, config: Any, options: _Options) -> Trainer:
    device = options.device
    entry = entry_of(config)
    words = np.random.SeedSequence(options.seed).generate_state(3)
    env_seed, action_seed, replay_seed = (int(word) for word in words)
    generator = torch.Generator(device).manual_seed(action_seed)
    env = make_vector_env(
        task.env,
        env_seed,
        allow_import=options.allow_import,
        step_delay_s=options.step_delay_s,
        sleep=options.sleep,
    )
    spec, num_envs = env.spec, task.env.num_envs
    streams = num_envs if options.streams is None else options.streams
    policy = entry.policy(spec, task)
    flat = FlatModule(policy, device)
    precision = task.gradients.precision
    forward = policy_forward(
        policy,
        precision,
        checkpoint_activations=options.engine.checkpoint_activations,
        whole_unrolls=config.whole_unrolls,
    )
    algorithm = entry.build(
        AlgorithmContext(
            config=config,
            policy=policy,
            flat=flat,
            engine=make_engine(options.engine, flat, forward, precision),
            engine_for=lambda run: make_engine(options.engine, flat, in_precision(run, precision), precision),
            generator=generator,
        )
    )

    statistics: dict[str, RunningNormalizer] = {}
    normalizer = reward_scaler = None
    if task.env.normalize_observations:
        normalizer = statistics["observations"] = observation_normalizer(spec)
    if task.env.normalize_returns:
        reward_scaler = RewardScaler(streams, config.discount)
        statistics["returns"] = reward_scaler.statistics
    reader: UnrollReader[Any]
    if isinstance(config, ReplayOptions):
        reader = ReplayFeeder(
            replay_memory(config, spec, streams),
            TransitionScaler(device, normalizer, reward_scaler, config.n_step),
            discount=config.discount,
            seed=replay_seed,
            samples=sample_spec(config, spec),
        )
    elif isinstance(config, OneStepSarsaConfig):
        reader = OverlappingUnrolls(device, streams, normalizer=normalizer, reward_scaler=reward_scaler)
    else:
        reader = UnrollScaler(device, normalizer=normalizer, reward_scaler=reward_scaler)
    replay = reader if isinstance(reader, ReplayFeeder) else None
    if task.env.clip_rewards:
        reader = RewardClipper(reader)
    source: Source[Any]
    if options.source is None:
        policy.act_as(0, num_envs, num_envs)
        collector = Collector(
            env, policy, config.unroll_steps, generator, normalizer=normalizer, precision=precision
        )
        source = InlineSource(collector, reader)
    else:
        env.close()
        source = options.source(RolloutContext(task, spec, policy, flat, reader, normalizer, replay))

    def parts(loss: Loss[Any]) -> ModelParts[Any]:
        if isinstance(policy, DeterministicActorCritic):
            return joint_parts(
                policy, loss.objective, loss.optimizer, most_rows=config.batch_size, precision=precision
            )
        environments = config.whole_unrolls or policy.initial_state(1) is not None
        return policy_parts(
            policy,
            loss.objective,
            loss.optimizer,
            steps=config.unroll_steps,
            most_rows=num_envs if environments else num_envs * config.unroll_steps,
            precision=precision,
            whole_unrolls=config.whole_unrolls,
        )

    return Trainer(
        flat,
        algorithm,
        source,
        statistics=statistics,
        policy=policy,
        parts=parts,
        replay=replay,
        clock=options.clock,
    )
