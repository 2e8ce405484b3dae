"""How large a batch is worth its data: the gradient noise scale (McCandlish 2018, arXiv 1812.06162).

The mean gradient over B rows has the expected squared norm E|G_B|² = |G|² + tr(Σ) / B, with G the true
gradient and Σ the covariance of one row's. Two sizes of batch, one gradient and the mean of several, give
both unknowns (appendix A.1), and B = tr(Σ) / |G|², in rows, is the batch from which on more rows mostly
repeat what is known: with it a task takes twice the least number of steps, and twice the least number of
rows. Gradients that follow each other stand for gradients at one point here, so it is an estimate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["NoiseScale"]

GRADIENTS = 16
"""That the larger batch is made of."""
EVERY = 8
"""Of so many windows of `GRADIENTS` one is looked at: it costs a vector's sum and norm for each gradient."""
DECAY = 0.9
"""Of the running means of both unknowns, which a single window tells but roughly."""


class NoiseScale:
    """Watches gradients as they are computed.

    Attributes:
        rows: B, the critical batch; None while it isn't known.
    """

    def __init__(self) -> None:
        self.rows: float | None = None
        self._asked = 0
        self._sum_D: list[Tensor] = []
        self._squares: Tensor | None = None
        self._rows: list[int] = []
        self._signal = self._noise = 0.0

    def note(self, gradients: Sequence[Tensor], rows: int) -> None:
        """Note one gradient, in pieces, the mean over ``rows``."""
        watched = self._asked // GRADIENTS % EVERY == 0
        self._asked += 1
        if not watched or rows == 0:
            return
        square = torch.stack([piece.square().sum() for piece in gradients]).sum()
        if not self._rows:
            self._sum_D = [piece.clone() for piece in gradients]
            self._squares = square
        else:
            for total, piece in zip(self._sum_D, gradients, strict=True):
                total.add_(piece)
            self._squares = square if self._squares is None else self._squares + square
        self._rows.append(rows)
        if self._asked % GRADIENTS == 0:
            self._conclude()

    def _conclude(self) -> None:
        """Make an estimate of a window, and forget it."""
        count, squares = len(self._rows), self._squares
        small = sum(self._rows) / max(count, 1)
        whole = sum(float(total.square().sum()) for total in self._sum_D) / max(count, 1) ** 2
        self._rows, self._sum_D, self._squares = [], [], None
        if count < 2 or squares is None:
            return
        one, large = float(squares) / count, count * small
        if not one < float("inf"):
            return
        signal = (large * whole - small * one) / (large - small)
        noise = (one - whole) / (1.0 / small - 1.0 / large)
        self._signal = DECAY * self._signal + (1.0 - DECAY) * signal
        self._noise = DECAY * self._noise + (1.0 - DECAY) * noise
        self.rows = self._noise / self._signal if self._signal > 0 and self._noise > 0 else None
