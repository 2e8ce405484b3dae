"""Updates to everybody: what is sent and kept adds up, and replicas differ by their residuals alone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.config.strategy import StromConfig
from p2pdrl.strategies.relay.strom import StromStrategy
from p2pdrl.testing.virtual_swarm import SimNode

from ..graphs import SIZE, Crowd, still

pytestmark = pytest.mark.looptime

TAU = float(np.float32(0.01))
CONFIG = StromConfig(tau=0.01, min_interval_s=0.02, deadline_s=1.0)


def crowd_of(nodes: int, **options) -> Crowd:
    """Equal starts; each learner pulls towards a point of its own."""
    crowd = Crowd(CONFIG, nodes, starts=np.zeros((nodes, SIZE)), learning_rate=0.005, **options)
    for node in crowd.nodes:
        own_way(crowd, node)
    return crowd


def own_way(crowd: Crowd, node: SimNode) -> None:
    target = crowd.rng.standard_normal(SIZE)
    node.learner.gradient = lambda x, target=target: x - target


def freeze_learning(crowd: Crowd) -> None:
    for node in crowd.swarm.living:
        node.learner.gradient = still


async def quiet(crowd: Crowd, seconds: float = 6.0) -> None:
    """Learning stops; all that is beyond τ is told."""
    freeze_learning(crowd)
    await asyncio.sleep(seconds)


def residual(node: SimNode) -> np.ndarray:
    return node.strategy.residual.astype(np.float64)


def bases(crowd: Crowd) -> np.ndarray:
    return np.array([node.learner.now() - residual(node) for node in crowd.swarm.living])


def apart(crowd: Crowd) -> float:
    base_ND = bases(crowd)
    return float(np.abs(base_ND - base_ND[0]).max())


@pytest.mark.parametrize(("nodes", "direct"), [(2, 16), (5, 16), pytest.param(8, 3, marks=pytest.mark.slow)])
async def test_replicas_differ_by_their_residuals_once_quiet(nodes, direct):
    async with crowd_of(nodes, period_s=0.05) as crowd:
        for node in crowd.nodes:
            node.strategy = StromStrategy(CONFIG, node.context(), direct_members=direct)
        await crowd.start()
        await asyncio.sleep(4)
        await quiet(crowd)
        assert apart(crowd) < 2e-6
        assert all(np.abs(residual(node)).max() < TAU for node in crowd.nodes)
        assert np.abs(crowd.mean()).max() > 0.1
        assert all(node.strategy.facts["in_step"] == "yes" for node in crowd.nodes)
        assert {node.strategy.facts["relay"] for node in crowd.nodes} == {"yes" if nodes > direct else "no"}


async def test_the_sum_of_all_own_progress_is_in_every_replica():
    async with crowd_of(4) as crowd:
        for node in crowd.nodes:
            await node.start(train=False)
        await asyncio.sleep(1)
        total = np.zeros(SIZE)
        for _ in range(60):
            for node in crowd.nodes:
                progress = (0.02 * crowd.rng.standard_normal(SIZE)).astype(np.float32)
                before = node.learner.x.astype(np.float64)
                node.learner.x = node.learner.x + progress
                total += node.learner.x - before
                node.learner.publish()
                node.strategy.updated(1)
                node.learner.absorb()
            await asyncio.sleep(0.03)
        for _ in range(100):
            for node in crowd.nodes:
                node.learner.absorb()
                node.strategy.updated(1)
            await asyncio.sleep(0.03)
        expected = total - sum(residual(node) for node in crowd.nodes)
        assert np.abs(bases(crowd) - expected).max() < 2e-6
        assert all(np.abs(residual(node)).max() < TAU for node in crowd.nodes)


@pytest.mark.slow
async def test_losses_repetitions_and_delays_do_no_harm():
    """Seed 3: a fifth of all messages is lost, a tenth comes twice, in any order."""
    async with crowd_of(4, seed=3, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(1)
        crowd.network.loss, crowd.network.duplicate, crowd.network.delay_s = 0.2, 0.1, (0.001, 0.3)
        await asyncio.sleep(10)
        freeze_learning(crowd)
        await asyncio.sleep(30)
        assert apart(crowd) < 2e-6
        assert np.abs(crowd.mean()).max() > 0.1
        assert {"pushed", "answered"} < set(crowd.outcomes())


async def test_a_newcomer_counts_nothing_twice_and_misses_nothing():
    async with crowd_of(3, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(2)
        newcomer = crowd.add(crowd.nodes[1].learner.now())
        own_way(crowd, newcomer)
        crowd.swarm.introduce()
        await newcomer.start()
        await asyncio.sleep(2)
        await quiet(crowd)
        assert apart(crowd) < 2e-6
        assert newcomer.strategy.facts["bases_taken"] == 1
        assert sum(node.strategy.facts["bases_taken"] for node in crowd.nodes) == 3


async def test_a_newcomer_to_one_who_was_alone_for_long():
    async with crowd_of(1, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(10)
        old = crowd.nodes[0].learner.now()
        assert np.abs(old).max() > 0.5
        newcomer = crowd.add(old + 0.001)
        crowd.swarm.introduce()
        await newcomer.start()
        await asyncio.sleep(1)
        assert np.abs(crowd.xs() - old).max() < 0.5
        await quiet(crowd, 4)
        assert apart(crowd) < 2e-6
        assert crowd.nodes[0].strategy.facts["bases_taken"] == 0


@pytest.mark.slow
async def test_who_was_frozen_goes_on():
    async with crowd_of(4, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(2)
        crowd.network.freeze(crowd.nodes[2].id)
        await asyncio.sleep(5)
        crowd.network.thaw(crowd.nodes[2].id)
        await quiet(crowd, 15)
        assert apart(crowd) < 2e-6


@pytest.mark.parametrize(
    "window_bytes", [pytest.param(size, marks=pytest.mark.slow) for size in (300, 1 << 20)]
)
async def test_after_a_partition_all_come_to_one_base(window_bytes):
    async with crowd_of(6, period_s=0.05) as crowd:
        for node in crowd.nodes:
            node.strategy = StromStrategy(CONFIG, node.context(), window_bytes=window_bytes)
        await crowd.start()
        await asyncio.sleep(2)
        left, right = crowd.nodes[::2], crowd.nodes[1::2]
        for a in left:
            for b in right:
                crowd.network.cut(a.id, b.id)
                a.swarm.peers.pop(b.id)
                b.swarm.peers.pop(a.id)
        await asyncio.sleep(5)
        crowd.network.heal()
        crowd.swarm.introduce()
        await asyncio.sleep(5)
        await quiet(crowd, 10)
        assert apart(crowd) < 2e-6
        assert np.abs(crowd.mean()).max() > 0.1
        taken = sum(node.strategy.facts["bases_taken"] for node in crowd.nodes) - 5
        assert (taken > 0) == (window_bytes == 300), taken
        assert len({node.strategy.history for node in crowd.nodes}) == 1


async def test_a_death_holds_nobody_up():
    async with crowd_of(4, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(2)
        await crowd.swarm.kill(crowd.nodes[0])
        await asyncio.sleep(2)
        await quiet(crowd)
        assert apart(crowd) < 2e-6


async def test_an_adopted_state_is_no_progress_of_ours():
    async with crowd_of(3, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(2)
        node = crowd.nodes[1]
        node.learner.board.post_set(np.full(SIZE, 50, np.float32), None, 10)
        await asyncio.sleep(2)
        await quiet(crowd)
        assert apart(crowd) < 2e-6
        assert np.abs(crowd.xs()).max() < 10


async def test_replicas_that_began_apart_come_together():
    async with Crowd(CONFIG, 4, period_s=0.05) as crowd:
        first = crowd.nodes[0].learner.now()
        await crowd.start()
        await asyncio.sleep(2)
        assert apart(crowd) < 2e-6
        assert np.abs(crowd.xs() - first).max() < 2e-6


async def test_reports_and_figures():
    async with crowd_of(3, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(4)
        node = crowd.nodes[0]
        sent = [report for report in node.swarm.rounds if report.outcome == "pushed"]
        assert all(report.bytes_out > 0 and report.merged[1].weight == 0.5 for report in sent)
        facts = node.strategy.facts
        assert facts["tau"] == pytest.approx(0.01)
        told_bytes = sum(report.bytes_out for report in sent) / 2  # each message goes to two others
        assert facts["bytes_per_update"] == pytest.approx(told_bytes / node.learner.updates, rel=0.05)
        assert facts["compression_ratio"] == pytest.approx(4 * SIZE / facts["bytes_per_update"])
        assert 0 < facts["residual_norm"] <= TAU * SIZE
        got = [report for report in node.swarm.rounds if report.outcome == "answered"]
        assert all(report.changed > 0 for report in got)
        assert node.strategy.consensus_distance == pytest.approx(facts["residual_norm"] * (2 / 3) ** 0.5)


async def test_our_own_poison_is_healed_not_sent():
    async with crowd_of(3, period_s=0.05) as crowd:
        await crowd.start()
        await asyncio.sleep(1)
        bad = crowd.nodes[1]
        bad.learner.x[3] = np.nan
        bad.learner.publish()
        await asyncio.sleep(1)
        assert bad.swarm.heals
        assert np.isfinite(crowd.xs([crowd.nodes[0], crowd.nodes[2]])).all()


async def test_stopping_leaves_nothing_behind():
    async with crowd_of(4) as crowd:
        await crowd.start()
        await asyncio.sleep(0.5)
        for node in crowd.nodes:
            await node.strategy.stop(0.0)
            await node.pause()
        before = crowd.xs()
        await asyncio.sleep(5)
        assert np.array_equal(crowd.xs(), before)
