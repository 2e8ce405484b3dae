"""A swarm on a network that the test may change, closed at the end."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator

import pytest

from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(random.Random(1), delay_s=(0.0005, 0.002))


@pytest.fixture
async def sim(network: MemoryNetwork) -> AsyncIterator[SimSwarm]:
    swarm = SimSwarm(network)
    yield swarm
    await swarm.close()
