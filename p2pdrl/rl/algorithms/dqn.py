"""Deep Q-learning (Mnih 2015, Nature 518:529) with the extensions that are its standard today.

| extension | option | what it changes |
|---|---|---|
| double (van Hasselt 2016, arXiv 1509.06461) | ``double`` | a* = argmax Q(s′, ·; θ) instead of θ⁻ |
| dueling (Wang 2016, arXiv 1511.06581) | ``task.network.dueling`` | Q = V + A − mean A |
| n-step returns (Sutton 1988) | ``n_step`` | R = Σ γ^i r_{t+i}, bootstrap γⁿ |
| noisy networks (Fortunato 2018, arXiv 1706.10295) | ``task.network.noisy`` | explores without ε |
| prioritized replay (Schaul 2016, arXiv 1511.05952) | ``prioritized`` | P ∝ (|δ| + ε)^α, weights (N P)^−β |

Where ``outlier_deviations`` is set, gradients of extraordinary losses are left out (Nair 2015, arXiv
1507.04296, section 4.3).

With δ = R + γ^k (1 − terminated) Q(s′, a*; θ⁻) − Q(s, a; θ), each gradient is that of the mean over a
minibatch of w · huber(δ), or w · ½δ². ``trainer`` calls ``update`` once for each unroll that the source has
appended to the memory; it makes ``gradient_steps`` steps. With noisy networks each of them draws noise for
Q(s, a; θ), for the choice of a*, and for Q(s′, a*; θ⁻), independent of each other (section 3.1 there).

Shape suffixes: B transitions, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional

from p2pdrl.config.task import DQNConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.algorithms.algorithm import (
    Algorithm,
    HardCopy,
    LinearSchedule,
    Loss,
    SoftCopy,
    TargetNetwork,
)
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine, Minibatch, Summed
from p2pdrl.rl.policy import Policy
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.rl.sources.replay import ReplayBatch, Transitions
from p2pdrl.tensors.optimizers import Adam

__all__ = ["DQN", "LossOutliers", "QObjective"]

OUTLIER_MEMORY = 0.99
"""Part of the running mean, and of the variance, of losses that one more leaves."""
OUTLIERS_FROM = 100
"""Losses that have to be seen before any of them is an outlier."""


class LossOutliers:
    """Tells which losses are far above the running mean of all before them, by an exponential average.

    Args:
        deviations: standard deviations above the mean from which a loss is an outlier; 0: none is.
    """

    def __init__(self, deviations: float) -> None:
        self._deviations = deviations
        self._count = 0
        self._mean = self._variance = 0.0

    def found(self, loss: float) -> bool:
        """Count a loss in, and tell whether it is an outlier among those before."""
        if not self._deviations or not math.isfinite(loss):
            return False
        off = loss - self._mean
        far = off > self._deviations * math.sqrt(self._variance) and self._count >= OUTLIERS_FROM
        self._count += 1
        new = max(1.0 - OUTLIER_MEMORY, 1.0 / self._count)  # at first the plain mean over all
        self._mean += new * off
        self._variance = (1.0 - new) * (self._variance + new * off**2)
        return far


@dataclass(frozen=True)
class QObjective(Summed):
    """Weighted Huber loss (δ clipped to ±1 in its gradient, as in Mnih 2015) of action values.

    Targets: ``actions``, ``targets`` (R + γ^k …), ``weights``, and ``errors``, into which |δ| is written, so
    that priorities need no second pass.

    Attributes:
        squared: take ½δ² however great δ is.
    """

    squared: bool = False

    target_names: ClassVar[tuple[str, ...]] = ("actions", "targets", "weights", "errors")
    terms: ClassVar[int] = 3

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: loss, mean Q(s, a), mean |δ|; all summed."""
        values_B = outputs.gather(-1, targets["actions"].unsqueeze(-1)).squeeze(-1)
        if self.squared:
            losses_B = 0.5 * (values_B - targets["targets"]).square()
        else:
            losses_B = functional.huber_loss(values_B, targets["targets"], reduction="none")
        loss = self.total(targets["weights"] * losses_B, targets)
        with torch.no_grad():
            errors_B = torch.sub(targets["targets"], values_B, out=targets["errors"]).abs_()
            terms = (loss, self.total(values_B, targets), self.total(errors_B, targets))
            return loss, torch.stack(terms)


