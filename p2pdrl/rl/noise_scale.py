"""How large a batch is worth its data: the gradient noise scale (McCandlish 2018, arXiv 1812.06162).

The mean gradient over B rows has the expected squared norm E|G_B|² = |G|² + tr(Σ) / B, with G the true
gradient and Σ the covariance of one row's. Two sizes of batch, a minibatch and its parts, give both unknowns
(appendix A.1), and B = tr(Σ) / |G|², in rows, is the batch from which on more rows mostly repeat what is
known: with it a task takes twice the least number of steps, and twice the least number of rows.

Both sizes are taken at the same parameters. Gradients that follow each other aren't: each step makes the next
gradient point the other way a little, and one after the other they add up to less than nothing (PPO on
MinAtar's Breakout: |G|² came out negative, where parts of one minibatch give a B of 400 to 6,000 rows).
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["EVERY", "PARTS", "NoiseScale"]

PARTS = 4
"""Of a minibatch, whose gradients are computed by themselves."""
EVERY = 127
"""One gradient of so many is looked at: it costs a few small ones more. A prime, so that looks fall on each
place in an update in turn: its last gradients are of data that is learned already, and have little signal."""
DECAY = 0.9
"""Of the running means of both unknowns, which a single minibatch tells but roughly."""


class NoiseScale:
    """Estimates B from looks at single minibatches.

    Attributes:
        rows: B, the critical batch; None while it isn't known.
    """

    def __init__(self) -> None:
        self.rows: float | None = None
        self._asked = 0
        self._signal = self._noise = 0.0

    def due(self) -> bool:
        """Count one gradient; tell whether its parts are to be looked at."""
        self._asked += 1
        return self._asked % EVERY == 0

    def note(self, parts: Sequence[tuple[float, float]], whole: float) -> None:
        """Note the gradient of one minibatch.

        Args:
            parts: of each part, the squared norm of its mean gradient, and its rows.
            whole: squared norm of the mean gradient of all of them.
        """
        large = sum(rows for _, rows in parts)
        small = large / max(len(parts), 1)
        if len(parts) < 2 or large <= 0:
            return
        one = sum(square for square, _ in parts) / len(parts)
        if not one < float("inf"):
            return
        signal = (large * whole - small * one) / (large - small)
        noise = (one - whole) / (1.0 / small - 1.0 / large)
        self._signal = DECAY * self._signal + (1.0 - DECAY) * signal
        self._noise = DECAY * self._noise + (1.0 - DECAY) * noise
        self.rows = self._noise / self._signal if self._signal > 0 and self._noise > 0 else None
