"""Proximal policy optimization (Schulman 2017, arXiv 1707.06347), from the unroll to the step.

``trainer`` calls ``update`` once per unroll. Advantages are estimated and normalised on the full
batch, before it is split; reset steps are left out of the batch altogether.

Shape suffixes: T unroll, T1 unroll with the bootstrap step, B environments, X the observation's own
dimensions, N valid steps of the batch, M steps of a minibatch.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from p2pdrl.config.task import PPOConfig
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.optimizers import Adam
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.returns import gae
from p2pdrl.rl.rollout import Unroll
from p2pdrl.rl.stepping import OwnStepper, Stepper

__all__ = ["PPO"]


class PPO:
    """Clipped surrogate objective, several passes of minibatches over each unroll.

    Args:
        config: every field explains itself there.
        flat: the policy's parameters, stepped in place.
        policy: the module that ``flat`` holds.
        generator: shuffles the minibatches; on the parameters' device.

    Attributes:
        optimizer: Adam; its state travels in the sidecar.
        progress: 0 … 1, how far the swarm is; lowers the learning rate where that is annealed.
        stepper: gets the gradient of each minibatch; may be replaced between updates.
    """

    def __init__(
        self, config: PPOConfig, flat: FlatModule, policy: ActorCritic, generator: torch.Generator
    ) -> None:
        self._config = config
        self._flat = flat
        self._policy = policy
        self._generator = generator
        self.optimizer = Adam(flat.parameters_D, flat.gradients_D)
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
        obs_NX = unroll.obs_T1BX[:-1][valid_TB]
        actions_N = unroll.actions[valid_TB]
        log_probs_N = unroll.log_probs_TB[valid_TB]
        values_N = unroll.values_T1B[:-1][valid_TB]
        advantages_N = advantages_TB[valid_TB]
        returns_N = advantages_N + values_N
        if config.normalize_advantages:
            advantages_N = (advantages_N - advantages_N.mean()) / (advantages_N.std(correction=0) + 1e-8)

        batch = (obs_NX, actions_N, log_probs_N, values_N, advantages_N, returns_N)
        size = len(obs_NX)
        minibatch_size = math.ceil(size / config.minibatches)
        totals = torch.zeros(5, device=self._flat.device)
        steps = skipped = 0
        gradient_norm = 0.0
        for _ in range(config.epochs):
            order_N = torch.randperm(size, generator=self._generator, device=self._generator.device)
            epoch_kl, epoch_steps = torch.zeros((), device=self._flat.device), 0
            for indices_M in torch.split(order_N, minibatch_size):
                loss, terms = self._loss(*(array_N[indices_M] for array_N in batch))
                self._flat.gradients_D.zero_()
                loss.backward()  # type: ignore[no-untyped-call]
                norm = self.stepper.step(
                    self._flat,
                    self.optimizer,
                    learning_rate=learning_rate,
                    max_grad_norm=config.max_grad_norm,
                    samples=len(indices_M),
                )
                totals += terms
                epoch_kl += terms[3]
                epoch_steps += 1
                if math.isfinite(norm):
                    gradient_norm += norm
                else:
                    skipped += 1
            steps += epoch_steps
            if config.target_kl is not None and float(epoch_kl) / epoch_steps > config.target_kl:
                break

        policy_loss, value_loss, entropy, kl, clip_fraction = (totals / steps).tolist()
        return {
            "policy_loss": policy_loss,
            "value_loss": value_loss,
            "entropy": entropy,
            "kl": kl,
            "clip_fraction": clip_fraction,
            "explained_variance": _explained_variance(values_N, returns_N),
            "gradient_norm": gradient_norm / max(steps - skipped, 1),
            "learning_rate": learning_rate,
            "gradient_steps": float(steps - skipped),
            "skipped_steps": float(skipped),
        }

    def _loss(  # noqa: PLR0917
        self,
        obs_MX: Tensor,
        actions_M: Tensor,
        old_log_probs_M: Tensor,
        old_values_M: Tensor,
        advantages_M: Tensor,
        returns_M: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss of one minibatch, and its terms: policy, value, entropy, KL, clip fraction."""
        config = self._config
        log_probs_M, entropy_M, values_M = self._policy.evaluate(obs_MX, actions_M)

        # equation 7: L = E[min(ρ A, clip(ρ, 1 − ε, 1 + ε) A)]
        log_ratio_M = log_probs_M - old_log_probs_M
        ratio_M = log_ratio_M.exp()
        clipped_M = ratio_M.clamp(1.0 - config.clip, 1.0 + config.clip)
        policy_loss = -torch.minimum(ratio_M * advantages_M, clipped_M * advantages_M).mean()

        errors_M = (values_M - returns_M).square()
        if config.value_clip is not None:
            near_M = old_values_M + (values_M - old_values_M).clamp(-config.value_clip, config.value_clip)
            errors_M = torch.maximum(errors_M, (near_M - returns_M).square())
        value_loss = 0.5 * errors_M.mean()

        entropy = entropy_M.mean()
        loss = policy_loss + config.value_coef * value_loss - config.entropy_coef * entropy
        with torch.no_grad():
            # KL(old | new) without its bias and with less variance: E[(ρ − 1) − log ρ] (Schulman 2020)
            kl = (ratio_M - 1.0 - log_ratio_M).mean()
            clip_fraction = (ratio_M != clipped_M).to(torch.float32).mean()
            terms = torch.stack(
                (policy_loss.detach(), value_loss.detach(), entropy.detach(), kl, clip_fraction)
            )
        return loss, terms


def _explained_variance(values_N: Tensor, returns_N: Tensor) -> float:
    """Return 1 − Var(returns − values) / Var(returns): 1 is perfect, below 0 worse than a constant."""
    variance = float(returns_N.var(correction=0))
    return 0.0 if variance == 0.0 else 1.0 - float((returns_N - values_N).var(correction=0)) / variance
