"""The arithmetic of one synchronous round on a graph. Pure, for float32 and float64 alike.

D-PSGD (Lian 2017, arXiv 1705.09056, algorithm 1): x_i ← Σ_j W_ij x_j = x_i + Σ_j W_ij (x_j − x_i), with W
symmetric and doubly stochastic. Written by edges, each may be left out by itself: W stays symmetric and
doubly stochastic as long as both ends leave it out, so the members' mean is kept.

Shapes: every vector is flat, of D elements; names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.pairwise.pair import Bounds
from p2pdrl.tensors import mix
from p2pdrl.tensors.chunks import WALK, spans
from p2pdrl.tensors.layout import Float32Array

__all__ = ["Edge", "measure", "round_delta"]

F = TypeVar("F", np.float32, np.float64)


class Edge(NamedTuple):
    """How one edge counts in a round.

    Args:
        weight: W_ij, after clipping.
        distance: ‖x_j − x_i‖.
    """

    weight: float
    distance: float


def round_delta(
    mine: npt.NDArray[F],
    others: Sequence[tuple[npt.NDArray[F], float]],
    *,
    out: npt.NDArray[F],
) -> None:
    """Write Σ_j w_j (x_j − mine) into ``out``.

    Each edge's term is the exact opposite of what its other end computes, bit for bit.

    Args:
        mine: our vector as the others see it.
        others: each neighbour's vector and weight.
        out: none of the others.
    """
    part = np.empty(min(WALK, mine.size), mine.dtype)
    for span in spans(mine.size, WALK):
        piece = part[: span.stop - span.start]
        out[span] = 0
        for theirs, weight in others:
            np.subtract(theirs[span], mine[span], out=piece)
            np.multiply(piece, mine.dtype.type(weight), out=piece)
            np.add(out[span], piece, out=out[span])


def measure(
    mine: Float32Array, my_length: float, theirs: Float32Array, weight: float, bounds: Bounds
) -> Edge:
    """Check a neighbour's vector, and say how its edge counts.

    Clipping (centered, Karimireddy 2021, arXiv 2012.10333) shortens the difference to a multiple of the
    shorter of the two vectors, which both ends know: both shorten alike, and the pair's sum is kept.

    Args:
        mine: our vector as the neighbour sees it.
        my_length: ‖mine‖.
        theirs: the neighbour's.
        weight: W_ij.
        bounds: what is accepted.

    Raises:
        PoisonedVectorError: it holds NaN, infinity, a huge entry, or its norm is out of proportion.
    """
    mix.check_finite(theirs, bounds.max_abs)
    their_length = mix.norm(theirs)
    longest = bounds.max_distance * (1.0 + my_length)
    if their_length > longest:
        raise PoisonedVectorError(f"norm {their_length:.3g} is beyond the bound {longest:.3g}")
    distance = mix.distance(mine, theirs)
    if bounds.clip_distance is not None:
        most = bounds.clip_distance * min(my_length, their_length)
        weight *= most / distance if distance > most else 1.0
    return Edge(weight, distance)
