"""Deep deterministic policy gradient (Lillicrap 2016, arXiv 1509.02971, algorithm 1).

One gradient step, on transitions (s, a, r, s′) from the memory:

    y   = R + γ^k (1 − terminated) Q⁻(s′, μ⁻(s′))
    J_Q = E (Q(s, a) − y)²
    J_μ = −E Q(s, μ(s)),  whose gradient is that of equation 6: ∇_a Q(s, a) ∇_θ μ(s) at a = μ(s)
    Q⁻ ← τ Q + (1 − τ) Q⁻,  μ⁻ ← τ μ + (1 − τ) μ⁻

It explores by noise added to its actions, which are -1 … 1: an Ornstein-Uhlenbeck process in the paper. R is
the reward, or the sum of k of them with ``n_step``. The paper's weight decay of the critic and its batch
normalisation are left out, as they usually are. ``td3`` is the same with three tricks.

With ``joint`` there is one loss, J_Q + J_μ, of which μ(s) goes through a Q whose parameters are held: one
gradient over the whole vector, that of both at the same parameters, and one step of Adam. The two losses
differ from that in the Q that J_μ sees alone: it has made its step already. One gradient can go to servers
and peers like any other algorithm's, and the model be cut into stages (`rl.sequential.joint_blocks`).

Shape suffixes: B transitions, A dimensions of an action.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from p2pdrl.config.task import DDPGConfig
from p2pdrl.rl.actor_critic_q import DeterministicActorCritic, beside
from p2pdrl.rl.algorithms.off_policy import CriticObjective, GradientStep, OffPolicy, Rates, critic_minibatch
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, GradientEngine, Minibatch, Summed
from p2pdrl.rl.sources.replay import Transitions

__all__ = ["DDPG", "DeterministicPolicyObjective", "JointObjective"]


@dataclass(frozen=True)
class DeterministicPolicyObjective(Summed):
    """−Q(s, μ(s)), of which the model returns Q."""

    target_names: ClassVar[tuple[str, ...]] = ()
    terms: ClassVar[int] = 1

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and the same as the only term, summed."""
        loss = -self.total(outputs, targets)
        return loss, loss.detach()[None]


@dataclass(frozen=True)
class JointObjective(Summed):
    """(y − Q(s, a))² − Q(s, μ(s)), where the model returns both Q."""

    target_names: ClassVar[tuple[str, ...]] = CriticObjective.target_names
    terms: ClassVar[int] = CriticObjective.terms + DeterministicPolicyObjective.terms

    def __call__(
        self, outputs: tuple[Tensor, Tensor], targets: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Return loss and terms: those of the critic, then the actor's; all summed."""
        values_MB, own_B = outputs
        critic_loss, critic_terms = CriticObjective(rows=self.rows)(values_MB, targets)
        actor_loss, actor_terms = DeterministicPolicyObjective(rows=self.rows)(own_B, targets)
        return critic_loss + actor_loss, torch.cat((critic_terms, actor_terms))


class DDPG(OffPolicy):
    """Losses of critic and actor, or their sum, by Adam; targets of both."""

    def __init__(
        self,
        config: DDPGConfig,
        policy: DeterministicActorCritic,
        flat: FlatModule,
        engine_for: Callable[[Forward[Any]], GradientEngine[Any]],
    ) -> None:
        super().__init__(config, flat, engine_for)
        self._at_once = config.joint
        if config.joint:
            self._joint = self._loss("", JointObjective(), (), policy.q_values_and_own)
            self.losses = (self._joint,)
        else:
            self._critic = self._loss("critic", CriticObjective(), ("critics",), policy.q_values)
            self._actor = self._loss(
                "actor", DeterministicPolicyObjective(), ("actor",), policy.q_of_own_actions
            )
            self.losses = (self._critic, self._actor)
        self._target_critic = self._target_of("critics", policy.critics)
        self._target_actor = self._target_of("actor", policy.actor)
        self.targets = (self._target_critic, self._target_actor)

    def gradient_step(self, drawn: Transitions, rates: Rates) -> GradientStep:
        """Step critic and actor, one after the other or at once; see ``OffPolicy.gradient_step``."""
        with torch.no_grad():
            next_actions_BA = self._target_actor.module(drawn.next_obs_BX)
            next_q_B = self._target_critic.module(beside(drawn.next_obs_BX, next_actions_BA)).view(-1)
            targets_B = drawn.returns_B + drawn.discounts_B * next_q_B

        part = critic_minibatch(beside(drawn.obs_BX, drawn.actions_B), drawn, targets_B)
        if self._at_once:
            terms, norm = self._joint.step(part, rates.critic, left=self._left)
        else:
            critic_terms, norm = self._critic.step(part, rates.critic)
            actor = self._actor.step(Minibatch(drawn.obs_BX, {}, len(targets_B)), rates.actor)
            terms = torch.cat((critic_terms, actor.terms))
        self._target_critic.track()
        self._target_actor.track()

        names = ("critic_loss", "q_value", "td_error", "actor_loss")
        return GradientStep(dict(zip(names, terms.tolist(), strict=True)), norm, part.targets["errors"])
