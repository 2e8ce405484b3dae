"""Swarms for the tests of strategies on graphs and of updates to everybody, beside this one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import numpy as np

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

SIZE = 12


def still(x: np.ndarray) -> np.ndarray:
    """The gradient of a learner that learns nothing: what moves it is its peers."""
    return np.zeros_like(x)


class Crowd:
    """Nodes with one strategy; all random numbers come from ``seed``."""

    def __init__(
        self,
        config: StrategyConfig,
        nodes: int,
        *,
        seed: int = 0,
        delay_s: tuple[float, float] = (0.001, 0.002),
        starts: np.ndarray | None = None,
        **learner: object,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.network = MemoryNetwork(random.Random(seed), delay_s=delay_s)
        self.swarm = SimSwarm(self.network)
        self.config = config
        self.learner = {"gradient": still, **learner}
        for number in range(nodes):
            self.add(None if starts is None else starts[number])
        self.swarm.introduce()

    @property
    def nodes(self) -> list[SimNode]:
        return self.swarm.nodes

    def add(self, start: np.ndarray | None = None, **learner: object) -> SimNode:
        if start is None:
            start = self.rng.standard_normal(SIZE)
        return self.swarm.add(self.config, start.astype(np.float32), **{**self.learner, **learner})

    async def start(self, updates: int | None = None, nodes: list[SimNode] | None = None) -> None:
        for node in self.nodes if nodes is None else nodes:
            await node.start(updates)

    async def trained(self, within_s: float = 60.0) -> None:
        """Wait until all learners have made their updates."""
        async with asyncio.timeout(within_s):
            for node in self.swarm.living:
                await node.trained()

    def xs(self, nodes: list[SimNode] | None = None) -> np.ndarray:
        return np.array([node.learner.now() for node in nodes or self.swarm.living], np.float64)

    def mean(self) -> np.ndarray:
        return self.xs().mean(axis=0)

    def spread(self, nodes: list[SimNode] | None = None) -> float:
        """Σ ‖x_i − mean‖²."""
        xs = self.xs(nodes)
        return float(np.square(xs - xs.mean(axis=0)).sum())

    def outcomes(self) -> Counter[str]:
        total: Counter[str] = Counter()
        for node in self.nodes:
            total.update(node.strategy.outcomes)
        return total

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.swarm.close()
