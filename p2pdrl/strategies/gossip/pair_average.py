"""The arithmetic of a pairwise average, alike at both peers: check theirs, move ours towards it.

Shape suffixes: ``_D`` all parameters, flat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.protocol import Merged, RoundReport
from p2pdrl.tensors import mix
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import WireDtype

__all__ = ["Bounds", "PairUpdate", "WireName", "pair_report", "pair_step", "wire_step"]

WireName = Literal["float32", "bf16", "int8", "topk", "threshold"]
"""A vector's format on the wire."""


class Bounds(NamedTuple):
    """What of a peer's vector is accepted, and how far it may pull.

    Args:
        max_abs: largest entry accepted.
        max_distance: largest ratio of the peer's norm to ours accepted.
        clip_distance: longest difference let through, as a multiple of the shorter of the two vectors;
            None lets all through.
    """

    max_abs: float
    max_distance: float
    clip_distance: float | None = None


class PairUpdate(NamedTuple):
    """What one side of a pair does.

    Args:
        weight: how far it moves towards the other, after clipping.
        changed: ‖what it adds‖.
        distance: ‖theirs − mine‖.
    """

    weight: float
    changed: float
    distance: float


def pair_step(mine_D: Float32Array, theirs_D: Float32Array, weight: float, bounds: Bounds) -> PairUpdate:
    """`wire_step` of a vector that is decoded already; it is overwritten by what our side adds."""
    return wire_step(mine_D, theirs_D.data.cast("B"), "float32", weight, bounds, out_D=theirs_D)


def wire_step(
    mine_D: Float32Array,
    incoming: memoryview,
    wire: WireDtype,
    weight: float,
    bounds: Bounds,
    *,
    out_D: Float32Array,
) -> PairUpdate:
    """Check the peer's vector and write what our side adds, weight · (theirs − mine).

    Clipping (centered, Karimireddy 2021, arXiv 2012.10333) shortens the difference of the two. Its bound
    comes from the shorter vector, which both sides know, so both shorten alike and the pair's sum is kept.

    Args:
        mine_D: our vector as the peer sees it.
        incoming: the peer's, as it arrived.
        weight: how far we move.
        out_D: what our side adds; may lie where ``incoming`` does when that is float32.

    Raises:
        PoisonedVectorError: the peer's vector holds NaN, infinity, a huge entry, or its norm is out of
            proportion to ours.
    """
    figures = mix.pair_step(mine_D, incoming, wire, weight, bounds.max_abs, out=out_D)
    bound = bounds.max_distance * (1.0 + figures.mine)
    if figures.theirs > bound:
        raise PoisonedVectorError(f"norm {figures.theirs:.3g} is beyond the bound {bound:.3g}")
    if bounds.clip_distance is not None:
        longest = bounds.clip_distance * min(figures.mine, figures.theirs)
        if figures.distance > longest:
            factor = longest / figures.distance
            np.multiply(out_D, np.float32(factor), out=out_D)
            weight *= factor
    return PairUpdate(weight, weight * figures.distance, figures.distance)


def pair_report(report: RoundReport, me: str, peer: str, step: PairUpdate, staleness: int) -> RoundReport:
    """Complete the report of an exchange that is done.

    Args:
        report: with the bytes; its outcome is kept when we were called, and ``ok`` when we called.
        staleness: our policy version minus its.
    """
    outcome, error = "ok" if report.outcome == "failed" else report.outcome, ""
    if outcome == "ok" and step.changed == 0 and step.distance > 0:
        outcome, error = "unchanged", "the two differ, but the step rounds or clips to nothing"
    return replace(
        report,
        outcome=outcome,
        merged=(Merged(me, 1.0 - step.weight), Merged(peer, step.weight, staleness)),
        missing=(),
        changed=step.changed,
        distance=step.distance,
        error=error,
    )
