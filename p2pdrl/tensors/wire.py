"""float32 and bfloat16 on the wire, and the pieces in which long vectors are walked.

Both peers must mix the same rounded values, or the pair's sum drifts: so a sender mixes with the
`round_trip` of its own vector, which is what its peer decodes.

Several passes over one piece of 2^18 float32 (1 MiB) cost about as much as one pass over main memory.
Scratch is kept per thread, so no call allocates it anew and no two threads share it.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.tensors.layout import Float32Array, check_vector

__all__ = [
    "CHUNK",
    "DOT_CHUNK",
    "WALK",
    "WireDtype",
    "as_wire",
    "decode",
    "decode_span",
    "encode",
    "encode_rounding_span",
    "encoded_nbytes",
    "round_trip",
    "scratch_f64",
    "scratch_u32",
    "spans",
]

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


WireDtype = Literal["float32", "bf16"]

_BYTES = {"float32": 4, "bf16": 2}


def encoded_nbytes(size: int, dtype: WireDtype) -> int:
    """Bytes that ``size`` elements take."""
    if dtype not in _BYTES:
        raise WireError(f"the wire carries {' or '.join(_BYTES)}, not {dtype!r}")
    return size * _BYTES[dtype]


def encode(vector: Float32Array, dtype: WireDtype, out: bytearray | memoryview) -> None:
    """Write ``vector`` into ``out``, which has exactly `encoded_nbytes` bytes."""
    check_vector(vector, vector.size, "the vector to send")
    expected, have = encoded_nbytes(vector.size, dtype), memoryview(out).nbytes
    if have != expected:
        raise LayoutMismatchError(f"{dtype} of {vector.size} elements takes {expected} bytes, not {have}")
    if dtype == "float32":
        np.copyto(np.frombuffer(out, "<f4"), vector)
        return
    wire: npt.NDArray[np.uint16] = np.frombuffer(out, "<u2")
    for span in spans(vector.size):
        rounded = _rounded(vector[span])
        np.right_shift(rounded, 16, out=rounded)
        np.copyto(wire[span], rounded, casting="unsafe")


def decode(buffer: bytes | bytearray | memoryview, dtype: WireDtype, out: Float32Array) -> None:
    """Read the vector in ``buffer`` into ``out``.

    Raises:
        WireError: the buffer's length doesn't fit, or ``dtype`` is unknown.
    """
    check_vector(out, out.size, "the vector to receive into")
    source = as_wire(buffer, dtype, out.size)
    for span in spans(out.size):
        decode_span(source, dtype, span, out[span])


def encode_rounding_span(piece: Float32Array, wire: npt.NDArray[np.uint16]) -> None:
    """Encode at most `WALK` elements as bfloat16, and leave in them what the peer will decode; for walks."""
    rounded = _rounded(piece)
    np.bitwise_and(rounded, 0xFFFF0000, out=piece.view(np.uint32))
    np.right_shift(rounded, 16, out=rounded)
    np.copyto(wire, rounded, casting="unsafe")


def decode_span(source: npt.NDArray[Any], dtype: WireDtype, span: slice, out: Float32Array) -> None:
    """Decode the elements of ``span`` of `as_wire` into ``out``; for walks that do more with each piece."""
    if dtype == "float32":
        np.copyto(out, source[span])
        return
    bits = out.view(np.uint32)
    np.copyto(bits, source[span])
    np.left_shift(bits, 16, out=bits)


def as_wire(buffer: bytes | bytearray | memoryview, dtype: WireDtype, size: int) -> npt.NDArray[Any]:
    """View a buffer as the ``size`` elements that it holds.

    Raises:
        WireError: the buffer's length doesn't fit, or ``dtype`` is unknown.
    """
    expected, have = encoded_nbytes(size, dtype), memoryview(buffer).nbytes
    if have != expected:
        raise WireError(f"a {dtype} vector of {size} elements takes {expected} bytes, {have} came")
    return np.frombuffer(buffer, "<f4" if dtype == "float32" else "<u2")


def round_trip(vector: Float32Array, dtype: WireDtype, out: Float32Array) -> None:
    """Write into ``out`` what the peer will decode; ``out`` may be ``vector``."""
    check_vector(vector, vector.size, "the vector")
    check_vector(out, vector.size, "the output")
    encoded_nbytes(0, dtype)
    if dtype == "float32":
        np.copyto(out, vector)
        return
    bits = out.view(np.uint32)
    for span in spans(vector.size):
        np.bitwise_and(_rounded(vector[span]), 0xFFFF0000, out=bits[span])


def _rounded(piece: Float32Array) -> npt.NDArray[np.uint32]:
    """Round to bfloat16, left in the high half of each word (the low half is rubbish); thread's scratch.

    Nearest even: add 0x7FFF, and one more when the lowest kept bit is set. A NaN would carry over into
    the sign, so it is replaced by the quiet NaN of its sign.
    """
    bits = piece.view(np.uint32)
    rounded = scratch_u32(piece.size)
    np.right_shift(bits, 16, out=rounded)
    np.bitwise_and(rounded, 1, out=rounded)
    np.add(rounded, 0x7FFF, out=rounded)
    np.add(rounded, bits, out=rounded)
    if np.isnan(piece.max()):
        nan = np.isnan(piece)
        rounded[nan] = (bits[nan] & 0x80000000) | 0x7FC00000
    return rounded
