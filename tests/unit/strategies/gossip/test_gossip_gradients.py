"""Gradients averaged in pairs: corrections are opposite, and the learner never waits for the network."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimSwarm

pytestmark = pytest.mark.looptime

D = 40


def config(**options) -> AdpsgdConfig:
    return AdpsgdConfig(exchanges="gradients", **({"compression": "none", "min_interval_s": 0.01} | options))


def make(count: int, options: AdpsgdConfig, network: MemoryNetwork | None = None, **learner) -> SimSwarm:
    swarm = SimSwarm(network or MemoryNetwork(random.Random(0), delay_s=(0.001, 0.002)))
    rng = np.random.default_rng(0)
    for _ in range(count):
        swarm.add(options, rng.standard_normal(D, dtype=np.float32), **learner)
    swarm.introduce()
    return swarm


async def start(swarm: SimSwarm, updates: int | None = None, **options) -> None:
    for node in swarm.nodes:
        await node.start(updates, **options)


def watch_answers(node) -> list[tuple[int, str, np.ndarray]]:
    """What the learner is answered, from now on."""
    answers, tell = [], node.learner.answer

    def told(post, kind):
        answers.append((post.number, kind, post.vector.copy()))
        tell(post, kind)

    node.learner.answer = told
    return answers


@pytest.mark.parametrize("compression", ["none", "bf16", "int8", "topk", "threshold"])
async def test_both_sides_add_the_opposite(compression):
    swarm = make(2, config(compression=compression, keep=0.2, threshold=0.3, parameters_every=1000))
    a, b = swarm.nodes
    answers = [watch_answers(node) for node in swarm.nodes]
    await start(swarm, train=False)
    for node in swarm.nodes:
        node.learner.make_request("gradients", node.learner.x.copy())
    a.strategy.updated(1)
    await asyncio.sleep(0.5)
    ((_, kind_a, to_a),), ((_, kind_b, to_b),) = answers
    assert (kind_a, kind_b) == ("add", "add")
    assert np.array_equal(to_a, -to_b)
    assert np.linalg.norm(to_a) > 0
    if compression in ("none", "bf16", "int8"):
        assert np.allclose(to_a, (b.learner.x - a.learner.x) / 2, atol=0.02)
    assert (a.strategy.outcomes, b.strategy.outcomes) == ({"ok": 1}, {"answered": 1})
    await swarm.close()


@pytest.mark.parametrize("trouble", ["alone", "frozen", "loss", "slow"])
async def test_the_learner_never_waits(trouble):
    network = MemoryNetwork(random.Random(1), delay_s=(0.001, 0.002))
    swarm = make(1 if trouble == "alone" else 3, config(), network, period_s=0.01)
    if trouble == "frozen":
        network.freeze(swarm.nodes[1].id)
    network.loss = 0.3 if trouble == "loss" else 0.0
    if trouble == "slow":
        network.delay_s = (0.5, 1.0)
    await start(swarm)
    await asyncio.sleep(5)
    # Each update takes 0.01 s of its own, and nothing else.
    assert all(node.learner.updates >= 495 for node in swarm.nodes)
    if trouble == "alone":
        assert swarm.nodes[0].strategy.outcomes == {}
    await swarm.close()
    for node in swarm.nodes:
        network.thaw(node.id)


async def test_replicas_of_different_data_keep_to_the_common_minimum():
    swarm = make(4, config(), period_s=0.02, learning_rate=0.05)
    rng = np.random.default_rng(5)
    targets = rng.standard_normal((4, D)).astype(np.float32)
    for node, target in zip(swarm.nodes, targets, strict=True):
        node.learner.gradient = lambda x, target=target: x - target
    await start(swarm)
    await asyncio.sleep(15)
    xs = np.array([node.learner.now() for node in swarm.nodes])
    alone = np.linalg.norm(targets - targets.mean(axis=0), axis=1).mean()
    # Corrections are opposite, so the mean descends as one learner would; a step or two may be under way.
    assert np.linalg.norm(xs.mean(axis=0) - targets.mean(axis=0)) < 0.02 * alone
    assert np.linalg.norm(xs - xs.mean(axis=0), axis=1).max() < 0.6 * alone
    for node in swarm.nodes:
        outcomes = node.strategy.outcomes
        assert outcomes["ok"] > 50, outcomes
    await swarm.close()


async def test_parameters_are_mixed_every_so_often():
    swarm = make(2, config(parameters_every=3), period_s=0.05)
    await start(swarm)
    await asyncio.sleep(3)
    for node in swarm.nodes:
        await node.strategy.stop(1.0)
    assert swarm.nodes[0].strategy.consensus_distance is not None
    apart = np.linalg.norm(swarm.nodes[0].learner.now() - swarm.nodes[1].learner.now())
    assert apart < 0.05
    await swarm.close()


async def test_a_bad_gradient_stays_at_home_and_bad_parameters_are_healed():
    swarm = make(2, config())
    a, b = swarm.nodes
    await start(swarm, train=False)
    for node in swarm.nodes:
        node.learner.make_request("gradients", np.full(D, np.nan if node is a else 1.0, np.float32))
    a.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert a.strategy.outcomes["failed"] >= 1
    assert (a.swarm.heals, b.swarm.strikes, b.strategy.outcomes) == ([], [], {})
    a.learner.x = np.full(D, np.nan, np.float32)
    a.learner.publish()
    await asyncio.sleep(2)
    assert a.swarm.heals
    await swarm.close()


async def test_parameters_only_nodes_refuse_gradients():
    swarm = make(1, config())
    swarm.add(AdpsgdConfig(compression="none"), np.ones(D, np.float32))
    swarm.introduce()
    a, b = swarm.nodes
    await start(swarm, train=False)
    a.learner.make_request("gradients", a.learner.x.copy())
    a.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert a.strategy.outcomes == {"refused": 1}
    assert b.strategy.outcomes == {}
    await swarm.close()
