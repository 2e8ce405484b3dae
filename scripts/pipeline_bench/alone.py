"""One process of `bench_pipeline.py` that has the whole model."""

from __future__ import annotations

from typing import Any

from p2pdrl.rl.engines import policy_forward
from p2pdrl.rl.gradients import OwnStepper, accumulate
from pipeline_bench.model import OBJECTIVE, Model
from pipeline_bench.talk import LEARNING_RATE, MAX_GRAD_NORM, Stopwatch, Trial

__all__ = ["Alone"]


class Alone:
    """Whole batches, or microbatches one after the other. See `Contender`.

    Args:
        model: what learns.
    """

    def __init__(self, model: Model) -> None:
        self._model = model
        self._forward = policy_forward(model.policy, model.parts.precision)
        self._stepper = OwnStepper()

    def meet(self, **options: Any) -> None:
        """There is nobody."""

    def prepare(self, trial: Trial) -> None:
        """Nothing to prepare."""

    def run(self, trial: Trial, watch: Stopwatch) -> dict[str, Any]:
        """See `Contender`."""
        flat, parts, batch = self._model
        watch.begin()
        for _ in range(trial.steps):
            accumulate(flat, self._forward, batch, OBJECTIVE, trial.microbatches)
            norm = self._stepper.step(
                parts.optimizer,
                learning_rate=LEARNING_RATE,
                max_grad_norm=MAX_GRAD_NORM,
                samples=batch.rows,
                left=0,
            )
            watch.stepped(norm)
        return {}

    def close(self) -> None:
        """Nothing to free."""
