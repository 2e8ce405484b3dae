"""How the vectors of several nodes become one: the mean, or rules that bound what one bad node can do.

Called by the strategies, in a thread for long vectors. Sums are kept in float64, so that the order of the
vectors changes the result by no more than its last bit.

- ``mean``: Σ w_i v_i.
- ``clipped``: centered clipping, r + Σ w_i (v_i − r) · min(1, λ / ‖v_i − r‖) around a reference r
  (Karimireddy 2021, arXiv 2012.10333, section 4, one iteration). Node i moves the result by w_i λ at most.
- ``trimmed``: per element, the mean of what is left without the b greatest and b least values (Yin 2018,
  arXiv 1803.01498, definition 2). With at most b bad nodes each element lies between good nodes' values.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix; N vectors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Mixing
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.mix import check_finite, distance, norm
from p2pdrl.tensors.wire import spans

__all__ = ["combine"]

_PIECE = 1 << 15
"""Elements of a piece: two pieces in float64 stay in the cache."""
_MAX = float(np.finfo(np.float32).max)


def combine(
    vectors: Sequence[Float32Array],
    weights: Sequence[float],
    *,
    mixing: Mixing = "mean",
    clip_distance: float = 1.0,
    trim: float = 0.2,
    reference: Float32Array | None = None,
    out: Float32Array,
) -> None:
    """Write what ``vectors`` come to together into ``out``.

    Args:
        vectors: at least one, of D elements each.
        weights: one for each vector, none below zero, not all zero; they are divided by their sum.
            ``trimmed`` only looks at which are zero (those vectors don't take part): the rule's proof is
            for equal ones, and a bad node would name itself a large one.
        mixing: the rule.
        clip_distance: of ``clipped``: λ as a multiple of the reference's norm. A reference of norm zero
            gives no scale; then it is a multiple of the median distance to it.
        trim: of ``trimmed``: share of the vectors left out at each end, in (0, ½), at least one vector.
            Of one or two vectors none can be left out: they are averaged.
        reference: of ``clipped``: this node's own vector, or the last result; else unused.
        out: D elements; may be one of the others.

    Raises:
        PoisonedVectorError: an element of a vector is NaN or infinite; ``out`` is unchanged.
        LayoutMismatchError: lengths or types differ.
        ValueError: an argument is out of its range.
    """
    shares = _normalised(weights, len(vectors))
    for number, vector in enumerate(vectors):
        _check(vector, out.size, f"vector {number} of {len(vectors)}")
    check_vector(out, out.size, "the output")
    if mixing == "clipped":
        if reference is None or not clip_distance > 0:
            raise ValueError("clipping needs a reference and a clip_distance above zero")
        _check(reference, out.size, "the reference")
        _clipped(vectors, shares, reference, clip_distance, out)
    elif mixing == "trimmed":
        if not 0 < trim < 0.5:
            raise ValueError(f"trim must be above 0 and below ½, not {trim}")
        _trimmed([v for v, share in zip(vectors, shares, strict=True) if share > 0], trim, out)
    else:
        _weighted(vectors, shares, out)


def _normalised(weights: Sequence[float], count: int) -> list[float]:
    total = math.fsum(weights)
    if len(weights) != count or not all(weight >= 0 for weight in weights) or not 0 < total < math.inf:
        raise ValueError(f"{count} vectors need as many weights, none below zero and not all zero: {weights}")
    return [weight / total for weight in weights]


def _check(vector: Float32Array, size: int, what: str) -> None:
    check_vector(vector, size, what)
    try:
        check_finite(vector, _MAX)
    except PoisonedVectorError as error:
        raise PoisonedVectorError(f"{what}: {error}") from error


def _weighted(vectors: Sequence[Float32Array], factors: Sequence[float], out: Float32Array) -> None:
    """Write Σ factor_i v_i into ``out``."""
    total, part = np.empty((2, min(_PIECE, out.size)))
    for span in spans(out.size, _PIECE):
        size = span.stop - span.start
        total[:size] = 0.0
        for vector, factor in zip(vectors, factors, strict=True):
            np.multiply(vector[span], factor, out=part[:size], dtype=np.float64)
            np.add(total[:size], part[:size], out=total[:size])
        np.copyto(out[span], total[:size], casting="same_kind")


def _clipped(
    vectors: Sequence[Float32Array],
    shares: Sequence[float],
    reference: Float32Array,
    clip_distance: float,
    out: Float32Array,
) -> None:
    """Σ w_i (v_i − r) s_i + r, as one weighted sum: the reference gets 1 − Σ w_i s_i."""
    distances = [distance(vector, reference) for vector in vectors]
    most = clip_distance * (norm(reference) or statistics.median(distances))
    factors = [
        share * (most / far if far > most else 1.0) for share, far in zip(shares, distances, strict=True)
    ]
    rest = max(0.0, 1.0 - math.fsum(factors))
    _weighted([*vectors, reference], [*factors, rest], out)


def _trimmed(vectors: Sequence[Float32Array], trim: float, out: Float32Array) -> None:
    count = len(vectors)
    ends = max(1, int(trim * count)) if count > 2 else 0
    rows: npt.NDArray[np.float32] = np.empty((count, min(_PIECE, out.size)), np.float32)
    least: Float32Array = np.empty(rows.shape[1], np.float32)
    total = np.empty(rows.shape[1])
    for span in spans(out.size, _PIECE):
        size = span.stop - span.start
        for row, vector in zip(rows, vectors, strict=True):
            row[:size] = vector[span]
        _move_extremes(rows[:, :size], ends, least[:size])
        np.sum(rows[ends : count - ends, :size], axis=0, dtype=np.float64, out=total[:size])
        np.divide(total[:size], count - 2 * ends, out=total[:size])
        np.copyto(out[span], total[:size], casting="same_kind")


def _move_extremes(rows: npt.NDArray[np.float32], ends: int, least: Float32Array) -> None:
    """Bring the ``ends`` least values of each column to the first rows, the greatest to the last.

    Bubbling whole rows: for few ends this is far quicker than sorting each short column.
    """
    count = len(rows)
    for done in range(ends):
        for row in range(done, count - 1 - done):
            _order(rows[row], rows[row + 1], least)
        for row in range(count - 2 - done, done, -1):
            _order(rows[row - 1], rows[row], least)


def _order(low: Float32Array, high: Float32Array, least: Float32Array) -> None:
    np.minimum(low, high, out=least)
    np.maximum(low, high, out=high)
    np.copyto(low, least)
