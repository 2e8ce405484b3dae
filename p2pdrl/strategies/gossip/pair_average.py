"""The arithmetic of one pairwise exchange, alike at both peers, on preallocated buffers; its messages."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.strategy import Content
from p2pdrl.errors import PoisonedVectorError, WireError
from p2pdrl.group.compatibility import Natural, Short, Summary
from p2pdrl.strategies.own_vector import read_now
from p2pdrl.strategies.protocol import Merged, RoundReport
from p2pdrl.tensors import mix
from p2pdrl.tensors.board import DaemonBoard
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.wire import WireDtype, encoded_nbytes
from p2pdrl.transport import codec

__all__ = [
    "Bounds",
    "ExchangeHead",
    "Freshness",
    "PairScratch",
    "PairUpdate",
    "WireName",
    "decode_head",
    "fresh_weight",
    "pair_report",
    "pair_step",
]

LAG_HALVES = 100.0
"""Policy versions of lag that halve the trust."""

LEAST_SHARE = 0.1
"""Neither side gives up more than nine tenths of its own, whatever the other claims."""


class Freshness(NamedTuple):
    """What one side claims.

    Args:
        steps: environment steps since its last exchange.
        policy_version: of its vector.
    """

    steps: int
    policy_version: int


def fresh_weight(weight: float, mine: Freshness, theirs: Freshness) -> float:
    """Return how far our side moves towards the other, in [0.2, 1.8] · ``weight``.

    Args:
        weight: half of what both sides' weights add up to, in (0, ½].
        mine: our side.
        theirs: the other side.
    """
    newest = max(mine.policy_version, theirs.policy_version)
    my_trust, their_trust = _trust(mine, newest), _trust(theirs, newest)
    share = their_trust / (my_trust + their_trust)
    return 2.0 * weight * min(max(share, LEAST_SHARE), 1.0 - LEAST_SHARE)


def _trust(side: Freshness, newest: int) -> float:
    return (1.0 + side.steps) / (1.0 + (newest - side.policy_version) / LAG_HALVES)


WireName = Literal["float32", "bf16", "int8", "topk", "threshold"]
"""A vector's format on the wire."""


class ExchangeHead(msgspec.Struct, frozen=True):
    """What goes before the vector, in both directions."""

    exchange_id: Short
    wire: WireName
    summary: Summary
    verdict: str = "mix"
    """In an answer: what the responder does (`group.compatibility.Verdict`); only ``mix`` brings a vector."""
    content: Content = "parameters"
    fresh_steps: Natural = 0
    """Environment steps of this side since its last exchange."""

    @property
    def freshness(self) -> Freshness:
        """What this side claims of its experience."""
        return Freshness(self.fresh_steps, self.summary.policy_version)


def decode_head(meta: bytes) -> ExchangeHead | None:
    """Read what a peer put before its vector; None when it can't be read."""
    try:
        head: ExchangeHead = codec.decode(meta, ExchangeHead)
    except WireError:
        return None
    return head


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
    """Check the peer's vector and write what our side adds.

    Clipping (centered, Karimireddy 2021, arXiv 2012.10333) shortens the difference of the two. Its bound
    comes from the shorter vector, which both sides know, so both shorten alike and the pair's sum is kept.

    Args:
        mine_D: our vector as the peer sees it.
        incoming: the peer's, as it arrived.
        wire: its number format.
        weight: how far we move.
        bounds: what is accepted.
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
        me: own node id.
        peer: whom we met.
        step: our side.
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


class PairScratch:
    """Buffers and arithmetic of one exchange of parameters at a time.

    Args:
        size: D, float32 parameters.
        wire: number format on the wire.
        weight: how far each side moves towards the other, unless `mix` is told otherwise.
        max_abs: largest entry accepted.
        max_distance: largest ratio of the peer's norm to ours accepted.
        clip_distance: see `Bounds`.
    """

    def __init__(  # noqa: PLR0917 - as many facts as a pair has
        self,
        size: int,
        wire: WireDtype,
        weight: float,
        max_abs: float,
        max_distance: float,
        clip_distance: float | None = None,
    ) -> None:
        self._wire: WireDtype = wire
        self._weight = weight
        self._bounds = Bounds(max_abs, max_distance, clip_distance)
        self._mine_D = np.zeros(size, np.float32)
        self._theirs_D = np.zeros(size, np.float32)
        if wire == "float32":  # as they lie in memory, so nothing is copied
            self.outgoing = self._mine_D.data.cast("B")
            self.incoming = self._theirs_D.data.cast("B")
        else:
            self.outgoing = memoryview(bytearray(encoded_nbytes(size, wire)))
            self.incoming = memoryview(bytearray(encoded_nbytes(size, wire)))
        self._sets = 0
        self.step = PairUpdate(0.0, 0.0, 0.0)
        """Our side of the last exchange."""

    @property
    def nbytes(self) -> int:
        """Length of the vector on the wire."""
        return len(self.outgoing)

    @property
    def distance(self) -> float:
        """‖theirs − mine‖ of the last exchange."""
        return self.step.distance

    def load(self, board: DaemonBoard) -> None:
        """Read our vector off the board, rounded as the wire rounds it, into ``outgoing``.

        Raises:
            PoisonedVectorError: our own vector holds NaN, infinity or a huge entry; peers would strike
                us for it.
        """
        message = None if self._wire == "float32" else self.outgoing
        self._sets = read_now(board, self._mine_D, self._bounds.max_abs, self._wire, message).sets

    def mix(self, weight: float | None = None) -> Float32Array:
        """Check what is in ``incoming`` and return what our side adds; valid until the next `load`.

        Args:
            weight: how far our side moves; None is the constructor's.

        Raises:
            PoisonedVectorError: see `pair_step`.
        """
        weight = self._weight if weight is None else weight
        self.step = wire_step(
            self._mine_D, self.incoming, self._wire, weight, self._bounds, out_D=self._theirs_D
        )
        return self._theirs_D

    def commit(self, board: DaemonBoard, delta_D: Float32Array, policy_version: int) -> bool:
        """Hand our side's delta to the learner.

        Returns:
            False when our vector was replaced since `load`, so that the delta has lost its meaning.
        """
        return board.post_delta(delta_D, policy_version, sets=self._sets)
