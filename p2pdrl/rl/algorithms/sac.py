"""Soft actor-critic (Haarnoja 2018, arXiv 1812.05905, algorithm 1), with a temperature that is learned.

It maximises the return with the policy's entropy added, E Σ γ^t (r_t + α H(π(·|s_t))). One gradient step, on
transitions (s, a, r, s′) from the memory, with standard normal noise z:

    y      = R + γ^k (1 − terminated) (min_i Q⁻_i(s′, a′) − α log π(a′|s′)),  a′ ~ π(·|s′)    (equations 2, 3)
    J_Q(i) = E ½ (Q_i(s, a) − y)²                                                              (5)
    J_π    = E [α log π(a_θ|s) − min_i Q_i(s, a_θ)],  a_θ = tanh(μ(s) + σ(s) z)                (9)
    J_α    = E [−log α (log π(a_θ|s) + H̄)],  H̄ = −dim(A) unless it is given                   (18)
    Q⁻_i ← τ Q_i + (1 − τ) Q⁻_i

Equation 18 has α in place of log α; the authors' code has it as here, which keeps α positive. R is the
reward, or with ``n_step`` above 1 the sum of k of them; entropies between s and s′ don't count then.

Shape suffixes: B transitions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from p2pdrl.config.task import SACConfig, TemperatureOptions
from p2pdrl.rl.actor_critic_q import SquashedGaussianActorCritic, beside
from p2pdrl.rl.algorithms.algorithm import Stepped
from p2pdrl.rl.algorithms.off_policy import CriticObjective, GradientStep, OffPolicy, Rates, critic_minibatch
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, GradientEngine, Minibatch, Summed
from p2pdrl.rl.sources.replay import Transitions

__all__ = ["SAC", "MaximumEntropy", "SoftPolicyObjective", "TemperatureObjective"]


@dataclass(frozen=True)
class SoftPolicyObjective(Summed):
    """α log π(a|s) − min_i Q_i(s, a) (equation 9).

    Targets: ``alpha``, and ``log_probs``, into which log π(a|s) is written: the temperature learns from it.
    """

    target_names: ClassVar[tuple[str, ...]] = ("alpha", "log_probs")
    terms: ClassVar[int] = 2

    def __call__(
        self, outputs: tuple[Tensor, Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return loss and terms: loss, −log π(a|s), which is an estimate of the entropy; all summed."""
        q_B, log_probs_B = outputs
        loss = self.total(targets["alpha"] * log_probs_B - q_B, targets)
        with torch.no_grad():
            targets["log_probs"].copy_(log_probs_B)
            return loss, torch.stack((loss, self.total(-log_probs_B, targets)))


@dataclass(frozen=True)
class TemperatureObjective(Summed):
    """−log α (log π(a|s) + H̄) (equation 18): α falls where the entropy is above H̄.

    Targets: ``excess``, E [log π + H̄] of each row.
    """

    target_names: ClassVar[tuple[str, ...]] = ("excess",)
    terms: ClassVar[int] = 1

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and the same as the only term, summed."""
        loss = -self.total(outputs * targets["excess"], targets)
        return loss, loss.detach()[None]


class MaximumEntropy(OffPolicy):
    """What both forms of SAC share: the temperature α, fixed or learned, and what is plotted.

    Args:
        log_alpha: the parameter log α, of one element.
        target_entropy: H̄, in nats.
    """

    def __init__(
        self,
        config: TemperatureOptions,
        flat: FlatModule,
        engine_for: Callable[[Forward[Any]], GradientEngine[Any]],
        log_alpha: Tensor,
        target_entropy: float,
    ) -> None:
        super().__init__(config, flat, engine_for)
        self._log_alpha = log_alpha
        self._target_entropy = target_entropy
        self._temperature = self._loss(
            "temperature", TemperatureObjective(), ("log_alpha",), lambda rows: log_alpha.expand(len(rows))
        )
        self._learned = (self._temperature,) if config.temperature == "auto" else ()

    @property
    def _alpha(self) -> Tensor:
        """α, of one element, without gradient."""
        return self._log_alpha.detach().exp()

    def _learn_temperature(self, log_probs_B: Tensor, learning_rate: float) -> dict[str, float]:
        """Step α, unless it is fixed, by each row's E log π(a|s); return what is plotted of it."""
        if not self._learned:
            return {}
        excess_B = log_probs_B + self._target_entropy
        part = Minibatch(excess_B, {"excess": excess_B}, len(excess_B))
        return {"temperature_loss": float(self._temperature.step(part, learning_rate).terms)}

    @staticmethod
    def _metrics(critic: Stepped, actor: Stepped, alpha: Tensor) -> dict[str, float]:
        """Return what is plotted of critics and actor."""
        critic_loss, q, error = critic.terms.tolist()
        actor_loss, entropy = actor.terms.tolist()
        return {
            "critic_loss": critic_loss,
            "actor_loss": actor_loss,
            "entropy": entropy,
            "temperature": float(alpha),
            "q_value": q,
            "td_error": error,
        }


class SAC(MaximumEntropy):
    """Losses of critics, actor and, unless it is fixed, temperature; targets of the critics."""

    def __init__(
        self,
        config: SACConfig,
        policy: SquashedGaussianActorCritic,
        flat: FlatModule,
        engine_for: Callable[[Forward[Any]], GradientEngine[Any]],
        generator: torch.Generator,
    ) -> None:
        given = config.target_entropy
        super().__init__(
            config, flat, engine_for, policy.log_alpha, -float(policy.dim) if given is None else given
        )
        self._policy = policy
        self._generator = generator
        self._critic = self._loss("critic", CriticObjective(scale=0.5), ("critics",), policy.q_values)
        self._actor = self._loss("actor", SoftPolicyObjective(), policy.actor_parts, policy.q_of_own_actions)
        self.losses = (self._critic, self._actor, *self._learned)
        self._target = self._target_of("critics", policy.critics)
        self.targets = (self._target,)

    def gradient_step(self, drawn: Transitions, rates: Rates) -> GradientStep:
        """Step critics, actor and temperature; see ``OffPolicy.gradient_step``."""
        policy, rows, alpha = self._policy, len(drawn.returns_B), self._alpha
        normal_BA, next_normal_BA = policy.normal(2 * rows, self._generator).chunk(2)
        with torch.no_grad():
            next_actions_BA, next_log_probs_B = policy.sample(drawn.next_obs_BX, next_normal_BA)
            next_q_B = self._target.module(beside(drawn.next_obs_BX, next_actions_BA)).amin(0).squeeze(-1)
            targets_B = drawn.returns_B + drawn.discounts_B * (next_q_B - alpha * next_log_probs_B)

        part = critic_minibatch(beside(drawn.obs_BX, drawn.actions_B), drawn, targets_B)
        critic = self._critic.step(part, rates.critic)

        log_probs_B = torch.empty_like(targets_B)
        of_actor = {"alpha": alpha.expand(rows), "log_probs": log_probs_B}
        actor = self._actor.step(Minibatch(beside(drawn.obs_BX, normal_BA), of_actor, rows), rates.actor)

        metrics = self._learn_temperature(log_probs_B, rates.temperature) | self._metrics(
            critic, actor, alpha
        )
        self._target.track()
        return GradientStep(metrics, critic.norm, part.targets["errors"])
