"""A swarm on a network that the test may change, closed at the end."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from p2pdrl.strategies.testing.simulator import SimSwarm
from p2pdrl.transport.memory import MemoryNetwork


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(random.Random(1), delay_s=(0.0005, 0.002))


@pytest.fixture
async def sim(network: MemoryNetwork) -> AsyncIterator[SimSwarm]:
    swarm = SimSwarm(network)
    yield swarm
    await swarm.close()
