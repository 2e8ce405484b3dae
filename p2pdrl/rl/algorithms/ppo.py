"""Proximal policy optimization (Schulman 2017, arXiv 1707.06347), from the unroll to the step.

``trainer`` calls ``update`` once per unroll. Advantages are estimated on the full batch, before it
is split (``batches``), and normalised there or in each minibatch; reset steps have no part in it.

Shape suffixes: T unroll, B environments, N valid steps of the batch (environments, where the policy
remembers), M those of a minibatch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from p2pdrl.config.task import PPOConfig
from p2pdrl.rl.algorithms.algorithm import Algorithm, Loss, annealed
from p2pdrl.rl.algorithms.batches import full_batch, minibatch, normalized, with_normalized
from p2pdrl.rl.algorithms.returns import gae
from p2pdrl.rl.distributions import PolicyOutputs
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine, Summed
from p2pdrl.rl.rollout import Unroll
from p2pdrl.tensors.optimizers import Adam

__all__ = ["MINIBATCH_KL", "PPO", "PPOObjective"]

MINIBATCH_KL = 1.5
"""How far beyond ``target_kl`` a single minibatch may be, whose estimate is noisier than a pass's."""


@dataclass(frozen=True)
class PPOObjective(Summed):
    """Equation 9: policy, value and entropy together.

    Targets: ``actions``, ``log_probs`` and ``values`` of the policy that acted, ``advantages``
    (normalised already), ``returns``.

    Attributes:
        clip: ε: how far the probability ratio may move before its gradient is cut.
        value_clip: bound on the value's move; None leaves it free.
    """

    target_names: ClassVar[tuple[str, ...]] = ("actions", "log_probs", "values", "advantages", "returns")
    terms: ClassVar[int] = 5

    clip: float
    value_clip: float | None
    value_coef: float
    entropy_coef: float

    def __call__(self, outputs: PolicyOutputs, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: policy loss, value loss, entropy, KL, clip fraction; all summed."""
        policy = outputs.distribution()
        advantages_N = targets["advantages"]

        # equation 7: L = E[min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)]
        log_ratio_N = policy.log_prob(targets["actions"]) - targets["log_probs"]
        ratio_N = log_ratio_N.exp()
        clipped_N = ratio_N.clamp(1.0 - self.clip, 1.0 + self.clip)
        policy_loss = -self.total(torch.minimum(ratio_N * advantages_N, clipped_N * advantages_N), targets)
        value_loss = 0.5 * self.total(self._errors(outputs.values, targets), targets)
        entropy = self.total(policy.entropy(targets["actions"]), targets)

        loss = policy_loss + self.value_coef * value_loss - self.entropy_coef * entropy
        with torch.no_grad():
            # KL(old | new) without its bias and with less variance: E[(ρ − 1) − log ρ] (Schulman 2020)
            kl = self.total(ratio_N - 1.0 - log_ratio_N, targets)
            clipped = self.total((ratio_N != clipped_N).to(kl.dtype), targets)
            return loss, torch.stack((policy_loss, value_loss, entropy, kl, clipped))

    def _errors(self, values_N: Tensor, targets: Mapping[str, Tensor]) -> Tensor:
        """Return squared errors of the values, the larger ones of free and clipped."""
        returns_N, old_N = targets["returns"], targets["values"]
        errors_N = (values_N - returns_N).square()
        if self.value_clip is None:
            return errors_N
        near_N = old_N + (values_N - old_N).clamp(-self.value_clip, self.value_clip)
        return torch.maximum(errors_N, (near_N - returns_N).square())


class PPO(Algorithm[Unroll]):
    """Clipped surrogate objective, several passes of minibatches over each unroll; one loss, by Adam.

    Args:
        generator: shuffles the minibatches; on the parameters' device.
    """

    def __init__(
        self,
        config: PPOConfig,
        flat: FlatModule,
        engine: GradientEngine[PolicyOutputs],
        generator: torch.Generator,
    ) -> None:
        self._config = config
        self.minibatches, self.epochs = config.minibatches, config.epochs
        self.reset_optimizer = config.reset_optimizer
        self._flat = flat
        self._generator = generator
        self._objective = PPOObjective(
            clip=config.clip,
            value_clip=config.value_clip,
            value_coef=config.value_coef,
            entropy_coef=config.entropy_coef,
        )
        self._loss = Loss(self._objective, Adam(), flat, engine, max_grad_norm=config.max_grad_norm)
        self.losses = (self._loss,)

    def update(self, batch: Unroll) -> dict[str, float]:
        """Improve the policy on one unroll, in place, and return what the monitors plot.

        Terms of the objective are means over all minibatches of the update, each as it was before its own
        step. ``kl`` among them is the estimate E[(ρ − 1) − log ρ] ≥ 0 of KL(old | new): 0 in the first
        minibatch, growing with each step since the policy acted. ``clip_fraction`` is the share of steps
        whose ratio was outside of 1 ± ε; ``clip`` is ε, while it falls.
        """
        config, unroll = self._config, batch
        learning_rate = self.learning_rate(config.learning_rate, config.anneal)
        clip = annealed(config.clip, config.clip_anneal, self.progress)
        self._loss.objective = replace(self._objective, clip=clip)
        each = config.normalize_advantages and config.normalize_over == "minibatch"
        advantages_TB = gae(
            unroll.rewards_TB,
            unroll.values_T1B,
            config.discount * (~unroll.terminated_TB),
            config.gae_lambda,
            continues_TB=(~unroll.ends_TB).to(torch.float32),
        )
        values_TB = unroll.values_T1B[:-1]
        returns_TB = advantages_TB + values_TB
        if config.normalize_advantages and not each:
            advantages_TB = normalized(advantages_TB, unroll.valid_TB)
        full = full_batch(
            unroll,
            {
                "actions": unroll.actions,
                "log_probs": unroll.log_probs_TB,
                "values": values_TB,
                "advantages": advantages_TB,
                "returns": returns_TB,
            },
        )
        size = len(full.inputs)
        minibatch_size = math.ceil(size / max(1, round(self.minibatches / self.cuts)))
        totals = torch.zeros(5, device=self._flat.device)
        steps = skipped = 0
        gradient_norm = 0.0
        ended = False
        for epoch in range(config.epochs):
            order_N = torch.randperm(size, generator=self._generator, device=self._generator.device)
            epoch_kl = torch.zeros((), device=self._flat.device)
            parts = torch.split(order_N, minibatch_size)
            for count, indices_M in enumerate(parts, start=1):
                part = minibatch(full, indices_M)
                if each:
                    part = with_normalized(part, "advantages")
                terms = self._loss.gradients(part)
                totals += terms
                epoch_kl += terms[3]
                left = (config.epochs - epoch) * len(parts) - count
                if config.target_kl is not None:
                    if config.target_kl_per == "minibatch":
                        ended = float(terms[3]) > MINIBATCH_KL * config.target_kl
                    elif count == len(parts):
                        ended = float(epoch_kl) / count > config.target_kl
                norm = self._loss.apply(learning_rate, samples=part.rows, left=0 if ended else left)
                steps += 1
                if math.isfinite(norm):
                    gradient_norm += norm
                else:
                    skipped += 1
                ended = ended or self._loss.stepper.ends_update
                if ended:
                    break
            if ended:
                break

        policy_loss, value_loss, entropy, kl, clip_fraction = (totals / steps).tolist()
        metrics = {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": clip_fraction,
            "explained_variance": _explained_variance(
                values_TB[unroll.valid_TB], returns_TB[unroll.valid_TB]
            ),
            "gradient_norm": gradient_norm / max(steps - skipped, 1),
            "learning_rate": learning_rate,
            "gradient_steps": float(steps - skipped),
            "skipped_steps": float(skipped),
        }
        return metrics if config.clip_anneal == "none" else {**metrics, "clip": clip}


def _explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """Return 1 − Var(returns − values) / Var(returns): 1 is perfect, below 0 worse than a constant."""
    variance = float(returns_N.var(correction=0))
    return 0.0 if variance == 0.0 else 1.0 - float((returns_N - values_N).var(correction=0)) / variance
