"""How the vectors of several nodes become one: the mean, or rules that bound what a minority can do.

Called by the strategies, in a thread for long vectors. Sums are kept in float64, so that the order of the
vectors changes the result by no more than its last bit.

- ``mean``: Σ w_i v_i.
- ``clipped``: centered clipping (Karimireddy 2021, arXiv 2012.10333, section 4, one iteration): r + Σ w_i
  (v_i − r) · min(1, λ / ‖v_i − r‖). The reference r is one of the vectors, the one that is nearest to more
  than half of the others; λ is a multiple of that distance. So while more than half are honest, r is as near
  to honest vectors as they are to each other, and each of the rest moves the result by w_i λ at most. Where
  nothing is farther than λ, this is the mean. Of two vectors none can be the odd one: the longer is shortened
  to a multiple of the shorter. Else a vector that weighs less than the (lower) median m of the weights may be
  λ √(m / w_i) away, as a mean over fewer rows is noisier; w_i √(m / w_i) being at most m, nobody gains a
  pull by weighing less.
- ``trimmed``: per element, the mean of what is left without the b greatest and b least values (Yin 2018,
  arXiv 1803.01498, definition 2). With at most b bad nodes each element lies between good nodes' values.

Nodes say themselves what they weigh: with ``clipped`` none weighs more than the (lower) median does. Were it
twice that, one liar of four took `server_sync` to 157 of CartPole's 500 with flipped signs, and not to 450.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix; N vectors.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import Mixing
from p2pdrl.errors import PoisonedVectorError
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.mix import check_finite
from p2pdrl.tensors.wire import spans

__all__ = ["Clipping", "clipping_of", "combine", "combine_clipped"]

_PIECE = 1 << 15
"""Elements of a piece: two pieces in float64 stay in the cache."""
_MAX = float(np.finfo(np.float32).max)


class Clipping(NamedTuple):
    """What ``clipped`` does with some vectors.

    Args:
        weights: theirs, as they count.
        reference: index of the vector that the others are seen from; None for zero.
        factors: by which each one's difference to the reference is shortened; 1 leaves it whole.
        excess: each one's distance to the reference as a multiple of what it may be; infinite for that of 0.
    """

    weights: list[float]
    reference: int | None
    factors: list[float]
    excess: list[float]

    @property
    def whole(self) -> bool:
        """Whether nothing is shortened, so that the result is the weighted mean."""
        return all(factor == 1.0 for factor in self.factors)


def clipping_of(vectors: Sequence[Float32Array], weights: Sequence[float], clip_distance: float) -> Clipping:
    """Measure finite vectors and say how ``clipped`` counts them.

    Args:
        weights: one for each vector, none below zero; those of weight 0 take no part.
        clip_distance: λ as a multiple of the reference's median distance.
    """
    taking_part = [index for index, weight in enumerate(weights) if weight > 0]
    most = statistics.median_low([weights[index] for index in taking_part])
    bounded = [min(weight, most) for weight in weights]
    factors, excess = [1.0] * len(vectors), [0.0] * len(vectors)
    if len(taking_part) < 2:
        return Clipping(bounded, None, factors, excess)
    products = _products([vectors[index] for index in taking_part])
    squares = np.diag(products)
    if len(taking_part) == 2:
        reference, lengths = None, np.sqrt(squares)
        longest = clip_distance * float(lengths.min())
    else:
        apart = np.sqrt(np.maximum(squares[:, None] + squares[None, :] - 2.0 * products, 0.0))
        middles = [statistics.median_low(np.delete(row, at).tolist()) for at, row in enumerate(apart)]
        middle = min(range(len(middles)), key=middles.__getitem__)
        reference, lengths = taking_part[middle], apart[middle]
        longest = clip_distance * float(middles[middle])
    for index, length in zip(taking_part, lengths.tolist(), strict=True):
        may = longest * math.sqrt(max(1.0, most / weights[index])) if longest else 0.0
        if length > may:
            factors[index] = may / length
            excess[index] = length / may if may else math.inf
        else:
            excess[index] = length / may if may else 0.0
    return Clipping(bounded, reference, factors, excess)


def _products(vectors: Sequence[Float32Array]) -> npt.NDArray[np.float64]:
    """Inner products of all pairs."""
    count, size = len(vectors), vectors[0].size
    piece = max(1, min(size, (1 << 16) // count))
    rows = np.empty((count, piece))
    total = np.zeros((count, count))
    for span in spans(size, piece):
        part = rows[:, : span.stop - span.start]
        for row, vector in zip(part, vectors, strict=True):
            row[:] = vector[span]
        total += part @ part.T
    return total


def combine(
    vectors: Sequence[Float32Array],
    weights: Sequence[float],
    *,
    mixing: Mixing = "mean",
    clip_distance: float = 2.0,
    trim: float = 0.2,
    out: Float32Array,
) -> Clipping | None:
    """Write what ``vectors`` come to together into ``out``.

    Args:
        vectors: at least one, of D elements each.
        weights: one for each vector, none below zero, not all zero; they are divided by their sum.
            ``trimmed`` only looks at which are zero (those vectors don't take part): the rule's proof is
            for equal ones, and a bad node would name itself a large one.
        mixing: the rule.
        clip_distance: of ``clipped``: see `clipping_of`.
        trim: of ``trimmed``: share of the vectors left out at each end, in (0, ½), at least one vector.
            Of one or two vectors none can be left out: they are averaged.
        out: D elements; may be one of the others.

    Returns:
        What ``clipped`` did; None for the other rules.

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
        if not clip_distance > 0:
            raise ValueError(f"clip_distance must be above zero, not {clip_distance}")
        clipping = clipping_of(vectors, weights, clip_distance)
        combine_clipped(vectors, clipping, out)
        return clipping
    if mixing == "trimmed":
        if not 0 < trim < 0.5:
            raise ValueError(f"trim must be above 0 and below ½, not {trim}")
        _trimmed([v for v, share in zip(vectors, shares, strict=True) if share > 0], trim, out)
    else:
        _weighted(vectors, shares, out)
    return None


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


def combine_clipped(vectors: Sequence[Float32Array], clipping: Clipping, out: Float32Array) -> None:
    """Write Σ w_i (v_i − r) s_i + r, as one weighted sum in which the reference gets what is left of 1."""
    shares = _normalised(clipping.weights, len(vectors))
    factors = [share * factor for share, factor in zip(shares, clipping.factors, strict=True)]
    if clipping.reference is not None:
        factors[clipping.reference] += max(0.0, 1.0 - math.fsum(factors))
    _weighted(vectors, factors, out)


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
