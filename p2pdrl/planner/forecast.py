"""What happened, counted per node, and what the planner says of it."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.planner.description import TALKED, SwarmDescription

__all__ = ["AGREED", "STALENESS_BOUNDS", "Forecast", "Replicas", "Statistics", "forecast_of"]

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Greatest staleness, in policy versions, of each bucket but the last, which takes the rest; as on nodes."""


class Statistics:
    """Counts since the beginning.

    Args:
        capacity: nodes at most.

    Attributes:
        updates: made by learners.
        fresh: those of them that began on parameters which others' work had reached since the one before.
        rounds: that ended well, of those that a node began or took part in.
        lost: that didn't.
        outcomes: of all rounds, in words.
        waited_s: how long learners stood still.
        lived_s: how long nodes were there.
        out: payload that left.
        into: payload that came.
        wire_out: with heads and packets.
        wire_in: with heads and packets.
        staleness: of what was merged, by bucket.
        round_s: seconds of all rounds that ended well.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Count from 0 on."""
        capacity = self._capacity
        self.updates = [0] * capacity
        self.fresh = [0] * capacity
        self.rounds = [0] * capacity
        self.lost = [0] * capacity
        self.outcomes: Counter[str] = Counter()
        self.waited_s = [0.0] * capacity
        self.lived_s = [0.0] * capacity
        self.out = [0.0] * capacity
        self.into = [0.0] * capacity
        self.wire_out = [0.0] * capacity
        self.wire_in = [0.0] * capacity
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.round_s = 0.0
        self._heard_NF = np.zeros((capacity, 3))
        """By `broadcast`, and not in the lists yet: payload that came, bytes on the wire, answers' bytes."""

    def message(self, source: int, target: int, payload: float, on_wire: float) -> None:
        """A message went from one to the other."""
        self.out[source] += payload
        self.into[target] += payload
        self.wire_out[source] += on_wire
        self.wire_in[target] += on_wire

    def broadcast(
        self,
        source: int,
        targets_P: npt.NDArray[np.int64],
        payload: float,
        on_wire: float,
        answer: float,
    ) -> None:
        """One message went to each of ``targets_P``, who answered; they see it after `settle`.

        Args:
            source: who sent it.
            targets_P: nodes, each once.
            payload: bytes of each copy that count for the strategy.
            on_wire: bytes of each copy with heads and packets.
            answer: bytes of each answer, which carries no payload.
        """
        self.out[source] += payload * len(targets_P)
        self.wire_out[source] += on_wire * len(targets_P)
        self.wire_in[source] += answer * len(targets_P)
        self._heard_NF[targets_P] += (payload, on_wire, answer)

    def settle(self) -> None:
        """The end: what came by `broadcast` is counted with the rest."""
        for node, (payload, on_wire, answers) in enumerate(self._heard_NF.tolist()):
            self.into[node] += payload
            self.wire_in[node] += on_wire
            self.wire_out[node] += answers
        self._heard_NF[:] = 0.0

    def round(self, node: int, outcome: str, seconds: float, count: int = 1) -> None:
        """Rounds of ``node`` ended well, each after ``seconds``."""
        self.rounds[node] += count
        self.outcomes[outcome] += count
        self.round_s += seconds * count

    def loss(self, node: int, outcome: str) -> None:
        """A round of ``node`` came to nothing."""
        self.lost[node] += 1
        self.outcomes[outcome] += 1

    def merged(self, staleness: int, count: int = 1) -> None:
        """Contributions of others were merged, each so many versions behind the one who merges."""
        self.staleness[bisect_left(STALENESS_BOUNDS, staleness)] += count


ENTRIES = 16
AGREED = 0.01
"""Share of the first distance at which nodes count as agreed."""


class Replicas:
    """A small vector of E = 16 entries for each of N nodes, to see how fast a strategy brings them together.

    They begin independent, and no learner changes them: what is left of the first consensus distance,
    sqrt(mean over nodes of ‖x_i − x̄‖²), is what mixing has left.

    Args:
        capacity: nodes at most.
        nodes: there at first.
        seed: of the starts.

    Attributes:
        x_NE: one row for each node.
        agreed_s: when the distance had fallen to `AGREED`; None before.
        mixes: exchanges, pushes or rounds of a node that changed rows.
        agreed_mixes: that count at ``agreed_s``.
        walk: (seconds, part of the first distance) at each look.
    """

    def __init__(self, capacity: int, nodes: int, seed: int) -> None:
        self.x_NE: npt.NDArray[np.float64] = np.random.default_rng(seed).normal(size=(capacity, ENTRIES))
        self._up = np.zeros(capacity, bool)
        self._up[:nodes] = True
        self._first = self.distance() or 1.0
        self.agreed_s: float | None = 0.0 if nodes < 2 else None
        self.mixes = 0
        self.agreed_mixes = 0
        self.walk: list[tuple[float, float]] = [(0.0, 1.0)]
        self._every = 1 if nodes <= 32 else nodes // 4
        self._left = self._every

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to see, so that mixing needn't be done."""
        return self.agreed_s is not None

    def distance(self) -> float:
        """The consensus distance of those that are there."""
        x_NE = self.x_NE[self._up]
        return float(np.sqrt(np.square(x_NE - x_NE.mean(0)).sum(1).mean())) if len(x_NE) else 0.0

    def part(self) -> float:
        """What is left of the first distance."""
        return self.distance() / self._first

    def changed(self, now_s: float) -> None:
        """Rows were mixed; now and then look how far apart they are."""
        self.mixes += 1
        self._left -= 1
        if self._left <= 0 and self.agreed_s is None:
            self._left = self._every
            self.look(now_s)

    def look(self, now_s: float) -> None:
        """See whether they have agreed."""
        part = self.part()
        self.walk.append((now_s, part))
        if part <= AGREED and self.agreed_s is None:
            self.agreed_s, self.agreed_mixes = now_s, self.mixes

    def alike(self, rows: list[int], value_E: npt.NDArray[np.float64], now_s: float) -> None:
        """All of ``rows`` have the same from now on."""
        if not self.settled:
            self.x_NE[rows] = value_E
            self.mixes += len(rows)
            self.look(now_s)

    def left(self, node: int) -> None:
        """A node is gone."""
        self._up[node] = False

    def joined(self, node: int, donor: int) -> None:
        """A node is there, with the state of ``donor``."""
        self._up[node] = True
        self.x_NE[node] = self.x_NE[donor]


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
        histogram: contributions by bucket of `STALENESS_BOUNDS`.
        outcomes: rounds of all nodes by how they ended.
        kills: nodes that ended without a word meanwhile.
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
    kills: int
    walk: tuple[tuple[float, float], ...]

    @property
    def failed(self) -> float:
        """Share of the rounds that somebody waited for in vain: a peer that is busy says so at once."""
        ended = sum(self.outcomes.values())
        lost = self.lost * ended - self.outcomes.get("busy", 0)
        return max(0.0, lost) / ended if ended else 0.0


def forecast_of(
    swarm: SwarmDescription,
    strategy: StrategyConfig,
    statistics: Statistics,
    replicas: Replicas,
    seconds: float,
    *,
    kills: int = 0,
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
        kills=kills,
        walk=tuple(replicas.walk),
    )
