"""What a step of `bench_pipeline.py` keeps in memory: the process as a whole, and autograd alone."""

from __future__ import annotations

import ctypes
import gc
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

__all__ = ["Kept", "Memory"]


class Memory:
    """The most memory that was taken at once, beyond what was taken when this was made.

    Counts resident memory of the process; where there is a GPU, what torch has allocated on it.

    Args:
        device: where the model is.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._base = self._now()

    def begin(self) -> None:
        """Forget what was the most so far."""
        _tidy()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
        else:
            Path("/proc/self/clear_refs").write_text("5")

    def peak_bytes(self) -> int:
        """Return the most since `begin`."""
        return (torch.cuda.max_memory_allocated() if self._cuda else _status_bytes("VmHWM")) - self._base

    def _now(self) -> int:
        _tidy()
        return torch.cuda.memory_allocated() if self._cuda else _status_bytes("VmRSS")


class Kept:
    """Counts, while it is entered, the memory that autograd keeps from forward to backward.

    What several operations keep of one piece of memory counts once.

    Args:
        parameters: their memory is not counted.

    Attributes:
        peak_bytes: the most at once.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self.peak_bytes = 0
        self._nbytes = 0
        self._parameters = {_address(tensor) for tensor in parameters}
        self._times: Counter[int] = Counter()
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def __enter__(self) -> Self:
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> object:
        if _address(tensor) in self._parameters:
            return tensor
        return _Saved(self, tensor)

    def add(self, tensor: Tensor, times: int) -> None:
        """Note that a tensor is kept once more, or once less."""
        address, nbytes = _address(tensor), tensor.untyped_storage().nbytes()
        before, after = self._times[address], self._times[address] + times
        self._times[address] = after
        self._nbytes += nbytes * ((after > 0) - (before > 0))
        self.peak_bytes = max(self.peak_bytes, self._nbytes)


class _Saved:
    """A tensor that autograd keeps."""

    def __init__(self, kept: Kept, tensor: Tensor) -> None:
        self.tensor = tensor
        self._kept = kept
        kept.add(tensor, 1)

    def __del__(self) -> None:
        self._kept.add(self.tensor, -1)


def _unpack(saved: object) -> Tensor:
    if isinstance(saved, _Saved):
        return saved.tensor
    assert isinstance(saved, Tensor)  # noqa: S101 - `Kept` packed it
    return saved


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _status_bytes(name: str) -> int:
    found = re.search(rf"^{name}:\s*(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise RuntimeError(f"/proc/self/status has no {name}")
    return int(found[1]) << 10


def _tidy() -> None:
    """Give free memory back, so that what was needed before doesn't count."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
