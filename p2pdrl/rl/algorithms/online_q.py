"""Q-learning, Sarsa and n-step Q-learning without a replay (Mnih 2016, arXiv 1602.01783, section 4).

An unroll of ε-greedy steps is one batch and one gradient step of the mean over its valid steps of

    (R_t − Q(s_t, a_t; θ))².                                                                         (1)

The three methods differ in R alone, which has no gradient; θ⁻ is a target network, a copy of θ that is taken
each time the swarm has made ``target_every`` (I_target) environment steps, or a server so many steps of its
own (``target_counts``):

| name | paper | R_t |
|---|---|---|
| ``one_step_q`` | algorithm 1 | r_t + γ max_a Q(s_{t+1}, a; θ⁻) |
| ``one_step_sarsa`` | section 4 | r_t + γ Q(s_{t+1}, a_{t+1}; θ⁻) |
| ``n_step_q`` | algorithm S2 | r_t + γ r_{t+1} + … + γ^{k−1} r_{t+k−1} + γ^k max_a Q(s_{t+k}, a; θ⁻) |

with k up to the end of the unroll or of the episode, whichever comes first. Where an episode terminated
nothing comes after its last reward; where it was truncated its true final observation is what is bootstrapped
from, under Sarsa with the action that the policy chose there and nobody carried out.

The paper sums (1) over an unroll; the mean is that but for a factor, which RMSProp divides out. Its
learners step one set of parameters, and one RMSProp's statistics, without locks: ``config/a3c.toml`` does so
on each node, and parameter servers between nodes (``config/async_q.toml``). Environments explore each with an
ε of their own (``q_network``).

``trainer`` calls ``update`` once per unroll. Under Sarsa the last step of each unroll waits for the action
that comes after it: unrolls overlap by one step (``sources.unrolls.OverlappingUnrolls``).

Shape suffixes: T unroll, T1 unroll with the bootstrap step (T+1), B environments, N rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from p2pdrl.config.task import NStepQConfig, OneStepSarsaConfig, OnlineQOptions
from p2pdrl.rl.algorithms.algorithm import (
    Algorithm,
    HardCopy,
    LinearSchedule,
    Loss,
    TargetNetwork,
    rmsprop_or_adam,
)
from p2pdrl.rl.algorithms.batches import full_batch
from p2pdrl.rl.algorithms.returns import n_step_returns
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine, Summed
from p2pdrl.rl.policy import Policy
from p2pdrl.rl.q_network import ExplorationSpread
from p2pdrl.rl.rollout import Unroll

__all__ = ["OnlineQ", "SquaredQError"]


@dataclass(frozen=True)
class SquaredQError(Summed):
    """Equation 1. Targets: ``actions`` and ``returns`` (R)."""

    target_names: ClassVar[tuple[str, ...]] = ("actions", "returns")
    terms: ClassVar[int] = 2

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: loss, Q(s, a); all summed."""
        values_N = outputs.gather(-1, targets["actions"].unsqueeze(-1)).squeeze(-1)
        loss = self.total((targets["returns"] - values_N).square(), targets)
        return loss, torch.stack((loss, self.total(values_N, targets))).detach()


class OnlineQ(Algorithm[Unroll]):
    """One gradient step per unroll; one loss, by RMSProp or Adam; one target network.

    Args:
        config: its type says which of the three methods it is.
    """

    def __init__(
        self, config: OnlineQOptions, policy: Policy, flat: FlatModule, engine: GradientEngine[Tensor]
    ) -> None:
        self._config = config
        rule = rmsprop_or_adam(
            config.optimizer, config.rmsprop_alpha, config.rmsprop_eps, eps_in_root=config.rmsprop_eps_in_root
        )
        self._loss = Loss(SquaredQError(), rule, flat, engine, max_grad_norm=config.max_grad_norm)
        self.losses = (self._loss,)
        self._target = TargetNetwork("q", policy, flat, HardCopy(config.target_every))
        self.targets = (self._target,)
        spread = ExplorationSpread.of(config)
        self._epsilon = LinearSchedule(spread.start, spread.mean_end, config.exploration_steps)

    @property
    def exploration(self) -> float:
        """Mean of the environments' ε, by the swarm's environment steps."""
        return self._epsilon.at(self.env_steps)

    def update(self, batch: Unroll) -> dict[str, float]:
        """Improve the action values on one unroll, in place, and return what the monitors plot."""
        config = self._config
        learning_rate = self.learning_rate(config.learning_rate, config.anneal)
        self._target.follow(self.count_of(config.target_counts))
        unroll, returns_TB = self._returns(batch)
        if not unroll.valid_TB.any():  # Sarsa's first steps: what follows them isn't known yet
            return {"exploration": self.exploration, "gradient_steps": 0.0, "skipped_steps": 0.0}
        targets = {"actions": unroll.actions, "returns": returns_TB}
        terms, norm = self._loss.step(full_batch(unroll, targets), learning_rate)
        loss, value = terms.tolist()
        finite = math.isfinite(norm)
        return {
            "q_loss": loss,
            "q_value": value,
            "exploration": self.exploration,
            "gradient_norm": norm if finite else 0.0,
            "learning_rate": learning_rate,
            "gradient_steps": float(finite),
            "skipped_steps": float(not finite),
        }

    @torch.no_grad()
    def _returns(self, unroll: Unroll) -> tuple[Unroll, Tensor]:
        """Return R of each step, with the steps that have one: under Sarsa all but the last."""
        sarsa = isinstance(self._config, OneStepSarsaConfig)
        continues_TB = (~unroll.ends_TB).to(unroll.rewards_TB.dtype)
        if not isinstance(self._config, NStepQConfig):
            continues_TB = torch.zeros_like(continues_TB)
        next_actions_TB = unroll.actions[1:]
        if sarsa:
            unroll, continues_TB = _without_last_step(unroll), continues_TB[:-1]

        bootstrapped_TB = (continues_TB == 0) & ~unroll.terminated_TB & unroll.valid_TB
        bootstrapped_TB[-1] = True
        next_NA = self._target.module(unroll.obs_T1BX[1:][bootstrapped_TB])
        bootstraps_TB = torch.zeros_like(unroll.rewards_TB)
        if sarsa:
            chosen_N = next_actions_TB[bootstrapped_TB].unsqueeze(-1)
            bootstraps_TB[bootstrapped_TB] = next_NA.gather(-1, chosen_N).squeeze(-1)
        else:
            bootstraps_TB[bootstrapped_TB] = next_NA.amax(-1)

        discounts_TB = self._config.discount * (~unroll.terminated_TB)
        return unroll, n_step_returns(unroll.rewards_TB, bootstraps_TB, discounts_TB, continues_TB)


def _without_last_step(unroll: Unroll) -> Unroll:
    return replace(
        unroll,
        obs_T1BX=unroll.obs_T1BX[:-1],
        actions=unroll.actions[:-1],
        log_probs_TB=unroll.log_probs_TB[:-1],
        values_T1B=unroll.values_T1B[:-1],
        rewards_TB=unroll.rewards_TB[:-1],
        terminated_TB=unroll.terminated_TB[:-1],
        truncated_TB=unroll.truncated_TB[:-1],
        valid_TB=unroll.valid_TB[:-1],
    )
