"""Neighbours that mix gradients, against the same recursion with matrices; and robust mixing."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import DsgdConfig
from p2pdrl.strategies.topology import matrix

from ..graphs import SIZE, Crowd

pytestmark = pytest.mark.looptime

GRADIENTS = DsgdConfig(exchanges="gradients", compression="none", parameters_every=3, deadline_s=2.0)
NODES, RATE = 6, 0.1


def bowls(config: DsgdConfig, nodes: int = NODES) -> tuple[Crowd, np.ndarray]:
    """Learners whose losses are bowls around different points."""
    crowd = Crowd(config, nodes, learning_rate=RATE)
    targets = crowd.rng.standard_normal((nodes, SIZE))
    for node, target in zip(crowd.nodes, targets, strict=True):
        node.learner.gradient = lambda x, target=target: x - target
    return crowd, targets


@pytest.mark.parametrize("topology", ["ring", "complete", "torus"])
async def test_it_is_the_recursion_of_the_paper(topology):
    config = msgspec.structs.replace(GRADIENTS, topology=topology)
    crowd, targets = bowls(config)
    async with crowd:
        x_ND = crowd.xs()
        W_NN = matrix(topology, [node.id for node in crowd.nodes])
        await crowd.start(20)
        await crowd.trained()
        for number in range(20):
            steps_ND = RATE * (W_NN @ (x_ND - targets))
            mixed_ND = W_NN @ x_ND if (number + 1) % 3 == 0 else x_ND
            x_ND = mixed_ND - steps_ND
        assert np.abs(crowd.xs() - x_ND).max() < 1e-5
        assert crowd.outcomes() == {"ok": NODES * (20 + 20 // 3)}


@pytest.mark.parametrize("kind", ["bf16", "int8", "topk", "threshold"])
async def test_compressed_gradients_lead_to_the_same_place(kind):
    config = msgspec.structs.replace(GRADIENTS, compression=kind, keep=0.3, threshold=0.05)
    crowd, targets = bowls(config)
    async with crowd:
        await crowd.start(90)
        await crowd.trained()
        assert np.abs(crowd.mean() - targets.mean(axis=0)).max() < 0.05, kind
        assert set(crowd.outcomes()) == {"ok"}


async def test_mixed_gradients_keep_their_sum():
    crowd, targets = bowls(msgspec.structs.replace(GRADIENTS, compression="topk", keep=0.1))
    async with crowd:
        mean = crowd.mean()
        await crowd.start(1)
        await crowd.trained()
        assert np.allclose(crowd.mean(), mean - RATE * (mean - targets.mean(axis=0)), atol=1e-6)


@pytest.mark.slow
async def test_a_death_among_gradients():
    crowd, targets = bowls(GRADIENTS)
    async with crowd:
        for node in crowd.nodes:
            node.learner.period_s = 0.05
        await crowd.start()
        await asyncio.sleep(2.02)
        await crowd.swarm.kill(crowd.nodes[2])
        await asyncio.sleep(20)
        left = np.delete(targets, 2, axis=0).mean(axis=0)
        assert np.abs(crowd.mean() - left).max() < 0.05
        assert all(node.learner.updates > 250 for node in crowd.swarm.living)


@pytest.mark.parametrize("mixing", ["clipped", "trimmed"])
async def test_a_liar_drags_nobody_far(mixing):
    """A node that always sends a vector ten times as long: the mean follows it, robust mixing doesn't."""
    far = {}
    for kind in ("mean", mixing):
        config = DsgdConfig(topology="complete", mixing=kind, compression="none", deadline_s=2.0)
        starts = np.ones((5, SIZE)) + 0.1 * np.random.default_rng(0).standard_normal((5, SIZE))
        async with Crowd(config, 5, starts=starts) as crowd:
            liar = crowd.nodes[0]
            liar.learner.x = np.full(SIZE, -10, np.float32)
            liar.learner.absorb = lambda: None
            liar.learner.publish()
            await crowd.start(3)
            await crowd.trained()
            far[kind] = np.abs(crowd.xs(crowd.nodes[1:]) - 1).max()
    assert far["mean"] > 2
    assert far[mixing] < (0.3 if mixing == "trimmed" else 1.0)


async def test_clipping_keeps_the_mean_of_those_who_are_as_far_as_usual():
    config = DsgdConfig(mixing="clipped", topology="complete", compression="none")
    starts = np.ones((5, SIZE)) + 0.01 * np.random.default_rng(0).standard_normal((5, SIZE))
    async with Crowd(config, 5, starts=starts) as crowd:
        mean, first = crowd.mean(), crowd.spread()
        await crowd.start(5)
        await crowd.trained()
        assert np.allclose(crowd.mean(), mean, atol=1e-6)
        assert crowd.spread() < 0.2 * first
