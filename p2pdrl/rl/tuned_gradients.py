"""Accumulation in the number of microbatches that proves fastest on this machine.

What takes least time depends on caches, on kernels and on what else the machine does; nothing but measuring
tells. Gradients are the same but for rounding, so the first updates serve as measurements and nothing is
thrown away.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic

import torch
from torch import Tensor

from p2pdrl.rl.activations import ActivationLimitError, limited
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, Minibatch, accumulate
from p2pdrl.rl.objectives.objective import Objective, Outputs
from p2pdrl.rl.tuner import Tuner

__all__ = ["Tuned"]


class Tuned(Generic[Outputs]):
    """Measures 1, 2, 4 and 8 microbatches, six times each, and stays with the fastest.

    A number whose activations don't fit, in the device's memory or under the limit, is passed over;
    where none of the four fits, more are tried. If the choice fails later, with a larger batch, the
    next one takes over.

    Args:
        flat: gets the gradients.
        forward: runs the model.
        limit_bytes: bound on the memory of activations, as far as ``activations.limited`` sees it; 0 is none.
        clock: seconds, monotonic.
        say: told what was picked, and why.
    """

    def __init__(
        self,
        flat: FlatModule,
        forward: Forward[Outputs],
        *,
        limit_bytes: int = 0,
        clock: Callable[[], float] = time.perf_counter,
        say: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._flat = flat
        self._forward = forward
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._say = say
        self._tuner: Tuner | None = None

    @property
    def tuner(self) -> Tuner | None:
        """What was measured so far; None before the first gradient."""
        return self._tuner

    def gradients(self, batch: Minibatch, objective: Objective[Outputs]) -> Tensor:
        """See ``gradients.GradientEngine.gradients``.

        Raises:
            torch.OutOfMemoryError: there is no room even for one row at a time.
            ActivationLimitError: one row at a time is beyond the limit.
        """
        if self._tuner is None:
            self._tuner = Tuner(len(batch.inputs))
        tuner = self._tuner
        while True:
            terms = self._measured(tuner, batch, objective)
            if terms is not None:
                return terms
            # here the exception is gone, and with it what its frames held
            if self._flat.device.type == "cuda":
                torch.cuda.empty_cache()

    def metrics(self) -> dict[str, float]:
        """Return the number of microbatches of the next gradient."""
        return {} if self._tuner is None else {"microbatches": float(self._tuner.microbatches)}

    def _measured(self, tuner: Tuner, batch: Minibatch, objective: Objective[Outputs]) -> Tensor | None:
        """Return the terms, or None when there wasn't room and another number is to be tried."""
        microbatches, tuning = tuner.microbatches, not tuner.done
        # counting costs time, so only measurements that don't count are counted
        limit_bytes = self._limit_bytes if tuning and tuner.warming else 0
        begin = self._now() if tuning else 0.0
        try:
            with limited(limit_bytes, self._flat.parameters_D):
                terms = accumulate(self._flat, self._forward, batch, objective, microbatches)
        except (torch.OutOfMemoryError, ActivationLimitError) as error:
            if not tuner.did_not_fit():
                raise
            why = "limit on activations" if isinstance(error, ActivationLimitError) else "memory"
            self._say(f"microbatches = {microbatches} goes beyond the {why}, trying {tuner.microbatches}")
            return None
        if tuning:
            tuner.took((self._now() - begin) / max(batch.rows, 1))
            if tuner.done:
                times = ", ".join(f"{n}: {1e6 * s:.1f}" for n, s in tuner.medians_s.items())
                self._say(f"microbatches = {tuner.microbatches} (µs a row with {times})")
        return terms

    def _now(self) -> float:
        if self._flat.device.type == "cuda":
            torch.cuda.synchronize(self._flat.device)
        return self._clock()
