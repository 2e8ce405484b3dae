"""What travels between ranks beside activations and gradients, how long it takes, which link is busiest.

Ranks talk to their neighbours only: what comes from far down passes through all between, each of whom has
the whole of it before it sends it on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from p2pdrl.pipeline.layers import Links, link_between
from p2pdrl.pipeline.schedule import route
from p2pdrl.pipeline.timeline import MicrobatchCosts, Timeline

__all__ = ["Traffic", "busiest", "fetch_s", "spread_s", "step_s"]


class Traffic(NamedTuple):
    """What passes between two ranks in one update.

    Attributes:
        ranks: the two.
        update_bytes: both ways.
        bandwidth_bytes_s: at which these bytes pass, one direction after the other.
        latency_s: of the slower direction.
        busy_s: how long they take so, latencies not counted.
    """

    ranks: tuple[int, int]
    update_bytes: float
    bandwidth_bytes_s: float
    latency_s: float
    busy_s: float


def step_s(timeline: Timeline, links: Links) -> float:
    """When the first rank knows the sum of squares of all ranks, and can step.

    Each adds its own to those from below and sends them up behind its last gradient.

    Args:
        timeline: of the minibatch.
        links: between ranks.
    """
    known_s = 0.0
    for rank in reversed(range(len(timeline.rows))):
        row = timeline.rows[rank]
        known_s = max(known_s, *(t.end_s for t in row if t.action.kind == "backward"))
        if rank > 0:
            before_s = (t.end_s for t in row if t.action.kind == "send_gradient")
            known_s = max(known_s + link_between(links, rank, rank - 1).latency_s, *before_s)
    return known_s


def fetch_s(slice_bytes: Sequence[float], links: Links) -> float:
    """How long the first rank takes to ask for all ranks' slices and get them.

    Args:
        slice_bytes: of each rank; the first needn't travel.
        links: between ranks.
    """
    ranks = len(slice_bytes)
    asked_s = [0.0]
    for rank in range(1, ranks):
        asked_s.append(asked_s[-1] + link_between(links, rank - 1, rank).latency_s)
    arrivals_s: list[float] = []
    for rank in range(ranks - 1, 0, -1):
        link = link_between(links, rank, rank - 1)
        free_s, passed_s = 0.0, []
        for ready_s, size in zip([asked_s[rank], *arrivals_s], slice_bytes[rank:], strict=True):
            free_s = max(free_s, ready_s) + link.busy_s(size)
            passed_s.append(free_s + link.latency_s)
        arrivals_s = passed_s
    return max(arrivals_s, default=0.0)


def spread_s(size_bytes: float, ranks: int, links: Links) -> float:
    """How long it takes until the last rank has something of the first."""
    return sum(link_between(links, rank, rank + 1).transfer_s(size_bytes) for rank in range(ranks - 1))


def busiest(
    timeline: Timeline,
    costs: MicrobatchCosts,
    minibatches: int,
    slice_bytes: Sequence[float],
    spread_bytes: float = 0.0,
) -> Traffic | None:
    """Return the neighbours between whom an update's bytes take longest; None where all links are free.

    Args:
        timeline: of one minibatch.
        costs: the messages' sizes, and the links between ranks.
        minibatches: of an update.
        slice_bytes: that each rank sends up through all above it, an update.
        spread_bytes: that the first rank sends down through all, an update.
    """
    ranks = len(timeline.rows)
    sent: defaultdict[tuple[int, int], float] = defaultdict(float)
    for row in timeline.rows:
        for action in (t.action for t in row if t.action.kind.startswith("send")):
            way = route(action)
            sent[way.source % ranks, way.target % ranks] += minibatches * costs.boundary_bytes(way)
    for rank in range(1, ranks):
        sent[rank, rank - 1] += sum(slice_bytes[rank:])
        sent[rank - 1, rank] += spread_bytes
    between = [_traffic(sent, costs.links, (a, b)) for a, b in sent if a < b]
    slowest = max(between, key=lambda one: (one.busy_s, one.latency_s), default=None)
    return slowest if slowest is not None and slowest.busy_s + slowest.latency_s > 0.0 else None


def _traffic(sent: Mapping[tuple[int, int], float], links: Links, ranks: tuple[int, int]) -> Traffic:
    ways = [ranks, ranks[::-1]]
    size = sum(sent.get(way, 0.0) for way in ways)
    busy_s = sum(link_between(links, *way).busy_s(sent.get(way, 0.0)) for way in ways)
    return Traffic(
        ranks=ranks,
        update_bytes=size,
        bandwidth_bytes_s=size / busy_s if busy_s > 0.0 else math.inf,
        latency_s=max(link_between(links, *way).latency_s for way in ways),
        busy_s=busy_s,
    )
