"""The arithmetic of a pairwise average, alike at both peers: check theirs, move ours towards it.

Shape suffixes: ``_D`` all parameters, flat.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from p2pdrl.errors import PoisonedVectorError
from p2pdrl.strategies.clipping_radius import ClippingRadius
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
        radius: shortens what is far from ours; None lets all through.
    """

    max_abs: float
    max_distance: float
    radius: ClippingRadius | None = None


class PairUpdate(NamedTuple):
    """What one side of a pair does.

    Args:
        weight: how far it moves towards the other, after clipping.
        changed: ‖what it adds‖.
        distance: ‖theirs − mine‖.
        strike: why the peer is struck; empty where it isn't.
    """

    weight: float
    changed: float
    distance: float
    strike: str = ""


def pair_step(
    mine_D: Float32Array, theirs_D: Float32Array, weight: float, bounds: Bounds, peer: str
) -> PairUpdate:
    """`wire_step` of a vector that is decoded already; it is overwritten by what our side adds."""
    return wire_step(mine_D, theirs_D.data.cast("B"), "float32", weight, bounds, peer=peer, out_D=theirs_D)


def wire_step(
    mine_D: Float32Array,
    incoming: memoryview,
    wire: WireDtype,
    weight: float,
    bounds: Bounds,
    *,
    peer: str,
    out_D: Float32Array,
) -> PairUpdate:
    """Check the peer's vector and write what our side adds, weight · (theirs − mine).

    Where there is a radius, each side shortens the difference by its own: whatever a peer claims of its, it
    moves us no farther than ours. The pair's sum is kept where neither shortens.

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
    strike = ""
    if bounds.radius is not None:
        clip = bounds.radius.clip(peer, out_D, None, figures)
        strike = clip.strike
        if clip.factor < 1.0:
            np.multiply(out_D, np.float32(clip.factor), out=out_D)
            weight *= clip.factor
    return PairUpdate(weight, weight * figures.distance, figures.distance, strike)


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
        pulls=(0.0, step.changed),
        missing=(),
        changed=step.changed,
        distance=step.distance,
        error=error,
    )
