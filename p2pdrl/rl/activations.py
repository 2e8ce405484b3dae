"""How much memory a gradient takes beyond parameters and optimizer, and a bound on it.

``tuned_gradients`` tries numbers of microbatches under such a bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from p2pdrl.errors import ConfigError

__all__ = ["ActivationLimitError", "Meter", "limited"]


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

    def keep(self, tensor: Tensor) -> Kept:
        """Count a tensor in.

        Raises:
            ActivationLimitError: that was one too many.
        """
        kept = Kept(tensor, self)
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


class Kept:
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


def _tensor(kept: Kept) -> Tensor:
    return kept.tensor
