"""Everybody's parameters are averaged each H local updates (local SGD, FedAvg; with momentum: DiLoCo).

All members agree on a vector x, which each daemon keeps. A round averages the differences Δ_k = x_k − x
that the learners made since, which may be compressed far more than parameters could be, and takes an
outer step (Douillard 2023, arXiv 2311.08105, algorithm 1; Sutskever 2013 for the Nesterov form):

    Δ = Σ w_k Δ_k / Σ w_k        v ← μ v + Δ        x ← x + lr · (Δ + μ v)   (or lr · v without nesterov)

and all learners are set to x. With lr = 1 and μ = 0 that is the plain weighted mean of the parameters
(McMahan 2017, arXiv 1602.05629). x and v come from the same bytes everywhere, so they are the same bits
everywhere; a newcomer gets both from a member.

Equal starts aren't needed: the first round averages the parameters themselves, as float32. A learner that
missed a round gives nothing to the next one: its difference would count from another x; it is set to x.

With H = 1 and plain SGD this is the same as one big batch. With Adam it isn't: the mean of the steps of n
optimizers isn't the step of one on the mean gradient, since each divides by its own second moments. On a
regression of 20 rows at four workers, 50 such steps end 0.45 times as far from where the big batch ends as
that is from the start.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from p2pdrl.config.strategy import Averaged
from p2pdrl.strategies.allreduce.averager import NOTHING, Average, RoundContribution, RoundQuantity
from p2pdrl.strategies.allreduce.federated import Privacy
from p2pdrl.strategies.offload import heavy
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest, StrategyContext
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.mix import check_finite
from p2pdrl.tensors.wire import spans

__all__ = ["AveragedParameters", "OuterOptimizer"]

CHUNK = 1 << 16


class OuterOptimizer:
    """The step along the mean difference.

    Args:
        momentum: μ; 0 keeps no v.
        nesterov: whether it looks ahead.
    """

    def __init__(self, learning_rate: float, momentum: float, *, nesterov: bool) -> None:
        self._rate, self._momentum = np.float32(learning_rate), np.float32(momentum)
        self._nesterov = nesterov

    def step(self, x: Float32Array, v: Float32Array, delta: Float32Array, own: Float32Array) -> float:
        """Move ``x``, and ``v`` where there is momentum, in place.

        Args:
            x: what all agreed on.
            v: momentum, or empty.
            own: our own difference, from the old ``x``.

        Returns:
            Norm of what our own vector has to change to be the new ``x``.
        """
        total = 0.0
        scratch = np.empty(min(CHUNK, x.size), np.float32)
        for span in spans(x.size, CHUNK):
            step = scratch[: span.stop - span.start]
            np.copyto(step, delta[span])
            if v.size:
                v[span] *= self._momentum
                v[span] += step
                if self._nesterov:
                    step += self._momentum * v[span]
                else:
                    np.copyto(step, v[span])
            step *= self._rate
            x[span] += step
            step -= own[span]
            total += float(np.sum(np.square(step), dtype=np.float64))
        return float(np.sqrt(total))


class AveragedParameters(RoundQuantity):
    """The learners' parameters, as differences from what all agreed on.

    Args:
        privacy: clips and noises the differences; a history then begins with one member's parameters, for
            nobody's own are to be seen.
    """

    seeded = False
    synchronous = False

    def __init__(self, config: Averaged, context: StrategyContext, privacy: Privacy | None = None) -> None:
        self._config, self._board, self._max_abs = config, context.learner.board, context.max_abs
        self._privacy = privacy
        self._by_samples = config.weighting == "samples" and (privacy is None or not privacy.equal)
        self.led = privacy is not None
        size = context.size
        self._outer = OuterOptimizer(
            config.outer_learning_rate, config.outer_momentum, nesterov=config.nesterov
        )
        self._kept: Float32Array = np.zeros(2 * size if config.outer_momentum else size, np.float32)
        self._x, self._v = self._kept[:size], self._kept[size:]
        self._room: Float32Array = np.empty(0, np.float32)
        self._own: Float32Array = np.zeros(size, np.float32)
        self._agreed = False
        self._apart = False

    @property
    def facts(self) -> dict[str, float | str]:
        """Figures for people."""
        return {} if self._privacy is None else self._privacy.facts

    async def found(self) -> None:
        """Begin with our own parameters."""
        await heavy(self._x.nbytes, lambda: self._board.now(self._x))
        self._v[:] = 0
        self._agreed, self._apart = True, False

    def state(self) -> Sequence[memoryview]:
        """The vector that was agreed on, and momentum."""
        return (self._kept.data.cast("B"),) if self._agreed else ()

    def room(self) -> memoryview:
        """Of the same length."""
        self._room = np.empty_like(self._kept)
        return self._room.data.cast("B")

    async def take(self) -> None:
        """Have a member's vector and momentum; our learner's next difference doesn't count."""
        room, self._room = self._room, self._room[:0]
        await heavy(room.nbytes, lambda: check_finite(room, self._max_abs))
        np.copyto(self._kept, room)
        self._agreed, self._apart = True, True

    async def part(self, request: LearnerRequest, number: int, members: Sequence[str]) -> RoundContribution:
        """What our learner changed; see `RoundQuantity`."""
        await heavy(self._own.nbytes, self._difference)
        weight = float(max(request.samples, 1)) if self._by_samples else 1.0
        own, privacy = self._own, self._privacy
        part = privacy is None or await heavy(own.nbytes, lambda: privacy.shape(own, number, members))
        if self._apart or not part:
            return NOTHING._replace(policy_version=request.policy_version)
        return RoundContribution(own, weight, request.policy_version)

    async def apply(
        self, request: LearnerRequest | None, average: Average, number: int
    ) -> tuple[AnswerKind, float]:
        """Take the outer step, and set our learner to where it leads."""
        if self._privacy is not None:
            self._privacy.ended(number, sum(weight > 0 for weight in average.weights))
        changed = 0.0
        if average.total:
            changed = await heavy(self._kept.nbytes, lambda: self._step(average))
        self._apart = request is None
        if request is None or not self._agreed:
            return "none", 0.0
        version = max(request.policy_version, *average.versions)
        await heavy(self._x.nbytes, lambda: self._board.post_set(self._x, None, version))
        return "set", changed

    def _difference(self) -> None:
        self._board.now(self._own)
        if self._agreed:
            np.subtract(self._own, self._x, out=self._own)
        check_finite(self._own, self._max_abs)

    def _step(self, average: Average) -> float:
        if self._agreed:
            return self._outer.step(self._x, self._v, average.vector, self._own)
        np.copyto(self._x, average.vector)
        np.subtract(self._x, self._own, out=self._own)
        self._v[:] = 0
        self._agreed = True
        return float(np.linalg.norm(self._own))
