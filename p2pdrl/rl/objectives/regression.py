"""The losses of regressions on made-up data; ``algorithms.regression`` makes them.

Both have one target, ``targets``, and one term: the loss itself.

Shape suffixes: N rows, C classes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from p2pdrl.rl.objectives.objective import Summed

__all__ = ["TARGETS", "CrossEntropy", "LeastSquares"]

TARGETS = "targets"


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
