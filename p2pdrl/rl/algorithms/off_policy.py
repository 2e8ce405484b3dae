"""What off-policy actor-critics share: the block of gradient steps, and the critics' regression.

``ddpg``, ``td3``, ``sac`` and ``sac_discrete`` say what one gradient step is; ``trainer`` calls ``update``
once for each unroll that the source has appended to the memory.

Shape suffixes: B transitions, M critics.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from p2pdrl.config.task import OffPolicyOptions
from p2pdrl.rl.algorithms.algorithm import Algorithm, Loss, SoftCopy, TargetNetwork
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, GradientEngine, Minibatch, Objective, Outputs, Summed
from p2pdrl.rl.sources.replay import ReplayBatch, Transitions
from p2pdrl.tensors.optimizers import Adam

__all__ = ["CriticObjective", "GradientStep", "OffPolicy", "Rates", "critic_minibatch"]


@dataclass(frozen=True)
class CriticObjective(Summed):
    """Σ_i w (y − Q_i(s, a))², all critics towards one target.

    Targets: ``targets`` (y), ``weights`` (of prioritized replay, else ones), and ``errors``, into which the
    mean over the critics of |y − Q_i| is written, so that priorities need no second pass.

    Attributes:
        scale: before the squares: 1, or ½.
    """

    target_names: ClassVar[tuple[str, ...]] = ("targets", "weights", "errors")
    terms: ClassVar[int] = 3
    scale: float = 1.0

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return loss and terms: loss, mean Q, mean |y − Q|; all summed over the rows."""
        errors_MB = targets["targets"] - outputs
        squares_B = errors_MB.square().sum(0)
        loss = self.total(self.scale * targets["weights"] * squares_B, targets)
        with torch.no_grad():
            errors_B = errors_MB.abs().mean(0)
            targets["errors"].copy_(errors_B)
            terms = (loss, self.total(outputs.mean(0), targets), self.total(errors_B, targets))
            return loss, torch.stack(terms)


def critic_minibatch(inputs: Tensor, drawn: Transitions, targets_B: Tensor, **more: Tensor) -> Minibatch:
    """Return what the critics learn from: ``inputs`` of the critics, y, and other targets by name."""
    targets = {
        "targets": targets_B,
        "weights": drawn.weights_B,
        "errors": torch.empty_like(targets_B),
        **more,
    }
    return Minibatch(inputs, targets, len(targets_B))


class Rates(NamedTuple):
    """Learning rates of an update, after annealing."""

    critic: float
    actor: float
    temperature: float


class GradientStep(NamedTuple):
    """What one gradient step amounted to.

    Args:
        metrics: by name; means over the block are plotted.
        norm: of the critics' gradient; infinite or NaN when it was skipped.
        errors: |TD errors|, B, for priorities.
    """

    metrics: dict[str, float]
    norm: float
    errors: Tensor


class OffPolicy(Algorithm[ReplayBatch]):
    """Makes ``gradient_steps`` steps on transitions drawn from the memory, once there are enough.

    Args:
        flat: parameters of the policy.
        engine_for: makes each loss's engine.
    """

    def __init__(
        self,
        config: OffPolicyOptions,
        flat: FlatModule,
        engine_for: Callable[[Forward[Any]], GradientEngine[Any]],
    ) -> None:
        self._config = config
        self._flat = flat
        self._engine_for = engine_for
        self._stored = 0
        self._left = 0

    def _loss(
        self,
        name: str,
        objective: Objective[Outputs],
        parts: tuple[str, ...],
        forward: Callable[[Tensor], Outputs],
        *,
        every: int = 1,
    ) -> Loss[Outputs]:
        """Return a loss for some parts of the policy, or for all if none is named, by Adam."""
        return Loss(
            objective,
            Adam(eps=1e-8),
            self._flat.span(*parts) if parts else self._flat,
            self._engine_for(lambda inputs, _: forward(inputs)),
            max_grad_norm=self._config.max_grad_norm,
            name=name,
            every=every,
        )

    def _target_of(self, name: str, module: nn.Module) -> TargetNetwork:
        """Return a copy of the policy's part of that name, which follows softly by ``target_tau``."""
        return TargetNetwork(name, module, self._flat.span(name), SoftCopy(self._config.target_tau))

    @property
    def exploration(self) -> float:
        """1, which is uniform actions, until swarm or memory have seen ``learning_starts`` steps; then 0.

        A learner that comes back with an empty memory to a swarm that has learned acts as that has learned.
        """
        seen = max(self.env_steps, self._stored)
        return 1.0 if seen < self._config.learning_starts else 0.0

    def _rates(self) -> Rates:
        config = self._config
        given = (config.actor_learning_rate, getattr(config, "temperature_learning_rate", None))
        first = (config.learning_rate, *(config.learning_rate if rate is None else rate for rate in given))
        return Rates(*(self.learning_rate(rate, config.anneal) for rate in first))

    @abstractmethod
    def gradient_step(self, drawn: Transitions, rates: Rates) -> GradientStep:
        """Improve critics and, where it is due, actor, on one minibatch."""

    def update(self, batch: ReplayBatch) -> dict[str, float]:
        """Make ``gradient_steps`` steps; return what is plotted."""
        config = self._config
        self._stored = batch.stored
        rates = self._rates()
        beta = config.beta + (1.0 - config.beta) * self.progress
        found: defaultdict[str, list[float]] = defaultdict(list)
        norms: list[float] = []
        skipped = 0
        times = batch.updates(config.gradient_steps) if batch.enough(config.learning_starts) else 0
        for number, drawn in enumerate(batch.draws(config.batch_size, times, beta=beta), 1):
            self._left = times - number
            step = self.gradient_step(drawn, rates)
            batch.update_priorities(drawn, step.errors)
            for name, value in step.metrics.items():
                found[name].append(value)
            if math.isfinite(step.norm):
                norms.append(step.norm)
            else:
                skipped += 1
            if any(loss.stepper.ends_update for loss in self.losses):
                break
        return {name: sum(values) / len(values) for name, values in found.items()} | {
            "exploration": self.exploration,
            "replay_rows": float(batch.stored),
            "gradient_norm": sum(norms) / max(len(norms), 1),
            "learning_rate": rates.critic,
            "gradient_steps": float(len(norms)),
            "skipped_steps": float(skipped),
        }
