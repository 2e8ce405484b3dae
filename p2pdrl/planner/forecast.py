"""What the planner says about one strategy, in figures per node."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.planner.description import TALKED, SwarmDescription
from p2pdrl.planner.replicas import Replicas
from p2pdrl.planner.statistics import STALENESS_BOUNDS, Statistics

__all__ = ["Forecast", "forecast_of"]


class Forecast(msgspec.Struct, frozen=True, kw_only=True):
    """One strategy on one swarm; means over nodes, per second of a node's life.

    Attributes:
        strategy: its name.
        nodes: at first.
        seconds: simulated.
        updates_s: updates of a learner.
        healthy_updates_s: the same without stragglers.
        fresh_updates_s: of those without stragglers, updates that began on parameters which others' work
            had reached since the update before.
        rounds_s: rounds that ended well and that a node began or took part in; a push to one peer is one.
        lost_s: rounds that came to nothing.
        lost: share of the rounds.
        round_s: mean seconds of a round that ended well.
        waiting: share of the time in which a learner stands still.
        bytes_out_s: payload that leaves.
        bytes_in_s: payload that comes.
        wire_out_s: with heads, packets and membership's messages.
        wire_in_s: the same that comes.
        consensus_s: until the consensus distance has fallen to 1 %; None when it doesn't.
        consensus_exchanges: exchanges, pushes or rounds, counted at each node that began one, until then.
        left: part of the distance that is left at the end, or at consensus.
        staleness: mean, in policy versions; buckets are taken at their bound.
        histogram: contributions by bucket of `statistics.STALENESS_BOUNDS`.
        outcomes: rounds of all nodes by how they ended.
        walk: (seconds, part of the first consensus distance) at each look.
    """

    strategy: str
    nodes: int
    seconds: float
    updates_s: float
    healthy_updates_s: float
    fresh_updates_s: float
    rounds_s: float
    lost_s: float
    lost: float
    round_s: float
    waiting: float
    bytes_out_s: float
    bytes_in_s: float
    wire_out_s: float
    wire_in_s: float
    consensus_s: float | None
    consensus_exchanges: int | None
    left: float
    staleness: float
    histogram: tuple[int, ...]
    outcomes: dict[str, int]
    walk: tuple[tuple[float, float], ...]


def forecast_of(
    swarm: SwarmDescription,
    strategy: StrategyConfig,
    statistics: Statistics,
    replicas: Replicas,
    seconds: float,
) -> Forecast:
    """What was counted, as rates."""
    everybody = range(len(statistics.updates))
    slow = set(swarm.stragglers)
    healthy = [node for node in everybody if node % swarm.nodes not in slow] if slow else None

    def rate(counts: Sequence[float], nodes: Sequence[int] | None = None) -> float:
        chosen = everybody if nodes is None else nodes
        lived_s = sum(statistics.lived_s[node] for node in chosen)
        return sum(counts[node] for node in chosen) / lived_s if lived_s else 0.0

    ended, lost = sum(statistics.rounds), sum(statistics.lost)
    merged = sum(statistics.staleness)
    bounds = (*STALENESS_BOUNDS, 2 * STALENESS_BOUNDS[-1])
    background = swarm.costs.background_bytes_s * min(swarm.nodes, TALKED) if swarm.nodes > 1 else 0.0
    part = replicas.part() if replicas.agreed_s is None else min(replicas.walk[-1][1], 1.0)
    return Forecast(
        strategy=str(type(strategy).__struct_config__.tag),
        nodes=swarm.nodes,
        seconds=seconds,
        updates_s=rate(statistics.updates),
        healthy_updates_s=rate(statistics.updates, healthy),
        fresh_updates_s=rate(statistics.fresh, healthy),
        rounds_s=rate(statistics.rounds),
        lost_s=rate(statistics.lost),
        lost=lost / (ended + lost) if ended + lost else 0.0,
        round_s=statistics.round_s / ended if ended else 0.0,
        waiting=rate(statistics.waited_s),
        bytes_out_s=rate(statistics.out),
        bytes_in_s=rate(statistics.into),
        wire_out_s=rate(statistics.wire_out) + background,
        wire_in_s=rate(statistics.wire_in) + background,
        consensus_s=replicas.agreed_s,
        consensus_exchanges=None if replicas.agreed_s is None else replicas.agreed_mixes,
        left=part,
        staleness=sum(n * s for n, s in zip(statistics.staleness, bounds, strict=True)) / merged
        if merged
        else 0.0,
        histogram=tuple(statistics.staleness),
        outcomes=dict(statistics.outcomes),
        walk=tuple(replicas.walk),
    )
