"""What every asynchronous gossip withstands: loss, a death, a newcomer, a frozen node, a change of mode."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from p2pdrl.config.strategy import AdpsgdConfig, GalaConfig, SgpConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

pytestmark = [pytest.mark.looptime, pytest.mark.slow]

D, PERIOD_S = 16, 0.1
FAMILY = {
    "adpsgd": AdpsgdConfig(),
    "adpsgd fresh clipped": AdpsgdConfig(merge_weights="fresh", mixing="clipped"),
    "adpsgd gradients": AdpsgdConfig(exchanges="gradients", compression="int8", parameters_every=3),
    "sgp": SgpConfig(),
    "gala": GalaConfig(partners="exponential"),
    "gala gradients": GalaConfig(exchanges="gradients", partners="exponential", parameters_every=3),
}


def add(swarm: SimSwarm, config) -> SimNode:
    number = len(swarm.nodes)
    rng = np.random.default_rng(number)
    target = rng.standard_normal(D).astype(np.float32)
    node = swarm.add(
        config,
        rng.standard_normal(D, dtype=np.float32),
        gradient=lambda x: x - target,
        learning_rate=0.02,
        period_s=PERIOD_S,
    )
    node.target = target
    return node


def spread(nodes: list[SimNode]) -> float:
    xs = np.array([node.learner.now() for node in nodes])
    return float(np.linalg.norm(xs - xs.mean(axis=0), axis=1).mean())


def apart(nodes: list[SimNode]) -> float:
    targets = np.array([node.target for node in nodes])
    return float(np.linalg.norm(targets - targets.mean(axis=0), axis=1).mean())


@pytest.mark.parametrize("name", FAMILY)
async def test_eight_nodes_train_through_every_trouble(name):
    network = MemoryNetwork(random.Random(3), delay_s=(0.002, 0.02), loss=0.2)
    swarm = SimSwarm(network)
    for _ in range(8):
        add(swarm, FAMILY[name])
    swarm.introduce()
    for node in swarm.nodes:
        await node.start()
    await asyncio.sleep(8)
    frozen = swarm.nodes[2]  # and for a while after that, those that it couldn't reach rest
    network.freeze(frozen.id)
    await swarm.kill(swarm.nodes[5])
    await asyncio.sleep(8)
    network.thaw(frozen.id)
    await add(swarm, FAMILY[name]).start()
    swarm.introduce()
    await asyncio.sleep(12)
    assert spread(swarm.living) < 0.6 * apart(swarm.living)
    for node in swarm.living[:-1]:
        assert node.learner.updates >= 28 / PERIOD_S - 3  # nobody ever waited
        moved = node.strategy.outcomes.get("ok", 0) + node.strategy.outcomes.get("answered", 0)
        assert moved > (8 if node is frozen else 20), node.strategy.outcomes
        assert node.swarm.strikes == node.swarm.heals == node.swarm.adoptions == []
        assert all(report.seconds <= 2.01 for report in node.swarm.rounds)
        good = [report for report in node.swarm.rounds if report.outcome in ("ok", "answered")]
        assert all(report.merged and not report.error for report in good)
        assert all(
            report.error for report in node.swarm.rounds if report.outcome not in ("ok", "answered", "pushed")
        )
    await swarm.close()


async def test_the_mode_of_training_nodes_is_changed_and_changed_again():
    swarm = SimSwarm(MemoryNetwork(random.Random(4), delay_s=(0.002, 0.02)))
    for _ in range(4):
        add(swarm, FAMILY["adpsgd"])
    swarm.introduce()
    for node in swarm.nodes:
        await node.start()
    for epoch, name in enumerate(("sgp", "gala", "adpsgd", "sgp"), start=2):
        await asyncio.sleep(2)
        for node in swarm.nodes:
            await node.switch(FAMILY[name], epoch)
            await asyncio.sleep(0.3)  # meanwhile the two epochs refuse each other
        await asyncio.sleep(3)
        assert spread(swarm.nodes) < 0.5 * apart(swarm.nodes)
        for node in swarm.nodes:
            outcomes = node.strategy.outcomes
            assert outcomes.get("ok", 0) + outcomes.get("answered", 0) > 5, outcomes
    await swarm.close()
    assert len(asyncio.all_tasks()) == 1
