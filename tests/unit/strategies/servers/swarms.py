"""Swarms with parameter servers for the tests beside this one: grown, and looked at."""

from __future__ import annotations

import asyncio

import numpy as np

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.strategies.testing.simulator import SimNode, SimSwarm

SIZE = 10
COMMON = {"compression": "none", "servers": 2, "optimizer": "sgd", "deadline_s": 2.0}
"""Options, but for the learning rate."""


async def grow(
    sim: SimSwarm, count: int, options: StrategyConfig, *, period_s: float = 0.05, **learner: object
) -> list[SimNode]:
    """Start ``count`` nodes, and give them a second to find their servers."""
    rng = np.random.default_rng(5)
    for _ in range(count):
        sim.add(options, rng.normal(size=SIZE), period_s=period_s, **learner)
    sim.introduce()
    for node in sim.nodes:
        await node.start()
    await asyncio.sleep(1.0)
    return sim.nodes


def servers_of(nodes: list[SimNode]) -> tuple[list[SimNode], list[SimNode]]:
    """The serving nodes, in the order of the shards, and the others."""
    names = next(n.strategy.facts["servers"] for n in nodes if "servers" in n.strategy.facts).split(", ")
    by_id = {node.id: node for node in nodes}
    return [by_id[name] for name in names], [node for node in nodes if node.id not in names]


async def progress(nodes: list[SimNode], seconds: float) -> list[int]:
    """Updates of each learner within ``seconds``."""
    before = [node.learner.updates for node in nodes]
    await asyncio.sleep(seconds)
    return [node.learner.updates - then for node, then in zip(nodes, before, strict=True)]
