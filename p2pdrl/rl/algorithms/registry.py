"""Builds an algorithm from its configuration.

`rl.registry.build_trainer` builds through it. A new algorithm is one file beside this one, its
configuration, and one line in `ALGORITHMS`; code outside of this package calls `register`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch

from p2pdrl.config.task import (
    A2CConfig,
    AlgorithmOptions,
    DDPGConfig,
    DiscreteSACConfig,
    DQNConfig,
    ImpalaConfig,
    NetworkConfig,
    NStepQConfig,
    OneStepQConfig,
    OneStepSarsaConfig,
    PPOConfig,
    SACConfig,
    TaskConfig,
    TD3Config,
)
from p2pdrl.errors import ConfigError
from p2pdrl.rl.actor_critic_q import (
    CategoricalActorCritic,
    DeterministicActorCritic,
    SquashedGaussianActorCritic,
)
from p2pdrl.rl.algorithms.a2c import A2C
from p2pdrl.rl.algorithms.algorithm import Algorithm
from p2pdrl.rl.algorithms.ddpg import DDPG
from p2pdrl.rl.algorithms.dqn import DQN
from p2pdrl.rl.algorithms.impala import Impala
from p2pdrl.rl.algorithms.online_q import OnlineQ
from p2pdrl.rl.algorithms.ppo import PPO
from p2pdrl.rl.algorithms.sac import SAC
from p2pdrl.rl.algorithms.sac_discrete import DiscreteSAC
from p2pdrl.rl.algorithms.td3 import TD3
from p2pdrl.rl.envs import EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, GradientEngine
from p2pdrl.rl.policy import ActorCritic, Policy
from p2pdrl.rl.q_network import QNetwork

__all__ = ["AlgorithmContext", "AlgorithmEntry", "entry_of", "register"]


@dataclass(frozen=True)
class AlgorithmContext:
    """What an algorithm is made from.

    An actor-critic with two losses says their spans as ``flat.span(*policy.actor_parts)`` and
    ``flat.span(*policy.critic_parts)``.

    Attributes:
        config: ``task.algorithm``.
        engine: computes gradients through ``policy.outputs``.
        engine_for: makes an engine for a loss that runs the model in another way.
        generator: of everything random, on the parameters' device.
    """

    config: Any
    policy: Policy
    flat: FlatModule
    engine: GradientEngine[Any]
    engine_for: Callable[[Forward[Any]], GradientEngine[Any]]
    generator: torch.Generator


@dataclass(frozen=True)
class AlgorithmEntry:
    """How an algorithm that acts in environments is built.

    Attributes:
        build: makes it.
        network: makes the policy from spaces, shape and seed, in learners and in actor processes.
    """

    build: Callable[[AlgorithmContext], Algorithm[Any]]
    network: Callable[[EnvSpec, NetworkConfig, int | None], Policy] = ActorCritic

    def policy(self, spec: EnvSpec, task: TaskConfig, *, drawn: bool = True) -> Policy:
        """Return a task's policy as it is drawn; or with all parameters on the meta device."""
        policy = self.network(spec, task.network, task.seed if drawn else None)
        if isinstance(task.algorithm, AlgorithmOptions):
            policy.configure(task.algorithm)
        return policy


_ONLINE_Q = AlgorithmEntry(lambda made: OnlineQ(made.config, made.policy, made.flat, made.engine), QNetwork)


def _ddpg(made: AlgorithmContext) -> DDPG:
    policy = cast("DeterministicActorCritic", made.policy)
    return DDPG(made.config, policy, made.flat, made.engine_for)


def _td3(made: AlgorithmContext) -> TD3:
    policy = cast("DeterministicActorCritic", made.policy)
    return TD3(made.config, policy, made.flat, made.engine_for, made.generator)


def _sac(made: AlgorithmContext) -> SAC:
    policy = cast("SquashedGaussianActorCritic", made.policy)
    return SAC(made.config, policy, made.flat, made.engine_for, made.generator)


def _sac_discrete(made: AlgorithmContext) -> DiscreteSAC:
    policy = cast("CategoricalActorCritic", made.policy)
    return DiscreteSAC(made.config, policy, made.flat, made.engine_for)


ALGORITHMS: dict[type, AlgorithmEntry] = {
    PPOConfig: AlgorithmEntry(lambda made: PPO(made.config, made.flat, made.engine, made.generator)),
    A2CConfig: AlgorithmEntry(lambda made: A2C(made.config, made.flat, made.engine)),
    DQNConfig: AlgorithmEntry(
        lambda made: DQN(made.config, made.policy, made.flat, made.engine, made.generator), QNetwork
    ),
    ImpalaConfig: AlgorithmEntry(lambda made: Impala(made.config, made.flat, made.engine)),
    NStepQConfig: _ONLINE_Q,
    OneStepQConfig: _ONLINE_Q,
    OneStepSarsaConfig: _ONLINE_Q,
    DDPGConfig: AlgorithmEntry(_ddpg, partial(DeterministicActorCritic, critics=1)),
    TD3Config: AlgorithmEntry(_td3, partial(DeterministicActorCritic, critics=2)),
    SACConfig: AlgorithmEntry(_sac, SquashedGaussianActorCritic),
    DiscreteSACConfig: AlgorithmEntry(_sac_discrete, CategoricalActorCritic),
}
"""By the type of ``task.algorithm``, which has ``unroll_steps`` and ``discount``."""


def register(config: type, entry: AlgorithmEntry) -> None:
    """Add an algorithm, by the type of its configuration; in every process that builds it."""
    ALGORITHMS[config] = entry


def entry_of(config: object) -> AlgorithmEntry:
    """Return how the algorithm of a task is built.

    Raises:
        ConfigError: it acts in no environment, or nobody registered it.
    """
    entry = ALGORITHMS.get(type(config))
    if entry is None:
        raise ConfigError(f"{type(config).__name__} has neither environment nor policy")
    return entry
