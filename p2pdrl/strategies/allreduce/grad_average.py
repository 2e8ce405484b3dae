"""Data parallelism: the mean of everybody's gradients goes to every learner, and all take the same step.

A worker's gradient is a mean over its samples, so weighted by samples the average is the gradient of the
one big batch. Everybody steps with the same bits, and at the same learning rate (the lower median of what the
givers would take), from the same state, so replicas stay equal without ever sending parameters (PyTorch
DDP, Li 2020, arXiv 2006.15704; Horovod, Sergeev 2018, arXiv 1802.05799). All collect at the same time, too
(`group.round_collector`). ``reduce`` has each member count the same instead, or adds gradients up: a sum is
the mean of those who gave one, times their number.

All must begin with the same parameters and optimizer state. When the mode begins, a first round, always in
float32, averages everybody's parameters; the member with most steps begins with that mean and its own
optimizer's state, and all others adopt both from it. So the mean of all members is what it was. A member
that missed a step, whose learner was started anew, or whose state the node replaced, adopts a member's
state while that one stands still before its next step.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pdrl.config.strategy import GradAverageConfig
from p2pdrl.strategies.allreduce.averager import NOTHING, Average, RoundContribution, RoundQuantity
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest, StrategyContext
from p2pdrl.tensors.mix import check_finite

__all__ = ["AveragedGradients"]


class AveragedGradients(RoundQuantity):
    """The learners' gradients."""

    led = True
    seeded = True
    synchronous = True

    def __init__(self, config: GradAverageConfig, context: StrategyContext) -> None:
        self._reduce = config.reduce
        self._learner, self._max_abs = context.learner, context.max_abs

    async def part(self, request: LearnerRequest, number: int, members: Sequence[str]) -> RoundContribution:
        """The gradient with what it counts for; see `RoundQuantity`."""
        del number, members
        vector = request.vector
        rate = self._learner.learning_rate
        if vector is None or request.samples <= 0:
            return NOTHING._replace(
                policy_version=request.policy_version, learning_rate=rate, left=request.left
            )
        await heavy(vector.nbytes, lambda: check_finite(vector, self._max_abs))
        weight = float(request.samples) if self._reduce == "count" else 1.0
        return RoundContribution(vector, weight, request.policy_version, rate, request.left)

    async def apply(
        self, request: LearnerRequest | None, average: Average, number: int
    ) -> tuple[AnswerKind, float]:
        """Put the mean, or sum, in the gradient's place; told is the learning rate times its norm."""
        del number
        vector = None if request is None else request.vector
        if vector is None:
            return "none", 0.0
        given = sum(weight > 0 for weight in average.weights)
        times = np.float32(max(given, 1) if self._reduce == "sum" else 1)
        changed = average.learning_rate * average.norm * float(times)
        if len(average.weights) == 1 and average.total:
            return "none", changed
        await heavy(vector.nbytes, lambda: np.multiply(average.vector, times, out=vector))
        return "replace", changed
