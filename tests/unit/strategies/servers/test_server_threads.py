"""Large shards are worked on in threads; time is real."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from p2pdrl.config.strategy import ServerAsyncConfig, ServerSyncConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm

SIZE = 400_000


@pytest.mark.parametrize("compression", ["none", "bf16", "int8"])
@pytest.mark.parametrize("kind", [ServerSyncConfig, ServerAsyncConfig])
async def test_nodes_learn_in_threads(kind, compression):
    sim = SimSwarm(MemoryNetwork(random.Random(0)))
    options = kind(compression=compression, servers=2, optimizer="sgd", learning_rate=0.1)
    for number in range(3):
        sim.add(options, np.full(SIZE, number + 1.0), period_s=0.002)
    sim.introduce()
    try:
        for node in sim.nodes:
            await node.start()
        async with asyncio.timeout(20):
            while not all(node.strategy.outcomes.get("ok", 0) >= 20 for node in sim.nodes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        for node in sim.nodes:
            x = node.learner.now()
            assert float(np.abs(x).max()) < 1.0
            assert np.ptp(x) < (1e-2 if kind is ServerAsyncConfig else 1e-6)
    finally:
        # In the middle of everything: no thread may be left that touches a board.
        await sim.close()


@pytest.mark.parametrize("kind", [ServerSyncConfig, ServerAsyncConfig])
async def test_a_server_that_dies_while_threads_work(kind):
    sim = SimSwarm(MemoryNetwork(random.Random(0)), detect_s=0.1)
    options = kind(servers=2, learning_rate=0.001, deadline_s=2.0)
    for _ in range(4):
        sim.add(options, np.ones(SIZE), period_s=0.002)
    sim.introduce()
    try:
        for node in sim.nodes:
            await node.start()
        async with asyncio.timeout(20):
            while not all(node.strategy.outcomes.get("ok", 0) >= 5 for node in sim.nodes):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        serving = str(sim.nodes[0].strategy.facts["servers"]).split(", ")
        await sim.kill(next(node for node in sim.nodes if node.id == serving[0]))
        then = {node.id: node.strategy.outcomes["ok"] for node in sim.living}
        async with asyncio.timeout(20):
            while not all(node.strategy.outcomes["ok"] >= then[node.id] + 5 for node in sim.living):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    finally:
        await sim.close()
