"""Swarms of nodes in pipeline mode, over the in-memory network, on virtual time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from p2pdrl.config.strategy import PipelineConfig
from p2pdrl.strategies.pipeline.strategy import PipelineStrategy
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

SIZE = 8
CONFIG = PipelineConfig(backend="stream", state_every=3, deadline_s=2.0, gossip_every_s=0.3)


def now() -> float:
    return asyncio.get_running_loop().time()


class Swarm:
    """Nodes that learn a bowl of their own in pipelines."""

    def __init__(self, seed: int = 0, *, trusted: bool = False) -> None:
        self.network = MemoryNetwork(random.Random(seed), delay_s=(0.001, 0.003))
        self.sim = SimSwarm(self.network)
        self.rng = np.random.default_rng(seed)
        self.trusted = trusted

    @property
    def nodes(self) -> list[SimNode]:
        return self.sim.nodes

    @property
    def living(self) -> list[SimNode]:
        return self.sim.living

    def add(self, count: int, config: PipelineConfig = CONFIG) -> list[SimNode]:
        made = []
        for _ in range(count):
            start = self.rng.standard_normal(SIZE).astype(np.float32)
            target = self.rng.standard_normal(SIZE).astype(np.float32)
            node = self.sim.add(
                config,
                start,
                trusted=self.trusted,
                gradient=lambda x, t=target: x - t,
                period_s=0.05,
                learning_rate=0.05,
            )
            made.append(node)
        return made

    async def start(self, nodes: Iterable[SimNode] | None = None) -> None:
        self.sim.introduce()
        for node in self.nodes if nodes is None else nodes:
            await node.start()

    async def until(self, happens: Callable[[], bool], within_s: float = 20.0, what: str = "") -> float:
        """Wait; return how long it took."""
        began_s = now()
        while not happens():
            assert now() - began_s < within_s, (what or "it didn't happen in time", self.story())
            await asyncio.sleep(0.01)
        return now() - began_s

    def story(self) -> list[Any]:
        return [(node.id[-2:], strategy(node).figures, node.swarm.told[-6:]) for node in self.nodes]

    def pipelines(self, nodes: Iterable[SimNode] | None = None) -> list[tuple[str, ...]]:
        """Pipelines all of whose ranks work, as their nodes show them: last digits of ids, by rank."""
        shown: dict[tuple[int, str], dict[int, str]] = {}
        for node in self.living if nodes is None else nodes:
            figures = strategy(node).figures
            order = node.stages.order
            if figures.rank is not None and order is not None and order.generation == figures.generation:
                key = figures.generation, figures.ranks[0]
                shown.setdefault(key, {})[figures.rank] = node.id[-1]
                if set(shown[key]) == set(range(len(figures.ranks))):
                    shown[key][-1] = ""
        return sorted(
            tuple(ranks[rank] for rank in sorted(ranks) if rank >= 0)
            for ranks in shown.values()
            if -1 in ranks
        )

    async def working(self, *pipelines: str, within_s: float = 20.0) -> float:
        """Wait until just these pipelines work, and each has made an update; any order behind the head."""
        want = sorted((one[0], *sorted(one[1:])) for one in pipelines)

        def there() -> bool:
            return sorted((one[0], *sorted(one[1:])) for one in self.pipelines()) == want

        took_s = await self.until(there, within_s, f"no {want}")
        return took_s + await self.progress(within_s)

    async def progress(self, within_s: float = 20.0) -> float:
        """Wait until each head has made another update."""
        heads = [node for node in self.living if (o := node.stages.order) is not None and o.rank == 0]
        before = {node.id: node.stages.updates for node in heads}
        return await self.until(
            lambda: all(node.stages.updates > before[node.id] for node in heads), within_s, "no update"
        )

    def versions(self, nodes: Iterable[SimNode] | None = None) -> set[int]:
        return {node.learner.board.policy_version for node in (nodes or self.living)}

    def vectors_agree(self, nodes: Iterable[SimNode]) -> bool:
        first, *others = [node.learner.now() for node in nodes]
        return all(np.array_equal(first, other) for other in others)

    def begun_alike(self) -> None:
        """All ranks of each generation began with the same parameters."""
        begun = {(n.id, b.order.generation): b for n in self.nodes for b in n.stages.began}
        for node in self.nodes:
            for began in node.stages.began:
                before = begun.get((began.previous, began.order.generation), began)
                assert np.array_equal(before.vector, began.vector), (before, node.id, began, self.story())

    def generations_grow(self) -> None:
        for node in self.nodes:
            numbers = [began.order.generation for began in node.stages.began]
            assert numbers == sorted(set(numbers)), numbers


def strategy(node: SimNode) -> PipelineStrategy:
    assert isinstance(node.strategy, PipelineStrategy)
    return node.strategy


@asynccontextmanager
async def swarm_of(
    count: int,
    config: Any = CONFIG,
    *,
    seed: int = 0,
    start: bool = True,
    trusted: bool = False,
) -> Any:
    swarm = Swarm(seed, trusted=trusted)
    swarm.add(count, config)
    try:
        if start:
            await swarm.start()
        yield swarm
    finally:
        await swarm.sim.close()
