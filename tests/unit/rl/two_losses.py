"""A toy actor-critic with two losses, two optimizers, a target copy and ε-greedy exploration.

It is added through the public registry, as a contributor outside of the package would.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from p2pdrl.config.task import AlgorithmOptions
from p2pdrl.rl.algorithms.algorithm import Algorithm, HardCopy, LinearSchedule, Loss, SoftCopy, TargetNetwork
from p2pdrl.rl.algorithms.batches import full_batch
from p2pdrl.rl.algorithms.registry import AlgorithmContext, AlgorithmEntry, register
from p2pdrl.rl.gradients import Summed
from p2pdrl.rl.networks.lstm import NO_CONTEXT, RecurrentContext
from p2pdrl.rl.policy import ActorCritic, Policy
from p2pdrl.rl.rollout import Unroll
from p2pdrl.tensors.optimizers import SGD, Adam


class TwoLossConfig(AlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="two_losses"):
    """Options of the toy."""

    losses: ClassVar[int] = 2

    unroll_steps: int = 8
    discount: float = 0.9
    learning_rate: float = 0.05
    actor_every: int = 2
    copy_every: int = 3
    tau: float = 0.0
    """Above 0 the target follows softly."""


class OnActorCriticConfig(TwoLossConfig, frozen=True, kw_only=True, tag_field="name", tag="on_actor_critic"):
    """The same with the package's own network."""


class Separate(Policy):
    """Actor and critic share nothing, and each lies in one piece of the flat vector."""

    def __init__(self, spec, config, seed) -> None:
        super().__init__()
        self.spec = spec
        torch.manual_seed(seed)
        self.actor = nn.Linear(spec.obs_shape[0], spec.action.n)
        self.critic = nn.Linear(spec.obs_shape[0], 1)

    def noise(self, shape, generator):
        return torch.rand((*shape, 2), generator=generator)

    def act(self, obs_BX, noise=None, state_BS=None):
        greedy_B = self.actor(obs_BX).argmax(-1)
        if noise is None:
            return greedy_B
        any_B = (noise[..., 1] * self.spec.action.n).long()
        return torch.where(noise[..., 0] < self.exploration, any_B, greedy_B)

    def outputs(self, obs: Tensor, context: RecurrentContext = NO_CONTEXT) -> tuple[Tensor, Tensor]:
        return self.actor(obs), self.critic(obs).squeeze(-1)

    def evaluate(self, obs, actions, context=NO_CONTEXT):
        logits, values = self.outputs(obs)
        log_probs = torch.log_softmax(logits, -1).gather(-1, actions.unsqueeze(-1)).squeeze(-1)
        return log_probs, values

    def values(self, obs, context=NO_CONTEXT):
        return self.critic(obs).squeeze(-1)


@dataclass(frozen=True)
class PolicyLoss(Summed):
    """−log π(a|s) A + ½ v²: the second term shows that its gradient reaches the critic, and moves it not."""

    target_names: ClassVar[tuple[str, ...]] = ("actions", "advantages")
    terms: ClassVar[int] = 1

    def __call__(self, outputs: Any, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        logits, values = outputs[:2]
        log_probs = torch.log_softmax(logits, -1).gather(-1, targets["actions"].unsqueeze(-1)).squeeze(-1)
        loss = self.total(-log_probs * targets["advantages"] + 0.5 * values.square(), targets)
        return loss, loss.detach()[None]


@dataclass(frozen=True)
class Value(Summed):
    """½ (v − target)²."""

    target_names: ClassVar[tuple[str, ...]] = ("returns",)
    terms: ClassVar[int] = 1

    def __call__(self, outputs: Any, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        loss = 0.5 * self.total((outputs[1] - targets["returns"]).square(), targets)
        return loss, loss.detach()[None]


class TwoLosses(Algorithm[Unroll]):
    """TD(0) for the critic against a target network; the actor steps less often."""

    def __init__(self, made: AlgorithmContext) -> None:
        config: TwoLossConfig = made.config
        self._config = config
        policy: Any = made.policy
        if isinstance(policy, ActorCritic):
            actor, critic = made.flat.span(*policy.actor_parts), made.flat.span(*policy.critic_parts)
            value = nn.Sequential(policy.critic, policy.value_head)
        else:
            actor, critic = made.flat.span("actor"), made.flat.span("critic")
            value = policy.critic
        self.actor: Loss[Any] = Loss(
            PolicyLoss(),
            Adam(),
            actor,
            made.engine_for(lambda obs, _: policy.outputs(obs)),
            max_grad_norm=1e9,
            name="actor",
            every=config.actor_every,
        )
        self.critic: Loss[Any] = Loss(
            Value(),
            SGD(),
            critic,
            made.engine,
            max_grad_norm=1e9,
            name="critic",
        )
        self.losses = (self.actor, self.critic)
        rule = SoftCopy(config.tau) if config.tau else HardCopy(config.copy_every)
        self.target = TargetNetwork("critic", value, critic, rule)
        self.targets = (self.target,)
        self._epsilon = LinearSchedule(1.0, 0.1, 1000)

    @property
    def exploration(self) -> float:
        return self._epsilon.at(self.env_steps)

    def update(self, batch: Unroll) -> dict[str, float]:
        config = self._config
        self.target.follow(self.policy_version)
        with torch.no_grad():
            next_TB = self.target.module(batch.obs_T1BX[1:]).squeeze(-1)
            returns_TB = batch.rewards_TB + config.discount * (~batch.terminated_TB) * next_TB
            targets = {
                "actions": batch.actions,
                "returns": returns_TB,
                "advantages": returns_TB - batch.values_T1B[:-1],
            }
        full = full_batch(batch, targets)
        metrics = {"critic_loss": float(self.critic.step(full, config.learning_rate).terms)}
        self.target.track()
        if self.actor.due():
            metrics["actor_loss"] = float(self.actor.step(full, config.learning_rate).terms)
        return metrics


register(TwoLossConfig, AlgorithmEntry(TwoLosses, Separate))
register(OnActorCriticConfig, AlgorithmEntry(TwoLosses))
