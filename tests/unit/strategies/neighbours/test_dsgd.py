"""Synchronous gossip on graphs: the mean is kept, and each round contracts as the graph says."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.config.strategy import DsgdConfig
from p2pdrl.strategies.topology import matrix

from ..graphs import SIZE, Crowd

pytestmark = pytest.mark.looptime

EXACT = DsgdConfig(compression="none", deadline_s=4.0)
TOPOLOGIES = ["ring", "torus", "exponential", "random_regular", "complete"]


def eigenvectors(ids: list[str]) -> np.ndarray:
    """One start for each of eight nodes on a ring: eigenvectors of λ₂ in each dimension, any mean."""
    values, vectors = np.linalg.eigh(matrix("ring", ids))
    assert values[-2] ** 2 == pytest.approx(0.647603, abs=1e-6)
    scale = np.linspace(1, 3, SIZE)
    return vectors[:, [-2]] * scale + np.linspace(-1, 1, SIZE)


@pytest.mark.parametrize("topology", TOPOLOGIES)
@pytest.mark.parametrize("nodes", [2, 3, 9])
async def test_rounds_come_to_the_mean(topology, nodes):
    config = DsgdConfig(topology=topology, compression="none", deadline_s=4.0)
    async with Crowd(config, nodes) as crowd:
        first, mean = crowd.spread(), crowd.mean()
        await crowd.start(30)
        await crowd.trained()
        assert np.allclose(crowd.mean(), mean, atol=1e-6)
        assert crowd.spread() < 1e-2 * first
        assert set(crowd.outcomes()) == {"ok"}, crowd.outcomes()
        assert crowd.outcomes()["ok"] == 30 * nodes


async def test_a_round_on_a_ring_of_eight_contracts_by_the_second_eigenvalue():
    ids = [f"{number:032x}" for number in range(8)]
    async with Crowd(EXACT, 8, starts=eigenvectors(ids)) as crowd:
        first = crowd.spread()
        await crowd.start(5)
        await crowd.trained()
        assert crowd.spread() / first == pytest.approx(0.647603**5, rel=1e-4)
        facts = crowd.nodes[0].strategy.facts
        assert facts["lambda2"] == pytest.approx(0.647603**0.5, abs=1e-6)
        assert facts["spectral_gap"] == pytest.approx(1 - 0.647603**0.5, abs=1e-6)
        assert (facts["topology"], facts["members"]) == ("ring", 8)
        assert facts["neighbours"] == f"{ids[1]}, {ids[7]}"


async def test_bf16_keeps_the_mean_too():
    async with Crowd(DsgdConfig(), 8) as crowd:
        mean, first = crowd.mean(), crowd.spread()
        await crowd.start(40)
        await crowd.trained()
        assert np.allclose(crowd.mean(), mean, atol=1e-6)
        assert crowd.spread() < 1e-3 * first


async def test_a_slow_learner_is_waited_for():
    async with Crowd(EXACT, 4) as crowd:
        crowd.nodes[2].learner.period_s = 0.5
        await crowd.start(10)
        await crowd.trained()
        assert set(crowd.outcomes()) == {"ok"}
        fast = crowd.nodes[1]
        assert fast.learner.waited_s == pytest.approx(10 * 0.49, rel=0.05)
        assert sum(report.waited_s for report in fast.swarm.rounds) == pytest.approx(
            fast.learner.waited_s, rel=0.05
        )


async def test_reports_say_who_counted_how_much():
    async with Crowd(EXACT, 3) as crowd:
        await crowd.start(1)
        await crowd.trained()
        report = crowd.nodes[1].swarm.rounds[0]
        assert [merged.peer for merged in report.merged] == [
            node.id for node in (crowd.nodes[1], *crowd.nodes[::2])
        ]
        assert [merged.weight for merged in report.merged] == pytest.approx([1 / 3] * 3)
        assert (report.outcome, report.missing, report.round_trips) == ("ok", (), 1)
        assert report.bytes_out == report.bytes_in == 2 * 4 * SIZE
        assert report.changed > 0
        assert report.distance is not None


async def test_alone_the_learner_goes_on_at_once():
    async with Crowd(EXACT, 1) as crowd:
        await crowd.start(20)
        await crowd.trained()
        assert crowd.nodes[0].learner.waited_s < 0.1
        assert crowd.outcomes() == {}


async def test_stopping_leaves_nothing_behind():
    async with Crowd(EXACT, 4) as crowd:
        await crowd.start()
        await asyncio.sleep(0.303)
        for node in crowd.nodes:
            await node.strategy.stop(0.5)
        before = crowd.xs()
        await asyncio.sleep(5)
        assert np.array_equal(crowd.xs(), before)
        own = {node.learner.board.pending for node in crowd.nodes}
        assert own == {False}
