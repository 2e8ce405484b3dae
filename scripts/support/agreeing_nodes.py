"""Real nodes that start apart, watched until a strategy has brought them together; for `check_planner`.

Nodes start from independent vectors and train alone, with learning rate zero. Once all are there the strategy
is put in force, and their vectors are read until they agree. Nodes that began while others still start would
push among themselves, and lose their turn to refusals: that measures the slowest start, not the strategy.
"""

from __future__ import annotations

import itertools
import math
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import psutil

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.planner.forecast import AGREED
from support.live_swarm import LiveSwarm

__all__ = ["crossing", "gather", "started"]

LOOK_S = 0.1
START_S = 300.0
"""The longest that nodes may take to start."""


def gather(
    nodes: int, options: dict[str, Any], strategy: StrategyConfig, seed: int, most_s: float
) -> tuple[float | None, float]:
    """Watch nodes come together.

    Args:
        nodes: how many.
        options: of all; they train alone by them, with learning rate zero.
        strategy: what brings them together.
        seed: of their vectors.
        most_s: give up after so long.

    Returns:
        Exchanges, merged pushes or rounds of a node until they agree, None when they don't; and the share of
        all cores that was busy meanwhile.
    """
    own = {place: {"node.seed": seed + place} for place in range(nodes)}
    with (
        LiveSwarm(nodes, options | {"node.debug.perturb_start": 1.0}, own) as live,
        ThreadPoolExecutor(1) as pool,
    ):
        started(live)
        first, walk = _spread(live.vectors()), [(0.0, 1.0)]
        psutil.cpu_percent()
        until_s = time.monotonic() + most_s
        switch = pool.submit(live.set_mode, strategy)
        while walk[-1][1] > AGREED and time.monotonic() < until_s:
            time.sleep(LOOK_S)
            before = _exchanges(live)
            part = _spread(live.vectors()) / first
            walk.append(((before + _exchanges(live)) / 2, part))
        busy = psutil.cpu_percent() / 100.0
        switch.result()
    return crossing(walk), busy


def started(live: LiveSwarm) -> None:
    """Wait until all train.

    Raises:
        SystemExit: they don't in time, or one has ended.
    """
    live.ready(START_S)
    for node in live.nodes:
        if not node.alive:
            log = (live.root / f"{node.name}.log").read_text(errors="replace")
            raise SystemExit(f"{node.name} has ended: {log[-500:]}")


def _exchanges(live: LiveSwarm) -> int:
    """Exchanges, merged pushes or rounds, over all nodes."""
    return sum(status.get("exchanges", {}).get("ok", 0) for status in live.statuses())


def _spread(vectors: np.ndarray) -> float:
    """The consensus distance."""
    return float(np.sqrt(((vectors - vectors.mean(0)) ** 2).sum(1).mean()))


def crossing(walk: list[tuple[float, float]]) -> float | None:
    """Count exchanges up to the one with which the part fell to `AGREED`.

    Between two looks it lies on a line in the part's logarithm. The planner counts whole exchanges, so half
    of one is added; and it is at least one after the look before, for the last one may do it all.

    Args:
        walk: exchanges so far, and the part of the first distance that was left, at each look.
    """
    for (one, high), (other, low) in itertools.pairwise(walk):
        if low <= AGREED:
            share = math.log(high / AGREED) / math.log(high / max(low, 1e-12))
            return min(max(one + share * (other - one) + 0.5, one + 1.0), other)
    return None
