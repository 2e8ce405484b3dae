"""GALA on a ring: whoever has a useless neighbour is passed by it, and goes on learning from the others."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.config.strategy import GalaConfig
from p2pdrl.strategies.gossip.push import PushHead
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm
from p2pdrl.transport import codec

from .pushers import start

pytestmark = pytest.mark.looptime

CONFIG = GalaConfig(compression="none", partners="ring", min_interval_s=0.05)
GRADIENTS = GalaConfig(compression="none", partners="ring", min_interval_s=0.05, exchanges="gradients")


class Ring:
    """Five nodes, each of which pushes to the next; what each takes is written down."""

    def __init__(self, swarm: SimSwarm) -> None:
        self.swarm, self.nodes = swarm, swarm.nodes
        self.taken: list[tuple[SimNode, str]] = []
        for node in self.nodes:
            self._watch(node)

    def _watch(self, node: SimNode) -> None:
        answer = node.strategy.answer

        async def watched(incoming):
            reply = await answer(incoming)
            head = codec.decode(incoming.meta, PushHead)
            if head is not None and not head.asks:
                self.taken.append((node, incoming.sender))
            return reply

        node.strategy.answer = watched

    async def begin(self) -> None:
        await start(self.swarm)
        await asyncio.sleep(1)

    async def sources(self, node: SimNode, seconds: float = 3.0) -> dict[int, int]:
        """Whose pushes ``node`` takes within the next seconds, and how many."""
        self.taken.clear()
        await asyncio.sleep(seconds)
        senders = [int(sender, 16) for taker, sender in self.taken if taker is node]
        return {sender: senders.count(sender) for sender in sorted(set(senders))}


@pytest.fixture(
    params=[CONFIG, pytest.param(GRADIENTS, marks=pytest.mark.slow)], ids=["parameters", "gradients"]
)
def ring(request, make_swarm):
    swarm = make_swarm(5, request.param, {"learning_rate": 0.05})
    for number, node in enumerate(swarm.nodes):
        target = np.random.default_rng(number).standard_normal(node.learner.x.size).astype(np.float32)
        node.learner.gradient = lambda x, target=target: x - target
    return Ring(swarm)


async def test_all_well_each_takes_from_the_one_before(ring):
    await ring.begin()
    assert set(await ring.sources(ring.nodes[2])) == {1}
    assert set(await ring.sources(ring.nodes[0])) == {4}


@pytest.mark.slow
async def test_one_that_is_frozen_is_passed_over(ring):
    """Nobody's membership notices."""
    await ring.begin()
    ring.swarm.network.freeze(ring.nodes[1].id)
    await asyncio.sleep(2)
    sources = await ring.sources(ring.nodes[2])
    assert sources.get(0, 0) >= 20
    ring.swarm.network.thaw(ring.nodes[1].id)
    await asyncio.sleep(20)  # it rests up to 15 s
    assert set(await ring.sources(ring.nodes[2])) == {1}
    assert set(await ring.sources(ring.nodes[1])) == {0}


@pytest.mark.slow
async def test_one_that_refuses_is_passed_over(ring):
    """It has no state to mix: it takes nothing, and pushes nothing."""
    await ring.begin()
    says, ring.nodes[1].swarm.says = ring.nodes[1].swarm.says, None
    await asyncio.sleep(1)
    assert (await ring.sources(ring.nodes[2])).get(0, 0) >= 30
    ring.nodes[1].swarm.says = says
    await asyncio.sleep(20)
    assert set(await ring.sources(ring.nodes[2])) == {1}


@pytest.mark.slow
async def test_behind_one_whose_pushes_are_refused_the_one_before_pushes(ring):
    """Its pushes are poisoned, say: the node behind holds it in quarantine, and nobody else knows."""
    await ring.begin()
    poisoned, starved = ring.nodes[1], ring.nodes[2]
    starved.swarm.held.add(poisoned.id)
    await asyncio.sleep(2)
    for _ in range(3):  # it goes on for as long as it is needed
        sources = await ring.sources(starved)
        assert set(sources) == {0}
        assert sources[0] >= 30
    starved.swarm.held.clear()
    await asyncio.sleep(20)
    assert set(await ring.sources(starved)) == {1}


async def test_two_in_a_row_that_are_useless_are_passed_over(ring):
    await ring.begin()
    for bad in ring.nodes[1:3]:
        ring.nodes[3].swarm.held.add(bad.id)
        ring.swarm.network.freeze(bad.id)
    await asyncio.sleep(3)
    assert (await ring.sources(ring.nodes[3])).get(0, 0) >= 20
    for bad in ring.nodes[1:3]:
        ring.swarm.network.thaw(bad.id)


async def test_a_learner_that_pauses_pushes_nothing_and_starves_nobody(ring):
    await ring.begin()
    paused = ring.nodes[1].learner
    period_s, paused.period_s = paused.period_s, 30.0
    await asyncio.sleep(3)
    assert sum((await ring.sources(ring.nodes[2])).values()) >= 20
    paused.period_s = period_s