class DQN(Algorithm[ReplayBatch]):
    """Learns Q from replay; one loss, by Adam; one target network.

    Args:
        generator: of noisy networks' noise; others need none.
    """

    def __init__(
        self,
        config: DQNConfig,
        policy: Policy,
        flat: FlatModule,
        engine: GradientEngine[Tensor],
        generator: torch.Generator | None = None,
    ) -> None:
        if not isinstance(policy, QNetwork):
            raise ConfigError("deep Q-learning wants a network of action values")
        if policy.noisy and generator is None:
            raise ConfigError("noisy networks want a generator of their noise")
        self._config = config
        self._policy = policy
        self._generator = generator
        objective = QObjective(squared=config.loss == "squared")
        self._loss: Loss[Any] = Loss(objective, Adam(), flat, engine, max_grad_norm=config.max_grad_norm)
        self.losses = (self._loss,)
        rule: HardCopy | SoftCopy = HardCopy(config.target_every)
        if config.target_tau is not None:
            rule = SoftCopy(config.target_tau, at_fetches=config.target_moves == "fetch")
        self._fixed_target = isinstance(rule, HardCopy) and not policy.noisy
        self._target = TargetNetwork("q", policy, flat, rule)
        self._target_network = cast("QNetwork", self._target.module)
        self.targets = (self._target,)
        self._epsilon = LinearSchedule(
            config.exploration_start, config.exploration_end, config.exploration_steps
        )
        self._outliers = LossOutliers(config.outlier_deviations)

    @property
    def exploration(self) -> float:
        """ε, by the swarm's environment steps; of a ladder the first; 0 with noisy networks."""
        if self._config.exploration == "ladder":
            return self._config.exploration_base
        return 0.0 if self._policy.noisy else self._epsilon.at(self.env_steps)

    def update(self, batch: ReplayBatch) -> dict[str, float]:
        """Make ``gradient_steps`` steps on transitions drawn from the memory; return what is plotted."""
        config = self._config
        learning_rate = self.learning_rate(config.learning_rate, config.anneal)
        beta = config.beta + (1.0 - config.beta) * self.progress
        self._target.follow(self.count_of(config.target_counts))
        totals = torch.zeros(QObjective.terms)
        norms = 0.0
        steps = skipped = outliers = 0
        times = batch.updates(config.gradient_steps) if batch.enough(config.learning_starts) else 0
        for part, drawn in self._minibatches(batch, times, beta):
            self._draw_noise(self._policy)
            terms = self._loss.gradients(part).cpu()
            if self._outliers.found(float(terms[0])):
                outliers += 1
                self._loss.spoil()
            steps += 1
            left = times - steps
            norm = self._loss.apply(learning_rate, samples=part.rows, left=left)
            batch.update_priorities(drawn, part.targets["errors"])
            self._target.track()
            totals += terms
            if math.isfinite(norm):
                norms += norm
            else:
                skipped += 1
            if self._loss.stepper.ends_update:
                break
        loss, value, error = (totals / max(steps, 1)).tolist()
        return {
            "q_loss": loss,
            "q_value": value,
            "td_error": error,
            "exploration": self.exploration,
            "replay_rows": float(batch.stored),
            "gradient_norm": norms / max(steps - skipped, 1),
            "learning_rate": learning_rate,
            "gradient_steps": float(steps - skipped),
            "skipped_steps": float(skipped),
            "outlier_losses": float(outliers),
        }

    def _draw_noise(self, network: QNetwork) -> None:
        if self._generator is not None:
            network.draw_weight_noise(self._generator)

    def _minibatches(
        self, batch: ReplayBatch, times: int, beta: float
    ) -> Iterator[tuple[Minibatch, Transitions]]:
        """Yield y = R + γ^k Q(s′, a*; θ⁻) with what it is compared to, and the rows that it is of.

        A target network that stays as it is for the whole update sees several minibatches at once.
        """
        rows = self._config.batch_size
        for block in batch.blocks(rows, times, beta=beta):
            if self._fixed_target:
                next_BA = self._next_values(block)
                for drawn, part_BA in zip(block.parts(rows), torch.split(next_BA, rows), strict=True):
                    yield self._minibatch(drawn, part_BA), drawn
            else:
                for drawn in block.parts(rows):
                    yield self._minibatch(drawn, self._next_values(drawn)), drawn

    @torch.no_grad()
    def _next_values(self, drawn: Transitions) -> Tensor:
        """Return Q(s′, ·; θ⁻)."""
        self._draw_noise(self._target_network)
        return self._target_network.outputs(drawn.next_obs_BX)

    def _minibatch(self, drawn: Transitions, next_BA: Tensor) -> Minibatch:
        with torch.no_grad():
            if self._config.double:
                self._draw_noise(self._policy)
                best_B = self._policy.outputs(drawn.next_obs_BX).argmax(-1)
                next_B = next_BA.gather(-1, best_B.unsqueeze(-1)).squeeze(-1)
            else:
                next_B = next_BA.amax(-1)
            targets_B = drawn.returns_B + drawn.discounts_B * next_B
        targets = {
            "actions": drawn.actions_B,
            "targets": targets_B,
            "weights": drawn.weights_B,
            "errors": torch.empty_like(targets_B),
        }
        return Minibatch(drawn.obs_BX, targets, len(targets_B))
