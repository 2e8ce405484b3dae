"""A live swarm that walks from mode to mode with a learning rate of 0 keeps the mean of all parameters."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from p2pdrl.config.strategy import AdpsgdConfig, LocalConfig, ServerAsyncConfig, ServerSyncConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm

pytestmark = pytest.mark.looptime

WALK = (
    ServerSyncConfig(servers=2, learning_rate=0.0, optimizer="adam"),
    AdpsgdConfig(),
    ServerAsyncConfig(servers=3, learning_rate=0.0, optimizer="adagrad"),
    ServerSyncConfig(servers=1, learning_rate=0.0, compression="none"),
    ServerAsyncConfig(servers=1, learning_rate=0.0, local_steps=True, fetch_every=3),
    LocalConfig(),
)


@pytest.mark.slow
async def test_the_mean_is_kept_at_every_switch():
    sim = SimSwarm(MemoryNetwork(random.Random(2), delay_s=(0.001, 0.003)))
    rng = np.random.default_rng(4)
    for _ in range(4):
        sim.add(AdpsgdConfig(), rng.normal(size=50), learning_rate=0.0, period_s=0.03)
    sim.introduce()

    def mean() -> np.ndarray:
        return np.mean([node.learner.now().astype(np.float64) for node in sim.nodes], axis=0)

    first = mean()
    try:
        for node in sim.nodes:
            await node.start()
        await asyncio.sleep(2.0)
        for epoch, config in enumerate(WALK, start=2):
            await asyncio.gather(*(node.switch(config, epoch) for node in sim.nodes))
            for node in sim.nodes:
                # A learner that waits for the old strategy drops its post at the next learner_mode.
                node.learner.drop_posts()
            await asyncio.sleep(3.0)
            assert np.abs(mean() - first).max() <= 1e-5 * np.abs(first).max(), config
            if isinstance(config, ServerSyncConfig | ServerAsyncConfig):
                assert all(node.strategy.outcomes.get("ok", 0) > 5 for node in sim.nodes)
    finally:
        await sim.close()
