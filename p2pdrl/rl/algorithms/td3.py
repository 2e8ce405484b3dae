"""Twin delayed deep deterministic policy gradient (Fujimoto 2018, arXiv 1802.09477, algorithm 1).

It is ``ddpg`` with three tricks against overestimated values: two critics, of which the lesser counts; noise
on the targets' actions; an actor and targets that move only with every d-th step of the critics. One gradient
step, on transitions (s, a, r, s′) from the memory:

    a′     = clip(μ⁻(s′) + clip(ε, −c, c), −1, 1),  ε ~ N(0, σ̃²)        (equation 14; target policy smoothing)
    y      = R + γ^k (1 − terminated) min_i Q⁻_i(s′, a′)                 (equation 10; clipped double Q)
    J_Q(i) = E (Q_i(s, a) − y)²
    every d steps:  J_μ = −E Q_1(s, μ(s)),  Q⁻_i ← τ Q_i + (1 − τ) Q⁻_i,  μ⁻ ← τ μ + (1 − τ) μ⁻

It explores by noise added to its actions, which are -1 … 1. R is the reward, or the sum of k with ``n_step``.

Shape suffixes: B transitions, A dimensions of an action, M critics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from p2pdrl.config.task import TD3Config
from p2pdrl.rl.actor_critic_q import DeterministicActorCritic, beside
from p2pdrl.rl.algorithms.ddpg import DeterministicPolicyObjective
from p2pdrl.rl.algorithms.off_policy import CriticObjective, GradientStep, OffPolicy, Rates, critic_minibatch
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, GradientEngine, Minibatch
from p2pdrl.rl.sources.replay import Transitions

__all__ = ["TD3"]


class TD3(OffPolicy):
    """Losses of the critics and, less often, of the actor, by Adam; targets of both."""

    def __init__(
        self,
        config: TD3Config,
        policy: DeterministicActorCritic,
        flat: FlatModule,
        engine_for: Callable[[Forward[Any]], GradientEngine[Any]],
        generator: torch.Generator,
    ) -> None:
        super().__init__(config, flat, engine_for)
        self._smoothing = config.target_noise_std, config.target_noise_clip
        self._generator = generator
        self._critic = self._loss("critic", CriticObjective(), ("critics",), policy.q_values)
        self._actor = self._loss(
            "actor",
            DeterministicPolicyObjective(),
            ("actor",),
            policy.q_of_own_actions,
            every=config.policy_delay,
        )
        self.losses = (self._critic, self._actor)
        self._target_critics = self._target_of("critics", policy.critics)
        self._target_actor = self._target_of("actor", policy.actor)
        self.targets = (self._target_critics, self._target_actor)

    def gradient_step(self, drawn: Transitions, rates: Rates) -> GradientStep:
        """Step the critics and, when it is due, the actor; see ``OffPolicy.gradient_step``."""
        deviation, most = self._smoothing
        with torch.no_grad():
            next_actions_BA = self._target_actor.module(drawn.next_obs_BX)
            noise_BA = torch.empty_like(next_actions_BA).normal_(generator=self._generator)
            noise_BA.mul_(deviation).clamp_(-most, most)
            next_actions_BA = (next_actions_BA + noise_BA).clamp_(-1.0, 1.0)
            next_q_B = (
                self._target_critics.module(beside(drawn.next_obs_BX, next_actions_BA)).amin(0).squeeze(-1)
            )
            targets_B = drawn.returns_B + drawn.discounts_B * next_q_B

        part = critic_minibatch(beside(drawn.obs_BX, drawn.actions_B), drawn, targets_B)
        critic = self._critic.step(part, rates.critic)
        critic_loss, q, error = critic.terms.tolist()
        metrics = {"critic_loss": critic_loss, "q_value": q, "td_error": error}

        if self._actor.due():
            actor = self._actor.step(Minibatch(drawn.obs_BX, {}, len(targets_B)), rates.actor)
            metrics["actor_loss"] = float(actor.terms)
            self._target_critics.track()
            self._target_actor.track()
        return GradientStep(metrics, critic.norm, part.targets["errors"])
