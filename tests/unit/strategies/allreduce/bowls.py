"""Swarms of averaging nodes for the tests beside this one."""

from __future__ import annotations

import asyncio
import itertools
import random

import numpy as np

from p2pdrl.config.strategy import GradAverageConfig, ParamAverageConfig
from p2pdrl.strategies.allreduce.reduce_scatter import OwnedPiece, cut_pieces
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

GRADIENTS = GradAverageConfig(compression="none", deadline_s=4.0)
PARAMETERS = ParamAverageConfig(compression="none", every_updates=4, deadline_s=4.0)
SIZE = 24


class Bowls:
    """Nodes whose losses are bowls around different points; all random numbers come from ``seed``."""

    def __init__(self, config=GRADIENTS, nodes=4, *, seed=0, size=SIZE, delay_s=(0.001, 0.002), **options):
        self.rng = np.random.default_rng(seed)
        self.network = MemoryNetwork(random.Random(seed), delay_s=delay_s)
        self.swarm = SimSwarm(self.network)
        self.config, self.size, self.options = config, size, options
        for _ in range(nodes):
            self.add()
        self.swarm.introduce()

    @property
    def nodes(self) -> list[SimNode]:
        return self.swarm.nodes

    def add(self, **options) -> SimNode:
        target = self.rng.standard_normal(self.size).astype(np.float32)
        start = self.rng.standard_normal(self.size).astype(np.float32)
        settings = {"gradient": lambda x: x - target, "period_s": 0.04, **self.options, **options}
        node = self.swarm.add(self.config, start, **settings)
        node.learner.keep_history = True
        node.times = [0.0]
        node.target = target
        return node

    async def start(self, updates=None, nodes=None) -> None:
        for node in self.nodes if nodes is None else nodes:
            await node.start(updates)
            told = node.learner.on_update
            node.learner.on_update = lambda n, node=node, told=told: (stamp(node), told(n))

    async def close(self) -> None:
        await self.swarm.close()

    async def __aenter__(self) -> Bowls:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def stamp(node) -> None:
    node.times.append(asyncio.get_running_loop().time())


def now() -> float:
    return asyncio.get_running_loop().time()


def stall_s(node, since_s=0.0) -> float:
    """Longest time between two updates of ``node`` after ``since_s``, up to now."""
    times = [since_s, *(t for t in node.times if t > since_s), now()]
    return max(b - a for a, b in itertools.pairwise(times))


def shared(nodes, last=10) -> int:
    """How many of each node's ``last`` vectors all of them had, bit for bit (one may be a step ahead)."""
    histories = [{x.tobytes() for x in node.learner.history} for node in nodes]
    common = set.intersection(*histories)
    return min(sum(x.tobytes() in common for x in node.learner.history[-last:]) for node in nodes)


def together(nodes) -> bool:
    """Whether all had the same vectors lately: after each step, or after each round of parameters."""
    every = getattr(nodes[0].config, "every_updates", 1)
    return shared(nodes, 5 * every) >= 4


def rounds_of(node) -> int:
    """Number of the last round that is in a node's history."""
    return node.strategy.facts["round"]


def pieces_of(bowls) -> tuple[OwnedPiece, ...]:
    """Who owns which piece in the view in force."""
    return cut_pieces(bowls.swarm.living[0].group.view, bowls.size)


async def until(happens, within_s=30.0) -> float:
    """Wait for ``happens()``; tell how long it took."""
    began_s = now()
    while not happens():
        assert now() - began_s < within_s, "it didn't happen in time"
        await asyncio.sleep(0.01)
    return now() - began_s
