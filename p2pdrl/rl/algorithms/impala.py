"""IMPALA: actor-critic with V-trace targets (Espeholt 2018, arXiv 1802.01561, section 4).

``trainer`` calls ``update`` once per unroll; each unroll is one batch and one step. The policy that made it
may be some updates old: V-trace weights what it did by how likely the current policy is to do it. For that it
needs the current policy's log-probabilities and values of the whole unroll. They come from the forward pass
that is differentiated, so targets are made inside the objective; its rows are environments, each with all its
steps and the bootstrap observation, and batches may be cut between any two of them.

Shape suffixes: T unroll, B environments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from p2pdrl.config.task import ImpalaConfig
from p2pdrl.rl.algorithms.algorithm import Algorithm, Loss, rmsprop_or_adam
from p2pdrl.rl.algorithms.batches import whole_unrolls
from p2pdrl.rl.algorithms.returns import vtrace
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import VALID, GradientEngine, Summed
from p2pdrl.rl.rollout import Unroll

__all__ = ["Impala", "ImpalaObjective"]


@dataclass(frozen=True)
class ImpalaObjective(Summed):
    """Policy gradient, value error and entropy bonus of section 4.2, with targets by V-trace.

    Outputs are those of T+1 observations, environments first. Targets are of T steps: ``actions``,
    ``log_probs`` of the policy that acted, ``rewards``, ``discounts`` (zero where the episode terminated),
    ``continues`` (zero where the next row belongs to another episode), and the mask.

    The paper sums losses over the steps of a batch; here they are means over its valid steps, as in the other
    algorithms.

    Attributes:
        rho_clip: ρ̄, of temporal differences; None doesn't clip, nor in the next two.
        c_clip: c̄, of traces.
        pg_rho_clip: of the policy gradient.
        lambda_: λ of traces.
    """

    target_names: ClassVar[tuple[str, ...]] = ("actions", "log_probs", "rewards", "discounts", "continues")
    terms: ClassVar[int] = 5

    rho_clip: float | None
    c_clip: float | None
    pg_rho_clip: float | None
    lambda_: float
    value_coef: float
    entropy_coef: float

    def __call__(self, outputs: PolicyOutputs, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: policy loss, value loss, entropy, KL, min(1, ρ); all summed."""
        policy = outputs.distribution((slice(None), slice(None, -1)))
        log_probs_BT, values_BT = policy.log_prob(targets["actions"]), outputs.values[:, :-1]

        # at steps that don't count any finite weight will do
        log_ratios_BT = (log_probs_BT.detach() - targets["log_probs"]).where(targets[VALID], 0.0)
        corrected = vtrace(
            log_ratios_BT.T,
            targets["rewards"].T,
            outputs.values.detach().T,
            targets["discounts"].T,
            targets["continues"].T,
            rho_clip=self.rho_clip,
            c_clip=self.c_clip,
            pg_rho_clip=self.pg_rho_clip,
            lambda_=self.lambda_,
        )
        policy_loss = -self.total(corrected.advantages_TB.T * log_probs_BT, targets)
        value_loss = 0.5 * self.total((corrected.values_TB.T - values_BT).square(), targets)
        entropy = self.total(policy.entropy(targets["actions"]), targets)
        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy

        with torch.no_grad():
            ratios_BT = log_ratios_BT.exp()
            # KL(μ‖π) = E[ρ − 1 − log ρ] over μ's actions (the estimator of Schulman 2020)
            kl = self.total(ratios_BT - 1.0 - log_ratios_BT, targets)
            rho = self.total(ratios_BT.clamp(max=1.0), targets)
        return loss, torch.stack((policy_loss, value_loss, entropy, kl, rho)).detach()


class Impala(Algorithm[Unroll]):
    """One gradient step per unroll along V-trace's policy gradient; one loss, by RMSProp or Adam."""

    def __init__(self, config: ImpalaConfig, flat: FlatModule, engine: GradientEngine[PolicyOutputs]) -> None:
        self._config = config
        objective = ImpalaObjective(
            rho_clip=config.rho_clip,
            c_clip=config.c_clip,
            pg_rho_clip=config.pg_rho_clip,
            lambda_=config.lambda_,
            value_coef=config.value_coef,
            entropy_coef=config.entropy_coef,
        )
        rule = rmsprop_or_adam(config.optimizer, config.rmsprop_alpha, config.rmsprop_eps)
        self._loss = Loss(objective, rule, flat, engine, max_grad_norm=config.max_grad_norm)
        self.losses = (self._loss,)

    def update(self, batch: Unroll) -> dict[str, float]:
        """Improve the policy on one unroll, in place, and return what the monitors plot.

        ``rho`` is the mean of min(1, π/μ): 1 on-policy, less the further π is from the policy that acted.
        """
        config, unroll = self._config, batch
        learning_rate = self.learning_rate(config.learning_rate, config.anneal)
        dtype = unroll.rewards_TB.dtype
        targets = {
            "actions": unroll.actions,
            "log_probs": unroll.log_probs_TB,
            "rewards": unroll.rewards_TB,
            "discounts": config.discount * (~unroll.terminated_TB).to(dtype),
            "continues": (~unroll.ends_TB).to(dtype),
        }
        terms, norm = self._loss.step(whole_unrolls(unroll, targets), learning_rate)
        finite = math.isfinite(norm)
        policy_loss, value_loss, entropy, kl, rho = terms.tolist()
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": kl,
            "rho": rho,
            "gradient_norm": norm if finite else 0.0,
            "learning_rate": learning_rate,
            "gradient_steps": float(finite),
            "skipped_steps": float(not finite),
        }
