"""Learners in lockstep with long collections and many short gradients: all collect at the same time.

An update is a collection of 0.4 s and 16 gradients of 10 ms; ways take 1 to 2 ms. Learners begin at different
times and places of their updates. Without an end of updates in common each cycle contains several collections
one after another.
"""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from p2pdrl.config.strategy import GradAverageConfig, ServerSyncConfig, StrategyConfig
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

pytestmark = pytest.mark.looptime

SIZE = 24
GRADIENTS = 16
PERIOD_S, COLLECT_S = 0.01, 0.4
APART_S = 0.73
FIRST_LEFTS = (3, 7, 12, 5)
"""Gradients that each learner makes before its first whole update."""
STRATEGIES = {
    "grad_average": GradAverageConfig(compression="none"),
    "server_sync": ServerSyncConfig(compression="none", optimizer="sgd", learning_rate=0.1),
    "server_sync with 2 servers": ServerSyncConfig(
        compression="none", optimizer="sgd", learning_rate=0.1, servers=2
    ),
}
named = pytest.mark.parametrize(
    "config",
    [
        pytest.param(config, id=name, marks=[] if name == "grad_average" else [pytest.mark.slow])
        for name, config in STRATEGIES.items()
    ],
)


class Crowd:
    """Nodes that can be started one by one.

    Attributes:
        lefts: by round, how many gradients of its update each node had left after it.
        vectors: by round, what each had then.
    """

    def __init__(self, config: StrategyConfig, nodes: int = 4, *, heeding: bool = True) -> None:
        rng = np.random.default_rng(0)
        self.network = MemoryNetwork(random.Random(0), delay_s=(0.001, 0.002))
        self.swarm = SimSwarm(self.network)
        self.lefts: list[dict[int, int]] = [{} for _ in range(nodes)]
        self.vectors: list[dict[int, bytes]] = [{} for _ in range(nodes)]
        self.started: list[SimNode] = []
        for _ in range(nodes):
            target = rng.standard_normal(SIZE).astype(np.float32)
            node = self.swarm.add(
                config,
                rng.standard_normal(SIZE).astype(np.float32),
                gradient=lambda x, target=target: x - target,
                period_s=PERIOD_S,
                gradients=GRADIENTS,
                collect_s=COLLECT_S,
            )
            if not heeding:
                answer = node.learner.answer
                node.learner.answer = lambda post, kind, rate=None, *, end_update=False, answer=answer: (
                    answer(post, kind, rate)
                )

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.swarm.close()

    async def start(self, number: int) -> SimNode:
        """Let one more node begin, and all that began know each other."""
        node = self.swarm.nodes[number]
        self.started.append(node)
        for one in self.started:
            one.swarm.peers = {other.id: other.address for other in self.started if other is not one}
        learner = node.learner
        learner.left = FIRST_LEFTS[number]
        await node.start()
        told = learner.on_update

        def updated(updates: int) -> None:
            facts = node.strategy.facts
            place = int(facts.get("round", facts.get("version", -1)))
            self.lefts[number][place] = learner.left
            self.vectors[number][place] = learner.x.tobytes()
            told(updates)

        learner.on_update = updated
        return node

    async def start_apart(self, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
        for number in order:
            await self.start(number)
            await asyncio.sleep(APART_S)

    async def waiting(self, seconds: float) -> float:
        """Share of the time that learners wait, over so many seconds."""
        before = [node.learner.waited_s for node in self.started]
        await asyncio.sleep(seconds)
        waited = [node.learner.waited_s - then for node, then in zip(self.started, before, strict=True)]
        return float(np.mean(waited)) / seconds

    def common(self, since: int = 0) -> list[int]:
        """Rounds that all have been through."""
        places = set.intersection(*(set(self.lefts[int(node.id, 16)]) for node in self.started))
        return sorted(place for place in places if place > since)

    def aligned(self, place: int) -> bool:
        """Whether all were at the same place of their updates after that round."""
        return len({self.lefts[int(node.id, 16)][place] for node in self.started}) == 1

    def equal(self, place: int) -> bool:
        """Whether all had the same vector, bit for bit."""
        return len({self.vectors[int(node.id, 16)][place] for node in self.started}) == 1


@named
async def test_learners_that_begin_at_different_times_wait_little(config):
    shares = {}
    for heeding in (False, True):
        async with Crowd(config, heeding=heeding) as crowd:
            await crowd.start_apart()
            await asyncio.sleep(2.0)
            shares[heeding] = await crowd.waiting(4.0)
            assert all(crowd.equal(place) for place in crowd.common()[-4 * GRADIENTS :])
            if heeding:
                assert all(crowd.aligned(place) for place in crowd.common()[-4 * GRADIENTS :])
    assert shares[False] > 0.6
    assert shares[True] < 0.12


@named
@pytest.mark.parametrize(
    "order",
    [
        pytest.param((0, 1, 2, 3), id="leader first", marks=pytest.mark.slow),
        pytest.param((2, 3, 1, 0), id="leader last"),
    ],
)
async def test_one_that_joins_is_at_the_same_place_within_two_cycles(config, order):
    async with Crowd(config) as crowd:
        await crowd.start_apart(order[:3])
        await asyncio.sleep(3.0)
        assert all(crowd.aligned(place) for place in crowd.common()[-3 * GRADIENTS :])
        await crowd.start(order[3])
        before = max(crowd.common(), default=0)
        await asyncio.sleep(6.0)
        places = crowd.common(before)
        assert len(places) > 6 * GRADIENTS
        later = places[2 * GRADIENTS :]
        assert all(crowd.aligned(place) for place in later)
        assert all(crowd.equal(place) for place in later)
        assert sum(node.learner.shortened for node in crowd.started) > 0


async def test_rounds_that_do_without_the_leader_are_led_by_another():
    """The first node collects for so long that rounds go on without it; the others still collect together."""
    config = ServerSyncConfig(
        compression="none", optimizer="sgd", learning_rate=0.1, backups=1, deadline_s=2.0
    )
    async with Crowd(config) as crowd:
        crowd.swarm.nodes[0].learner.collect_s = 5 * COLLECT_S
        await crowd.start_apart()
        await asyncio.sleep(2.0)
        before = [node.learner.updates for node in crowd.started]
        share = await crowd.waiting(10.0)
        made = [node.learner.updates - then for node, then in zip(crowd.started, before, strict=True)]
        crowd.started.pop(0)
        places = crowd.common()[-4 * GRADIENTS :]
        assert all(crowd.equal(place) for place in places)
        assert sum(crowd.aligned(place) for place in places) > 0.9 * len(places)
        assert min(made[1:]) > 10 * GRADIENTS
        assert made[0] > GRADIENTS
        assert share < 0.3


async def pace(threshold: float, *, slow: bool) -> tuple[int, list[float]]:
    """Rounds of three nodes in 20 s, and how long each collected in the end; the last one may be slow."""
    network = MemoryNetwork(random.Random(0), delay_s=(0.001, 0.002))
    swarm = SimSwarm(network)
    config = GradAverageConfig(compression="none", preemption_threshold=threshold, deadline_s=30)
    start = np.zeros(SIZE, np.float32)
    nodes = [
        swarm.add(
            config,
            start,
            period_s=PERIOD_S,
            gradients=GRADIENTS,
            collect_s=COLLECT_S * (10 if slow and number == 2 else 1),
        )
        for number in range(3)
    ]
    swarm.introduce()
    for node in nodes:
        await node.start()
    try:
        await asyncio.sleep(20.0)
        before = nodes[0].strategy.facts["round"]
        await asyncio.sleep(20.0)
        rounds = int(nodes[0].strategy.facts["round"]) - int(before)
        return rounds, [node.learner.collected_s for node in nodes]
    finally:
        await swarm.close()


@pytest.mark.slow
async def test_a_node_that_is_ten_times_slower_costs_the_others_a_tenth_at_most_where_it_is_preempted():
    """DD-PPO (Wijmans 2020, arXiv 1911.00357): its unrolls end once 60 % of the nodes are done."""
    alike, _ = await pace(0.6, slow=False)
    preempted, collected_s = await pace(0.6, slow=True)
    waited_for, _ = await pace(1.0, slow=True)
    assert preempted >= 0.9 * alike
    assert waited_for < 0.25 * alike
    assert collected_s[2] < 1.1 * COLLECT_S
