"""From an algorithm's configuration to the algorithm.

``trainer`` builds through it. A new algorithm is one file beside this one and one line here.
"""

from __future__ import annotations

from typing import Protocol

import torch

from p2pdrl.config.task import A2CConfig, PPOConfig
from p2pdrl.rl.algorithms.a2c import A2C
from p2pdrl.rl.algorithms.ppo import PPO
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine
from p2pdrl.rl.objectives.objective import Objective
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.outputs import PolicyOutputs
from p2pdrl.rl.rollout import Unroll
from p2pdrl.rl.stepping import Stepper

__all__ = ["Algorithm", "build"]


class Algorithm(Protocol):
    """What a trainer asks of an algorithm.

    Attributes:
        progress: 0 … 1, how far the swarm is towards its last environment step.
        engine: computes the mean gradient of each minibatch; may be replaced between updates.
        stepper: gets each mean gradient, once per minibatch; may be replaced between updates.
    """

    progress: float
    engine: GradientEngine[PolicyOutputs]
    stepper: Stepper

    @property
    def objective(self) -> Objective[PolicyOutputs]:
        """What is minimised."""
        ...

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer, whose state travels in the sidecar."""
        ...

    def update(self, unroll: Unroll) -> dict[str, float]:
        """Improve the policy on one unroll, in place, and return what the monitors plot."""
        ...


def build(
    config: PPOConfig | A2CConfig,
    flat: FlatModule,
    engine: GradientEngine[PolicyOutputs],
    generator: torch.Generator,
) -> Algorithm:
    """Return the algorithm that ``config`` names, working on ``flat`` in place."""
    if isinstance(config, PPOConfig):
        return PPO(config, flat, engine, generator)
    return A2C(config, flat, engine)
