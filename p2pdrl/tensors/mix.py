"""Arithmetic on whole vectors: pair averaging, norms and the poison check; in place and chunked.

Called by the strategies' exchanges, in a thread (NumPy lets other threads run meanwhile). Sums are kept in
float64: the norm of 10 M float32 summed in float32 is off in the fourth digit.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, PoisonedVectorError
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.wire import DOT_CHUNK, WALK, WireDtype, as_wire, decode_span, scratch_f64, spans

__all__ = [
    "PairFigures",
    "all_finite",
    "check_finite",
    "distance",
    "norm",
    "pair_delta",
    "pair_step",
    "square",
]


def pair_delta(mine: Float32Array, theirs: Float32Array, weight: float = 0.5, *, out: Float32Array) -> None:
    """Write ``weight * (theirs - mine)`` into ``out``: what one side of a pair adds to its vector.

    The other side computes exactly the opposite, bit for bit (IEEE subtraction and rounding are symmetric
    in sign), so the pair's sum is kept up to the rounding of the additions. AD-PSGD (Lian et al. 2018,
    algorithm 1) is ``weight = 0.5``.

    Args:
        mine: this side's values, as the other side saw them (after the wire's rounding).
        theirs: the other side's values, as they arrived.
        weight: the mixing matrix's W_ij, the same on both sides, in [0, 1].
        out: may be ``mine`` or ``theirs``.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"a mixing weight lies between 0 and 1, not at {weight}")
    check_vector(mine, mine.size, "the vector of this side")
    check_vector(theirs, mine.size, "the vector of the other side")
    check_vector(out, mine.size, "the output")
    factor = np.float32(weight)
    for span in spans(mine.size):
        np.subtract(theirs[span], mine[span], out=out[span])
        np.multiply(out[span], factor, out=out[span])


class PairFigures(NamedTuple):
    """What `pair_step` measured on its way: Euclidean norms, to about 1e-6 relative."""

    mine: float
    theirs: float
    distance: float


def pair_step(
    mine: Float32Array,
    incoming: bytes | bytearray | memoryview,
    dtype: WireDtype,
    weight: float,
    max_abs: float,
    *,
    out: Float32Array,
) -> PairFigures:
    """Decode what arrived, check it, write `pair_delta` into ``out`` and measure, in one walk over memory.

    ``mine`` is as the other side sees it, and was checked by the caller. ``out`` may lie where ``incoming``
    does when that is float32; it holds rubbish after an error.

    Raises:
        PoisonedVectorError: an element is NaN or beyond the bound.
        WireError: ``incoming`` has another length.
    """
    check_vector(mine, mine.size, "the vector of this side")
    check_vector(out, mine.size, "the output")
    source, factor = as_wire(incoming, dtype, mine.size), np.float32(weight)
    mine_square = their_square = between_square = 0.0
    for span in spans(mine.size, WALK):
        a, difference = mine[span], out[span]
        decode_span(source, dtype, span, difference)
        with np.errstate(over="ignore", invalid="ignore"):  # found out below
            here = float(np.dot(difference, difference))
        if not here <= max_abs * max_abs:  # an element may be bad; this says which
            check_finite(difference, max_abs)
            here = square(difference)
        their_square += here
        mine_square += float(np.dot(a, a))
        np.subtract(difference, a, out=difference)
        between_square += float(np.dot(difference, difference))
        np.multiply(difference, factor, out=difference)
    return PairFigures(math.sqrt(mine_square), math.sqrt(their_square), math.sqrt(between_square))


def square(vector: Float32Array) -> float:
    """Sum of squares."""
    total = 0.0
    for span in spans(vector.size, DOT_CHUNK):
        piece = scratch_f64(span.stop - span.start)
        np.copyto(piece, vector[span])
        total += float(np.dot(piece, piece))
    return total


def norm(vector: Float32Array) -> float:
    """Euclidean norm."""
    return math.sqrt(square(vector))


def distance(a: Float32Array, b: Float32Array) -> float:
    """Euclidean distance."""
    if a.shape != b.shape:
        raise LayoutMismatchError(f"vectors of shapes {a.shape} and {b.shape} have no distance")
    total = 0.0
    for span in spans(a.size, DOT_CHUNK):
        piece = scratch_f64(span.stop - span.start)
        np.subtract(a[span], b[span], out=piece)
        total += float(np.dot(piece, piece))
    return math.sqrt(total)


def all_finite(array: npt.NDArray[Any]) -> bool:
    """Whether nothing in an array of any shape and type is NaN or infinite."""
    flat = array.reshape(-1)
    return all(bool(np.isfinite(flat[span]).all()) for span in spans(flat.size))


def check_finite(vector: Float32Array, max_abs: float) -> None:
    """Check every element of a vector that came from elsewhere before it touches ours.

    ``max_abs`` bounds each element's magnitude; ``inf`` still refuses NaN but lets infinity pass.

    Raises:
        PoisonedVectorError: an element is NaN or beyond the bound.
    """
    for span in spans(vector.size):
        piece = vector[span]
        # NaN passes through min and max, and no comparison with it is true.
        low, high = float(piece.min()), float(piece.max())
        if not (-max_abs <= low and high <= max_abs):
            raise PoisonedVectorError(
                f"elements {span.start} to {span.stop - 1} reach from {low:g} to {high:g}, "
                f"the bound is {max_abs:g}; the vector was refused"
            )
