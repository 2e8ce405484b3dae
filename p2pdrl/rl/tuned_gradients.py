"""Accumulation in the number of microbatches that proves fastest on this machine, within its memory.

``Tuner`` decides from measured times; ``Tuned`` computes gradients, looks at the clock and reports to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Generic

import torch
from torch import Tensor

from p2pdrl.errors import ConfigError
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Forward, Minibatch, Objective, Outputs, accumulate

__all__ = ["ActivationLimitError", "Meter", "Tuned", "Tuner", "limited"]

FIRST_CANDIDATES = (1, 2, 4, 8)
WARM_UP = 1
"""Measurements of each candidate that are forgotten: the first one pays for what is made only once."""
REPEATS = 5
"""Measurements of each candidate that count, by their median."""


class Tuner:
    """Tries candidates in turn, so that a machine that slows down does so for all of them.

    More microbatches need less memory: a number that was too small takes all smaller ones with it. Where
    none of the first is left, it goes on doubling until one fits.

    Args:
        most: no more microbatches than this: the batch's length.

    Example:
        >>> tuner = Tuner(most=2)
        >>> while not tuner.done:
        ...     tuner.took({1: 0.5, 2: 0.25}[tuner.microbatches])
        >>> tuner.microbatches
        2
    """

    def __init__(self, most: int) -> None:
        self._most = max(most, 1)
        self._times_s: dict[int, list[float]] = {n: [] for n in FIRST_CANDIDATES if n <= self._most}
        self._picked: int | None = None

    @property
    def done(self) -> bool:
        """Whether every candidate was measured often enough."""
        return self._picked is not None

    @property
    def microbatches(self) -> int:
        """The number to use next: a candidate to measure, and the fastest once that is done."""
        if self._picked is not None:
            return self._picked
        return min(self._times_s, key=lambda n: (len(self._times_s[n]), n))

    @property
    def warming(self) -> bool:
        """Whether the next measurement is one that doesn't count."""
        return len(self._times_s[self.microbatches]) < WARM_UP

    @property
    def medians_s(self) -> dict[int, float]:
        """Median time of each candidate that was measured, in seconds per row."""
        counted = {n: times_s[WARM_UP:] for n, times_s in self._times_s.items()}
        return {n: median(times_s) for n, times_s in counted.items() if times_s}

    def took(self, seconds_per_row: float) -> None:
        """Say how long ``microbatches`` took."""
        if self.done:
            return
        self._times_s[self.microbatches].append(seconds_per_row)
        if all(len(times_s) >= WARM_UP + REPEATS for times_s in self._times_s.values()):
            medians_s = self.medians_s
            self._picked = min(medians_s, key=lambda n: (medians_s[n], n))

    def did_not_fit(self) -> bool:
        """Say that ``microbatches`` took too much memory; return whether there is another candidate."""
        failed = self.microbatches
        left = {n: times_s for n, times_s in self._times_s.items() if n > failed}
        if not left and failed >= self._most:
            return False
        self._times_s = left or {min(2 * failed, self._most): []}
        self._picked = None
        return True


class ActivationLimitError(ConfigError):
    """A gradient takes more memory than it may."""

    def __init__(self, taken_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"a gradient's activations take {taken_bytes} bytes, "
            f"node.learner.activation_limit_bytes allows {limit_bytes}; raise it"
        )


class Meter:
    """Counts the bytes of what autograd keeps for the backward pass, and raises beyond a limit.

    The hooks that it is made for (``torch.autograd.graph.saved_tensors_hooks``) wrap each tensor kept in
    an object whose end says that it was let go. Tensors of the same memory count once.

    Args:
        limit_bytes: the most there may be at a time.
        free: memory that is there anyway, such as the parameters: an address range, from and to.

    Attributes:
        peak_bytes: the most there was.
    """

    def __init__(self, limit_bytes: int, free: range) -> None:
        self._limit_bytes = limit_bytes
        self._free = free
        self._keepers: dict[tuple[int, int], int] = {}
        self._bytes = 0
        self.peak_bytes = 0

    def keep(self, tensor: Tensor) -> KeptTensor:
        """Count a tensor in.

        Raises:
            ActivationLimitError: that was one too many.
        """
        kept = KeptTensor(tensor, self)
        if tensor.data_ptr() not in self._free:
            self._keepers[kept.memory] = self._keepers.get(kept.memory, 0) + 1
            if self._keepers[kept.memory] == 1:
                self._bytes += kept.memory[1]
                self.peak_bytes = max(self.peak_bytes, self._bytes)
        if self._bytes > self._limit_bytes:
            raise ActivationLimitError(self._bytes, self._limit_bytes)
        return kept

    def let_go(self, memory: tuple[int, int]) -> None:
        """Count a tensor out."""
        keepers = self._keepers.pop(memory, 0)
        if keepers > 1:
            self._keepers[memory] = keepers - 1
        elif keepers == 1:
            self._bytes -= memory[1]


class KeptTensor:
    """A tensor that autograd keeps.

    Attributes:
        tensor: it, without its history.
        memory: its address and length in bytes.
    """

    __slots__ = ("_meter", "memory", "tensor")

    def __init__(self, tensor: Tensor, meter: Meter) -> None:
        # detached: an operation that keeps its own output would else be kept by it in turn, for ever
        self.tensor = tensor.detach()
        self.memory = tensor.data_ptr(), tensor.nbytes
        self._meter = meter

    def __del__(self) -> None:
        self._meter.let_go(self.memory)


@contextmanager
def limited(limit_bytes: int, parameters_D: Tensor) -> Iterator[None]:
    """Hold what is computed inside to so many bytes of activations.

    On a GPU the allocator is asked afterwards how much there was at the peak; elsewhere what autograd keeps
    is counted and the limit ends the computation at once. Inside of checkpointed blocks only the former sees
    anything.

    Args:
        limit_bytes: 0 is no limit.
        parameters_D: on the device that computes.

    Raises:
        ActivationLimitError: it took more; on a GPU the work is done by then.
    """
    if limit_bytes == 0:
        yield
    elif parameters_D.is_cuda:
        before = torch.cuda.memory_allocated(parameters_D.device)
        torch.cuda.reset_peak_memory_stats(parameters_D.device)
        yield
        taken = torch.cuda.max_memory_allocated(parameters_D.device) - before
        if taken > limit_bytes:
            raise ActivationLimitError(taken, limit_bytes)
    else:
        begin = parameters_D.data_ptr()
        meter = Meter(limit_bytes, range(begin, begin + parameters_D.nbytes))
        with torch.autograd.graph.saved_tensors_hooks(meter.keep, _tensor):
            yield


def _tensor(kept: KeptTensor) -> Tensor:
    return kept.tensor


class Tuned(Generic[Outputs]):
    """Measures 1, 2, 4 and 8 microbatches, six times each, and stays with the fastest.

    A number whose activations don't fit, in the device's memory or under the limit, is passed over;
    where none of the four fits, more are tried. If the choice fails later, with a larger batch, the
    next one takes over.

    Args:
        limit_bytes: bound on the memory of activations, as far as ``limited`` sees it; 0 is none.
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
