"""Supervised regression: the smallest thing that a swarm can train.

Strategies are measured and checked on it against serial gradient descent, without the noise of reinforcement
learning. Minus the loss on the evaluation's rows counts as the return of an episode. Both objectives have one
target, ``targets``, and one term: the loss itself.

Shape suffixes: D parameters, R rows, N or B rows of a batch, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from p2pdrl.config.task import RegressionConfig
from p2pdrl.rl.algorithms.algorithm import Algorithm, Loss
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import GradientEngine, Minibatch, Objective, Summed
from p2pdrl.rl.networks.layers import Dense, give_memory, in_pairs, initialise, mlp
from p2pdrl.rl.sources.rows import DataRows, RowBatch
from p2pdrl.tensors.optimizers import SGD, Adagrad, Adam, Momentum, RMSProp, UpdateRule

__all__ = [
    "TARGETS",
    "CrossEntropy",
    "LeastSquares",
    "Regression",
    "RegressionEvaluation",
    "regression_layers",
    "regression_model",
]

TARGETS = "targets"
NOTHING_S = 0.002
"""What an update without rows takes at least: a learner that waits for nobody would do thousands a second."""


@dataclass(frozen=True)
class LeastSquares(Summed):
    """Half the squared error of a model with one output per row."""

    target_names: ClassVar[tuple[str, ...]] = (TARGETS,)
    terms: ClassVar[int] = 1

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss over outputs N x 1 and float targets N, summed, and it again as the term."""
        loss = 0.5 * self.total((outputs.squeeze(-1) - targets[TARGETS]).square(), targets)
        return loss, loss.detach().unsqueeze(0)


@dataclass(frozen=True)
class CrossEntropy(Summed):
    """Minus the log-probability of the right class under softmax."""

    target_names: ClassVar[tuple[str, ...]] = (TARGETS,)
    terms: ClassVar[int] = 1

    def __call__(self, outputs: Tensor, targets: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the loss over logits NC and classes N (int64), summed, and it again as the term."""
        loss = self.total(nn.functional.cross_entropy(outputs, targets[TARGETS], reduction="none"), targets)
        return loss, loss.detach().unsqueeze(0)


class Regression(Algorithm[RowBatch]):
    """One gradient step per batch; one loss.

    Args:
        delay_s: seconds slept at each update, on top of ``min_update_s``.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        config: RegressionConfig,
        flat: FlatModule,
        engine: GradientEngine[Tensor],
        *,
        delay_s: float,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        self._config = config
        self._delay_s = delay_s
        self._clock = clock
        self._sleep = sleep
        objective: Objective[Tensor] = CrossEntropy() if config.kind == "classifier" else LeastSquares()
        self._loss = Loss(objective, _update_rule(config), flat, engine, max_grad_norm=config.max_grad_norm)
        self.losses = (self._loss,)

    def update(self, batch: RowBatch) -> dict[str, float]:
        """Compute one gradient, take as long as was asked for, and step."""
        start, config = self._clock(), self._config
        rows = len(batch.inputs_BF)
        least_s = config.min_update_s
        if rows:
            loss = float(self._loss.gradients(Minibatch(batch.inputs_BF, {TARGETS: batch.targets_B}, rows)))
        else:  # no shard is this learner's: it goes on with what others find
            loss, least_s = 0.0, max(least_s, NOTHING_S)
            for _, gradients_D in self._loss.optimizer.span.pieces:
                gradients_D.zero_()
        rest_s = max(least_s - (self._clock() - start), 0.0) + self._delay_s
        if rest_s > 0.0:
            self._sleep(rest_s)
        learning_rate = self.learning_rate(config.learning_rate, config.anneal)
        norm = self._loss.apply(learning_rate, samples=rows)
        finite = math.isfinite(norm)
        return {
            "loss": loss,
            "gradient_norm": norm if finite else 0.0,
            "learning_rate": learning_rate,
            "gradient_steps": float(finite),
            "skipped_steps": float(not finite),
        }


class RegressionEvaluation:
    """The loss on held-out rows, every ``evaluate_every`` updates."""

    def __init__(
        self, config: RegressionConfig, model: nn.Module, rows: DataRows, device: torch.device
    ) -> None:
        self._config = config
        self._model = model
        self._objective: Objective[Tensor] = CrossEntropy() if config.kind == "classifier" else LeastSquares()
        self._inputs_RF = torch.from_numpy(rows.inputs_RF).to(device)
        self._targets_R = torch.from_numpy(rows.targets_R).to(device)
        self._unseen_updates = 0
        self.figures = self._evaluate()

    def __call__(self) -> list[tuple[float, int]]:
        """Count an update; return the evaluation as an episode (return, rows since the last) if it is due."""
        self._unseen_updates += 1
        if self._unseen_updates < self._config.evaluate_every:
            return []
        self.figures = self._evaluate()
        rows, self._unseen_updates = self._unseen_updates * self._config.batch_size, 0
        return [(-self.figures["evaluation_loss"], rows)]

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        outputs = self._model(self._inputs_RF)
        loss, _ = self._objective.over(len(self._targets_R))(outputs, {TARGETS: self._targets_R})
        figures = {"evaluation_loss": float(loss)}
        if self._config.kind == "classifier":
            right_R = outputs.argmax(1) == self._targets_R
            figures["accuracy"] = float(right_R.to(torch.float32).mean())
        return figures


def regression_model(config: RegressionConfig, seed: int) -> nn.Module:
    """Return the model, with initial weights of the seed."""
    if config.kind == "classifier":
        widths = (config.features, *config.hidden)
        classifier = nn.Sequential(mlp(widths, "tanh"), Dense(widths[-1], config.classes, 0.01))
        initialise(classifier, torch.Generator().manual_seed(seed))
        return classifier
    model = nn.Linear(config.features, 1, bias=False, device="meta")
    give_memory(model)
    nn.init.zeros_(model.weight)
    return model


def regression_layers(model: nn.Module) -> list[nn.Module]:
    """Return the model's dense layers, each with the non-linearity behind it."""
    if isinstance(model, nn.Sequential):
        hidden, last = model
        assert isinstance(hidden, nn.Sequential)  # noqa: S101 - as regression_model made it
        return [*in_pairs(hidden), last]
    return [model]


def _update_rule(config: RegressionConfig) -> UpdateRule:
    match config.optimizer:
        case "sgd":
            return SGD(sparse=config.kind == "least_squares" and config.density < 1.0)
        case "momentum":
            return Momentum(config.momentum, config.nesterov)
        case "rmsprop":
            return RMSProp(config.decay, config.eps)
        case "adagrad":
            return Adagrad(eps=config.eps)
        case "adam":
            return Adam(eps=config.eps)
