"""Soft actor-critic for discrete actions (Christodoulou 2019, arXiv 1910.07207, algorithm 1).

``sac`` whose expectations over the policy's own actions are sums over all of them, so that nothing is sampled
while it learns. One gradient step, on transitions (s, a, r, s′) from the memory, with π(·|s) and Q_i(s, ·)
vectors over the actions:

    y      = R + γ^k (1 − terminated) π(·|s′)ᵀ [min_i Q⁻_i(s′, ·) − α log π(·|s′)]      (equation 10)
    J_Q(i) = E ½ (Q_i(s, a) − y)²                                                        (4)
    J_π    = E π(·|s)ᵀ [α log π(·|s) − min_i Q_i(s, ·)]                                  (12)
    J_α    = E π(·|s)ᵀ [−log α (log π(·|s) + H̄)],  H̄ = a share of log |A|               (11)
    Q⁻_i ← τ Q_i + (1 − τ) Q⁻_i

Equation 11 has α in place of log α, as in ``sac``.

Shape suffixes: B transitions, A actions, M critics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from p2pdrl.config.task import DiscreteSACConfig
from p2pdrl.rl.actor_critic_q import CategoricalActorCritic
from p2pdrl.rl.algorithms.off_policy import CriticObjective, GradientStep, Rates, critic_minibatch
from p2pdrl.rl.algorithms.sac import MaximumEntropy
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, GradientEngine, Minibatch, Summed
from p2pdrl.rl.sources.replay import Transitions

__all__ = ["DiscreteSAC", "ExpectedPolicyObjective", "TakenCriticObjective"]


@dataclass(frozen=True)
class TakenCriticObjective(CriticObjective):
    """``CriticObjective`` of Q_i(s, a) at the actions that were taken, of which the model returns Q_i(s, ·).

    Targets: ``actions`` too.
    """

    target_names: ClassVar[tuple[str, ...]] = ("actions", "targets", "weights", "errors")

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """See ``CriticObjective``."""
        actions_MB1 = targets["actions"].unsqueeze(-1).expand(*outputs.shape[:2], 1)
        return super().__call__(outputs.gather(-1, actions_MB1).squeeze(-1), targets)


@dataclass(frozen=True)
class ExpectedPolicyObjective(Summed):
    """π(·|s)ᵀ [α log π(·|s) − min_i Q_i(s, ·)] (equation 12); the model returns log π(·|s).

    Targets: ``alpha``; ``q``, min_i Q_i(s, ·); and ``entropies``, into which H(π(·|s)) is written.
    """

    target_names: ClassVar[tuple[str, ...]] = ("alpha", "q", "entropies")
    terms: ClassVar[int] = 2

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: loss, entropy; all summed."""
        probs_BA = outputs.exp()
        values_BA = targets["alpha"].unsqueeze(-1) * outputs - targets["q"]
        loss = self.total((probs_BA * values_BA).sum(-1), targets)
        with torch.no_grad():
            entropies_B = -(probs_BA * outputs).sum(-1)
            targets["entropies"].copy_(entropies_B)
            return loss, torch.stack((loss, self.total(entropies_B, targets)))


class DiscreteSAC(MaximumEntropy):
    """Losses of critics, actor and, unless it is fixed, temperature; targets of the critics."""

    def __init__(
        self,
        config: DiscreteSACConfig,
        policy: CategoricalActorCritic,
        flat: FlatModule,
        engine_for: Callable[[Forward[Any]], GradientEngine[Any]],
    ) -> None:
        target_entropy = config.target_entropy_fraction * math.log(policy.choices)
        super().__init__(config, flat, engine_for, policy.log_alpha, target_entropy)
        self._policy = policy
        self._critic = self._loss("critic", TakenCriticObjective(scale=0.5), ("critics",), policy.q_values)
        self._actor = self._loss("actor", ExpectedPolicyObjective(), ("actor",), policy.log_probs)
        self.losses = (self._critic, self._actor, *self._learned)
        self._target = self._target_of("critics", policy.critics)
        self.targets = (self._target,)

    def gradient_step(self, drawn: Transitions, rates: Rates) -> GradientStep:
        """Step critics, actor and temperature; see ``OffPolicy.gradient_step``."""
        policy, rows, alpha = self._policy, len(drawn.returns_B), self._alpha
        with torch.no_grad():
            next_log_probs_BA = policy.log_probs(drawn.next_obs_BX)
            next_q_BA = self._target.module(drawn.next_obs_BX.flatten(1).float()).amin(0)
            next_values_B = (next_log_probs_BA.exp() * (next_q_BA - alpha * next_log_probs_BA)).sum(-1)
            targets_B = drawn.returns_B + drawn.discounts_B * next_values_B

        part = critic_minibatch(drawn.obs_BX, drawn, targets_B, actions=drawn.actions_B)
        critic = self._critic.step(part, rates.critic)

        with torch.no_grad():
            q_BA = policy.q_values(drawn.obs_BX).amin(0)
        entropies_B = torch.empty_like(targets_B)
        of_actor = {"alpha": alpha.expand(rows), "q": q_BA, "entropies": entropies_B}
        actor = self._actor.step(Minibatch(drawn.obs_BX, of_actor, rows), rates.actor)

        metrics = self._learn_temperature(-entropies_B, rates.temperature) | self._metrics(
            critic, actor, alpha
        )
        self._target.track()
        return GradientStep(metrics, critic.norm, part.targets["errors"])
