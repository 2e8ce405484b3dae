"""Advantage actor-critic, the synchronous form of A3C (Mnih 2016, arXiv 1602.01783, section 4, algorithm S3).

``trainer`` calls ``update`` once per unroll; each unroll is one batch and one step.

A3C is this update made by several learners that don't wait for each other: see ``config/a3c.toml``. Its
equations sum over an unroll what is a mean here; RMSProp divides that factor out, and A3C's ε for sums over n
steps is ``rmsprop_eps`` = ε / n² under the root (``rmsprop_eps_in_root``). One difference is left: unrolls of
A3C end with the episode, while here they go on into the next one.

Shape suffixes: T unroll, B environments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from p2pdrl.config.task import A2CConfig
from p2pdrl.rl.algorithms.algorithm import Algorithm, Loss, rmsprop_or_adam
from p2pdrl.rl.algorithms.batches import full_batch, normalized
from p2pdrl.rl.algorithms.returns import gae
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine, Summed
from p2pdrl.rl.rollout import Unroll

__all__ = ["A2C", "A2CObjective"]


@dataclass(frozen=True)
class A2CObjective(Summed):
    """Policy gradient with a baseline, value error and entropy bonus.

    Targets: ``actions``, ``advantages``, ``returns``.
    """

    target_names: ClassVar[tuple[str, ...]] = ("actions", "advantages", "returns")
    terms: ClassVar[int] = 3

    value_coef: float
    entropy_coef: float

    def __call__(self, outputs: PolicyOutputs, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: policy loss, value loss, entropy; all summed."""
        policy = outputs.distribution()
        policy_loss = -self.total(targets["advantages"] * policy.log_prob(targets["actions"]), targets)
        value_loss = 0.5 * self.total((outputs.values - targets["returns"]).square(), targets)
        entropy = self.total(policy.entropy(targets["actions"]), targets)
        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        return loss, torch.stack((policy_loss, value_loss, entropy)).detach()


class A2C(Algorithm[Unroll]):
    """One gradient step per unroll along the policy gradient; one loss, by RMSProp or Adam."""

    def __init__(self, config: A2CConfig, flat: FlatModule, engine: GradientEngine[PolicyOutputs]) -> None:
        self._config = config
        objective = A2CObjective(config.value_coef, config.entropy_coef)
        rule = rmsprop_or_adam(
            config.optimizer, config.rmsprop_alpha, config.rmsprop_eps, eps_in_root=config.rmsprop_eps_in_root
        )
        self._loss = Loss(objective, rule, flat, engine, max_grad_norm=config.max_grad_norm)
        self.losses = (self._loss,)

    def update(self, batch: Unroll) -> dict[str, float]:
        """Improve the policy on one unroll, in place, and return what the monitors plot."""
        config, unroll = self._config, batch
        learning_rate = self.learning_rate(config.learning_rate, config.anneal)
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
        targets = {"actions": unroll.actions, "advantages": advantages_TB, "returns": returns_TB}
        terms, norm = self._loss.step(full_batch(unroll, targets), learning_rate)
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
