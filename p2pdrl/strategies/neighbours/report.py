"""What is told of a round with neighbours."""

from __future__ import annotations

import math
from collections import Counter

from p2pdrl.config.strategy import Mixing
from p2pdrl.strategies.neighbours.stage import Stage
from p2pdrl.strategies.protocol import Merged, RoundReport

__all__ = ["stage_report"]


def stage_report(
    stage: Stage, mixing: Mixing, me: str, policy_version: int, changed: float | None
) -> RoundReport:
    """Say how a round went.

    Args:
        stage: the round, closed.
        mixing: how it was mixed; ``trimmed`` counts all alike.
        me: own node id.
        policy_version: ours.
        changed: norm of what was added to ours; None when ours was replaced meanwhile.
    """
    met = sorted(stage.met.items())
    weights = {peer: edge.edge.weight for peer, edge in met}
    if mixing == "trimmed":
        weights = dict.fromkeys(weights, 1.0 / (len(met) + 1))
    merged = [Merged(me, 1.0 - math.fsum(weights.values()))] if met else []
    merged += [Merged(peer, weights[peer], policy_version - edge.policy_version) for peer, edge in met]
    square = sum(edge.edge.distance**2 for _, edge in met)
    outcome, error = "ok", ""
    if not met:
        outcome = "regrouped" if stage.regrouped else _commonest(stage)
        error = f"no neighbour came: {outcome}"
    elif changed is None:
        outcome, error = "unsure", "our vector was replaced meanwhile"
    elif changed == 0 and square > 0:
        outcome, error = "unchanged", "the vectors differ, but the step rounds or clips to nothing"
    return RoundReport(
        outcome,
        merged=tuple(merged),
        missing=tuple(sorted(stage.missing)),
        bytes_out=stage.bytes_out,
        bytes_in=stage.bytes_in,
        round_trips=stage.round_trips,
        changed=changed or 0.0,
        distance=math.sqrt(square / len(met)) if met else None,
        error=error,
    )


def _commonest(stage: Stage) -> str:
    counts = Counter(stage.missing.values()).most_common(1)
    return counts[0][0] if counts else "timeout"
