"""Advantage actor-critic, the synchronous form of A3C (Mnih 2016, arXiv 1602.01783, algorithm S3).

``trainer`` calls ``update`` once per unroll; each unroll is one batch and one step.

Shape suffixes: T unroll, T1 unroll with the bootstrap step, B environments, X the observation's own
dimensions, N valid steps of the batch.
"""

from __future__ import annotations

import math

import torch

from p2pdrl.config.task import A2CConfig
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.optimizers import Adam, Optimizer, RMSProp
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.returns import gae
from p2pdrl.rl.rollout import Unroll
from p2pdrl.rl.stepping import OwnStepper, Stepper

__all__ = ["A2C"]


class A2C:
    """One gradient step per unroll along the policy gradient.

    Args:
        config: every field explains itself there.
        flat: the policy's parameters, stepped in place.
        policy: the module that ``flat`` holds.

    Attributes:
        optimizer: RMSProp or Adam; its state travels in the sidecar.
        progress: 0 … 1, how far the swarm is; lowers the learning rate where that is annealed.
        stepper: gets the gradient of each unroll; may be replaced between updates.
    """

    def __init__(self, config: A2CConfig, flat: FlatModule, policy: ActorCritic) -> None:
        self._config = config
        self._flat = flat
        self._policy = policy
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
        valid_TB = unroll.valid_TB
        advantages_N = advantages_TB[valid_TB]
        returns_N = advantages_N + unroll.values_T1B[:-1][valid_TB]
        if config.normalize_advantages:
            advantages_N = (advantages_N - advantages_N.mean()) / (advantages_N.std(correction=0) + 1e-8)

        log_probs_N, entropy_N, values_N = self._policy.evaluate(
            unroll.obs_T1BX[:-1][valid_TB], unroll.actions[valid_TB]
        )
        policy_loss = -(advantages_N * log_probs_N).mean()
        value_loss = 0.5 * (values_N - returns_N).square().mean()
        entropy = entropy_N.mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        self._flat.gradients_D.zero_()
        loss.backward()  # type: ignore[no-untyped-call]
        norm = self.stepper.step(
            self._flat,
            self.optimizer,
            learning_rate=learning_rate,
            max_grad_norm=config.max_grad_norm,
            samples=len(advantages_N),
        )
        finite = math.isfinite(norm)

        return {
            "policy_loss": float(policy_loss.detach()),
            "value_loss": float(value_loss.detach()),
            "entropy": float(entropy.detach()),
            "gradient_norm": norm if finite else 0.0,
            "learning_rate": learning_rate,
            "gradient_steps": float(finite),
            "skipped_steps": float(not finite),
        }
