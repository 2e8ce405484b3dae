"""Eight nodes that gossip come to one vector, and that is the mean they began with."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

pytestmark = pytest.mark.looptime

COMPRESSION = {"float32": "none", "bf16": "bf16"}
NODES, TURNS, TURN_S = 8, 60, 0.06


def consensus(nodes) -> float:
    """sqrt(mean over nodes of |x - mean|²)."""
    xs = np.array([node.now() for node in nodes], np.float64)
    return float(np.sqrt(np.square(xs - xs.mean(axis=0)).sum(axis=1).mean()))


def mean(nodes) -> np.ndarray:
    return np.mean([node.now().astype(np.float64) for node in nodes], axis=0)


async def live(nodes, turns: int, *, slow: int = 1) -> None:
    """Learners absorb and publish; the first one only every ``slow`` turns."""
    for turn in range(turns):
        for number, node in enumerate(nodes):
            if number or turn % slow == 0:
                node.turn()
            node.strategy.updated(1)
        await asyncio.sleep(TURN_S)


async def settle(nodes) -> None:
    """No exchange is under way any more."""
    for node in nodes:
        await node.strategy.stop(2.0)
    await asyncio.sleep(0.1)


@pytest.mark.parametrize(
    ("wire", "partners"),
    [("float32", "random"), ("bf16", "random"), ("bf16", "ring"), ("bf16", "exponential")],
)
async def test_eight_nodes_agree_on_their_mean(swarm, wire, partners):
    config = msgspec.structs.replace(swarm.config, compression=COMPRESSION[wire], partners=partners)
    nodes = await swarm.grow(NODES, config)
    first, mean_D = consensus(nodes), mean(nodes)
    await live(nodes, TURNS * (3 if partners == "ring" else 1), slow=5)
    await settle(nodes)
    assert np.allclose(mean(nodes), mean_D, atol=1e-6)
    assert consensus(nodes) < (1e-2 if wire == "float32" else 2e-2) * first
    estimates = [node.strategy.consensus_distance for node in nodes]
    assert all(estimate < 0.2 * first for estimate in estimates)


@pytest.mark.slow
async def test_exchanges_contract_as_on_the_complete_graph(swarm):
    """Whatever the vectors, an exchange takes 1/(n − 1) of the squared distances from their mean on average.

    100 runs of 12 exchanges by seeds 0 to 99: the standard error of the mean is 0.003.
    """
    nodes = await swarm.grow(NODES)
    shares = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        for node in nodes:
            node.x_D = rng.standard_normal(node.x_D.size).astype(np.float32)
            node.turn()
        left, mean_D = consensus(nodes), mean(nodes)
        for _ in range(12):
            nodes[rng.integers(NODES)].strategy.updated(1)
            await asyncio.sleep(TURN_S)
            for node in nodes:
                node.turn()
            before, left = left, consensus(nodes)
            shares.append((left / before) ** 2)
        assert np.allclose(mean(nodes), mean_D, atol=1e-6)
    assert sum(node.strategy.outcomes.get("ok", 0) for node in nodes) == len(shares)
    assert np.mean(shares) == pytest.approx(1 - 1 / (NODES - 1), abs=0.01)


async def test_the_greatest_version_gets_around(swarm):
    nodes = await swarm.grow(NODES)
    for node in nodes:
        node.swarm.says = None

    def summary(node):
        return lambda: msgspec.structs.replace(swarm.says(node), policy_version=node.board.policy_version)

    for node in nodes:
        node.swarm.summary = summary(node)
    nodes[3].version = 900
    await live(nodes, 30)
    assert {node.version for node in nodes} == {900}


async def test_nodes_that_come_and_go_disturb_nobody(swarm, network):
    nodes = await swarm.grow(NODES)
    first = consensus(nodes)
    await live(nodes, 5)
    network.freeze(nodes[7].id)
    network.cut(nodes[6].id, nodes[0].id)
    await live(nodes, TURNS)
    assert consensus(nodes[:7]) < 0.1 * first
    network.thaw(nodes[7].id)
    network.heal()
    await live(nodes, TURNS)
    assert consensus(nodes) < 0.1 * first
