"""What the planner says about one strategy, in figures per node."""

from __future__ import annotations

import msgspec

__all__ = ["Forecast"]


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
