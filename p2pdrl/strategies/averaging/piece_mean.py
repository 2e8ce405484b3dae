"""What the owner of a piece computes: everybody's contributions as one, as everybody will decode it.

In chunks that stay in the cache: sum, divide, round to the wire's format and back, measure. So all members,
the owner too, hold the same bits afterwards.

Shapes: every vector is flat, of the piece's S elements; names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from p2pdrl.config.strategy_bases import Robust
from p2pdrl.tensors import wire
from p2pdrl.tensors.chunks import DOT_CHUNK, spans
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.robust import combine
from p2pdrl.tensors.wire import WireDtype

__all__ = ["CHUNK", "Figures", "reduce_piece"]

CHUNK = 1 << 16
"""Elements per step: a few vectors' worth stays in the second-level cache."""


class Figures(NamedTuple):
    """What was measured on the way.

    Args:
        square: ‖result‖².
        spread: Σ w_k ‖x_k − mean‖² / Σ w_k; 0 unless asked for.
    """

    square: float
    spread: float


def reduce_piece(
    vectors: Sequence[Float32Array],
    weights: Sequence[float],
    rule: Robust,
    dtype: WireDtype,
    *,
    out: Float32Array,
    encoded: memoryview,
    reference: Float32Array | None = None,
    spread: bool = False,
) -> Figures:
    """Write what ``vectors`` come to into ``out``, rounded as it travels, and as it travels into ``encoded``.

    The mean is Σ w_k x_k / Σ w_k, summed in float32 in the order given.

    Args:
        vectors: of those with a weight above 0; none gives zeros.
        weights: theirs, above 0.
        rule: how they are mixed.
        dtype: how the result travels; with ``float32``, ``encoded`` isn't written: it is ``out`` itself.
        out: the result.
        encoded: room for the result's bytes.
        reference: of ``clipped``; without one the first vector serves.
        spread: whether to measure how far the vectors are from their mean.
    """
    mean = rule.mixing == "mean" or len(vectors) < 2
    if not mean:
        combine(
            vectors,
            weights,
            mixing=rule.mixing,
            clip_distance=rule.clip_distance,
            trim=rule.trim,
            reference=vectors[0] if reference is None else reference,
            out=out,
        )
    heaviest, total = max(weights, default=1.0), sum(weights)
    factors = [np.float32(weight / heaviest) for weight in weights]
    share = np.float32(heaviest / total if weights else 0.0)
    scratch = np.empty(min(CHUNK, out.size), np.float32)
    square = energy = 0.0
    for span in spans(out.size, CHUNK):
        piece, parts = out[span], [vector[span] for vector in vectors]
        if mean:
            _mean(parts, factors, share, piece, scratch)
        if dtype == "bf16":
            part = encoded[2 * span.start : 2 * span.stop]
            wire.encode(piece, dtype, part)
            wire.decode(part, dtype, piece)
        square += _square(piece)
        if spread:
            energy += sum(weight * _square(part) for part, weight in zip(parts, weights, strict=True))
    return Figures(square, max(0.0, energy / total - square) if spread and weights else 0.0)


def _mean(
    parts: Sequence[Float32Array],
    factors: Sequence[np.float32],
    share: np.float32,
    out: Float32Array,
    scratch: Float32Array,
) -> None:
    if not parts:
        out[:] = 0
        return
    np.multiply(parts[0], factors[0], out=out)
    for part, factor in zip(parts[1:], factors[1:], strict=True):
        if factor == 1:
            np.add(out, part, out=out)
        else:
            np.multiply(part, factor, out=scratch[: out.size])
            np.add(out, scratch[: out.size], out=out)
    np.multiply(out, share, out=out)


def _square(vector: Float32Array) -> float:
    total = 0.0
    for span in spans(vector.size, DOT_CHUNK):
        part = vector[span]
        total += float(np.dot(part, part))
    return total
