"""Swarms on an in-memory network, closed at the end."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm

from .pushers import D


@pytest.fixture
async def make_swarm() -> AsyncIterator[Callable[..., SimSwarm]]:
    """Makes swarms whose nodes know each other, with options of the learners and of the network."""
    swarms: list[SimSwarm] = []

    def made(count: int, options: StrategyConfig, learner: dict[str, Any], **network: Any) -> SimSwarm:
        size = network.pop("size", D)
        delay_s = network.pop("delay_s", (0.005, 0.02))
        swarm = SimSwarm(MemoryNetwork(random.Random(1), delay_s=delay_s, **network))
        rng = np.random.default_rng(0)
        for _ in range(count):
            swarm.add(options, rng.standard_normal(size, dtype=np.float32), **{"period_s": 0.05, **learner})
        swarm.introduce()
        swarms.append(swarm)
        return swarm

    yield made
    for swarm in swarms:
        for node in swarm.nodes:
            swarm.network.thaw(node.id)
        await swarm.close()
