"""Advantage actor-critic, the synchronous form of A3C (Mnih 2016, arXiv 1602.01783, algorithm S3).

``trainer`` calls ``update`` once per unroll; each unroll is one batch and one step. The loss itself is
``objectives.a2c``.

Shape suffixes: T unroll, B environments.
"""

from __future__ import annotations

import math

import torch

from p2pdrl.config.task import A2CConfig
from p2pdrl.rl.algorithms.batches import full_batch, normalized
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine
from p2pdrl.rl.objectives.a2c import A2CObjective
from p2pdrl.rl.optimizers import Adam, Optimizer, RMSProp
from p2pdrl.rl.outputs import PolicyOutputs
from p2pdrl.rl.returns import gae
from p2pdrl.rl.rollout import Unroll
from p2pdrl.rl.stepping import OwnStepper, Stepper

__all__ = ["A2C"]


class A2C:
    """One gradient step per unroll along the policy gradient.

    Args:
        config: every field explains itself there.
        flat: the policy's parameters, stepped in place.
        engine: computes the gradient of each unroll.

    Attributes:
        objective: what is minimised.
        optimizer: RMSProp or Adam; its state travels in the sidecar.
        progress: 0 … 1, how far the swarm is; lowers the learning rate where that is annealed.
        engine: as given; may be replaced between updates.
        stepper: gets the gradient of each unroll; may be replaced between updates.
    """

    def __init__(self, config: A2CConfig, flat: FlatModule, engine: GradientEngine[PolicyOutputs]) -> None:
        self._config = config
        self._flat = flat
        self.objective = A2CObjective(config.value_coef, config.entropy_coef)
        self.engine = engine
        self.optimizer: Optimizer
        if config.optimizer == "adam":
            self.optimizer = Adam(flat.parameters_D, flat.gradients_D, config.rmsprop_eps)
        else:
            self.optimizer = RMSProp(
                flat.parameters_D, flat.gradients_D, config.rmsprop_alpha, config.rmsprop_eps
            )
        self.progress = 0.0
        self.stepper: Stepper = OwnStepper()

    def update(self, unroll: Unroll) -> dict[str, float]:
        """Improve the policy on one unroll, in place, and return what the monitors plot."""
        config = self._config
        learning_rate = config.learning_rate * (1.0 - self.progress if config.anneal == "linear" else 1.0)
        advantages_TB = gae(
            unroll.rewards_TB,
            unroll.values_T1B,
            config.discount * (~unroll.terminated_TB),
            config.gae_lambda,
            continues_TB=(~unroll.ends_TB).to(torch.float32),
        )
        returns_TB = advantages_TB + unroll.values_T1B[:-1]
        if config.normalize_advantages:
            advantages_TB = normalized(advantages_TB, unroll.valid_TB)
        batch = full_batch(
            unroll, {"actions": unroll.actions, "advantages": advantages_TB, "returns": returns_TB}
        )
        terms = self.engine.gradients(batch, self.objective)
        norm = self.stepper.step(
            self._flat,
            self.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=config.max_grad_norm,
            samples=batch.rows,
            left=0,
        )
        finite = math.isfinite(norm)
        policy_loss, value_loss, entropy = terms.tolist()
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "gradient_norm": norm if finite else 0.0,
            "learning_rate": learning_rate,
            "gradient_steps": float(finite),
            "skipped_steps": float(not finite),
        }
