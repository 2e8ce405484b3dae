"""Long vectors are walked in pieces that stay in the processor's cache; used by `mix` and `wire`.

Several passes over one piece of 2^18 float32 (1 MiB) cost about as much as one pass over main memory.
Scratch is kept per thread, so no call allocates it anew and no two threads share it.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

__all__ = ["CHUNK", "DOT_CHUNK", "WALK", "scratch_f64", "scratch_u32", "spans"]

CHUNK = 1 << 18
"""Elements per piece."""

WALK = 1 << 16
"""Elements per piece where several passes over it are made: three of them fit the second-level cache."""

DOT_CHUNK = 1 << 13
"""Elements per piece where BLAS sums them: from 10,000 on OpenBLAS starts threads, which costs more here."""


class _Scratch(threading.local):
    """One thread's preallocated pieces."""

    def __init__(self) -> None:
        self.u32: npt.NDArray[np.uint32] = np.empty(CHUNK, np.uint32)
        self.f64: npt.NDArray[np.float64] = np.empty(DOT_CHUNK, np.float64)


_scratch = _Scratch()


def spans(size: int, chunk: int = CHUNK) -> Iterator[slice]:
    """Yield the slices that cover ``size`` elements, ``chunk`` at a time."""
    for start in range(0, size, chunk):
        yield slice(start, min(start + chunk, size))


def scratch_u32(size: int) -> npt.NDArray[np.uint32]:
    """This thread's integer scratch, ``size <= CHUNK`` elements; the next call hands out the same."""
    return _scratch.u32[:size]


def scratch_f64(size: int) -> npt.NDArray[np.float64]:
    """This thread's float64 scratch, ``size <= DOT_CHUNK`` elements; the next call hands out the same."""
    return _scratch.f64[:size]
