"""Real nodes on loopback for scripts that measure: started, asked, switched between strategies, ended.

Learners are a regression whose updates take as long as wanted (``min_update_s``), so that many nodes fit on
few cores: what is measured is the swarm, not the machine's arithmetic.
"""

from __future__ import annotations

import io
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import psutil

from p2pdrl.config.mode import changed_options, protocol_of
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.planner.forecast import STALENESS_BOUNDS
from p2pdrl.tensors.checkpoint import from_bytes
from support.local_swarm import LocalSwarm, Node


@dataclass
class Measured:
    """One strategy over some seconds; means over nodes.

    Attributes:
        seconds: how long.
        updates_s: per second and node, one number for each node.
        rounds_s: that a node began or took part in, and that ended well.
        lost_s: that came to nothing.
        bytes_s: payload that left a node; that came is about the same.
        body_s: all that left it, heads and membership included, without HTTP's.
        waiting: share of the time in which learners stood still.
        round_s: mean seconds of a round.
        staleness: mean, in policy versions.
        cpu: share of all cores that was busy meanwhile, whatever with.
    """

    seconds: float
    updates_s: list[float]
    rounds_s: float
    lost_s: float
    bytes_s: float
    body_s: float
    waiting: float
    round_s: float
    staleness: float
    cpu: float
    outcomes: dict[str, int] = field(default_factory=dict)


class LiveSwarm(LocalSwarm):
    """A `LocalSwarm` that is described by options, and measured by what its nodes account for.

    Args:
        nodes: how many.
        options: of all, as for ``--set``.
        own: of single nodes, by place.
    """

    def __init__(
        self, nodes: int, options: dict[str, Any], own: dict[int, dict[str, Any]] | None = None
    ) -> None:
        each = {number: _words(mine) for number, mine in (own or {}).items()}
        super().__init__(nodes, _words(options), each)
        self._pool = ThreadPoolExecutor(max_workers=nodes, thread_name_prefix="ask")

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self._pool.shutdown(cancel_futures=True)

    def statuses(self) -> list[dict[str, Any]]:
        """Each node's status; an empty one of those that don't answer."""
        return list(self._pool.map(Node.status, self.nodes))

    def vectors(self) -> np.ndarray:
        """Each node's parameters, a row each."""
        return np.array(list(self._pool.map(_parameters, self.nodes)))

    def set_mode(self, strategy: StrategyConfig) -> None:
        """Put another strategy in force, and wait until all follow."""
        options = {key: _text(value) for key, value in changed_options(strategy).items()}
        self.mode(strategy.mode, protocol=protocol_of(strategy), **options)

    def measure(self, protocol: str, seconds: float) -> Measured:
        """Watch the strategy in force for a while."""
        psutil.cpu_percent()
        first, began_s = self.statuses(), time.monotonic()
        time.sleep(seconds)
        last, took_s = self.statuses(), time.monotonic() - began_s
        return _difference(first, last, protocol, took_s, psutil.cpu_percent() / 100.0)


def _words(options: dict[str, Any]) -> list[str]:
    return [f"--set={key}={_text(value)}" for key, value in options.items()]


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parameters(node: Node) -> np.ndarray:
    room = io.BytesIO()
    node.client.download("/v1/checkpoint", room)
    return np.asarray(from_bytes(room.getvalue()).params, np.float64)


def _difference(
    first: list[dict[str, Any]], last: list[dict[str, Any]], protocol: str, seconds: float, cpu: float
) -> Measured:
    nodes = len(last)
    sums: dict[str, float] = {}
    outcomes: dict[str, int] = {}
    staleness: dict[str, int] = {}
    for before, after in zip(first, last, strict=True):
        old = before["accounting"].get(protocol, {})
        new = after["accounting"].get(protocol, {})
        for key in ("learner_wait_s", "round_s", "bytes_in", "bytes_out"):
            sums[key] = sums.get(key, 0.0) + new.get(key, 0) - old.get(key, 0)
        for key in ("bytes_in", "bytes_out"):
            sums[f"body_{key}"] = sums.get(f"body_{key}", 0.0) + after[key] - before[key]
        for field_name, counts in (("rounds", outcomes), ("staleness", staleness)):
            for key, count in new.get(field_name, {}).items():
                counts[key] = counts.get(key, 0) + count - old.get(field_name, {}).get(key, 0)
    good = outcomes.get("pushed", 0) or outcomes.get("ok", 0)
    begun = {key: count for key, count in outcomes.items() if key not in ("answered", "unchanged")}
    ended = sum(outcomes.values())
    lost = sum(begun.values()) - outcomes.get("pushed", 0) - outcomes.get("ok", 0)
    bounds = (*STALENESS_BOUNDS, 2 * STALENESS_BOUNDS[-1])
    merged = sum(staleness.values())
    aged = sum(count * bound for count, bound in zip(staleness.values(), bounds, strict=False))
    return Measured(
        seconds=seconds,
        updates_s=[(b["updates"] - a["updates"]) / seconds for a, b in zip(first, last, strict=True)],
        rounds_s=good / seconds / nodes,
        lost_s=lost / seconds / nodes,
        bytes_s=(sums["bytes_in"] + sums["bytes_out"]) / 2 / seconds / nodes,
        body_s=(sums["body_bytes_in"] + sums["body_bytes_out"]) / 2 / seconds / nodes,
        waiting=sums["learner_wait_s"] / seconds / nodes,
        round_s=sums["round_s"] / ended if ended else 0.0,
        staleness=aged / merged if merged else 0.0,
        cpu=cpu,
        outcomes=outcomes,
    )
