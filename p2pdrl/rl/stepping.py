"""What becomes of a gradient: one seam between the algorithms and whoever applies what they found.

``algorithms`` compute a mean gradient and hand it to their stepper, once per gradient. By default the
learner steps by itself (``OwnStepper``); a strategy that merges gradients with peers first, or lets a
server step, comes in as another stepper (``workers.requests``), and no algorithm knows of it.

Shape suffix: D parameters.
"""

from __future__ import annotations

import math
from typing import Protocol

from p2pdrl.rl.flat import FlatSpan
from p2pdrl.rl.optimizers import Optimizer, clip_gradients

__all__ = ["OwnStepper", "Stepper"]


class Stepper(Protocol):
    """Does what is to be done with a gradient. Clipping is part of it: algorithms never clip."""

    @property
    def ends_update(self) -> bool:
        """Whether the update is to end with the last gradient: peers in step with us begin theirs anew.

        An algorithm that would go on to further gradients asks after each ``step``.
        """
        ...

    def step(
        self,
        flat: FlatSpan,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Use the gradient in ``flat.gradients_D``; parameters have moved, or haven't, on return.

        Args:
            flat: parameters and the mean gradient; both may be changed in place.
            optimizer: over the same two tensors.
            learning_rate: after annealing.
            max_grad_norm: bound on the gradient's Euclidean norm.
            samples: rows that the gradient is the mean over: valid environment steps. n gradients of
                n batches weighted by it average to the gradient of the batches put together.
            left: gradients of the same update that come after this one, at least 0.

        Returns:
            The gradient's norm before it was clipped; infinite or NaN when the step was skipped.
        """
        ...


class OwnStepper:
    """Clips and steps at once: a learner that depends on nobody."""

    ends_update = False

    def step(
        self,
        flat: FlatSpan,
        optimizer: Optimizer,
        *,
        learning_rate: float,
        max_grad_norm: float,
        samples: int,
        left: int,
    ) -> float:
        """Clip the gradient, move the parameters, return the norm.

        A gradient whose norm isn't finite is dropped: one bad batch must not poison the
        parameters, here and at every peer.
        """
        norm = clip_gradients(flat.gradients_D, max_grad_norm)
        if math.isfinite(norm):
            optimizer.step(learning_rate)
        return norm
