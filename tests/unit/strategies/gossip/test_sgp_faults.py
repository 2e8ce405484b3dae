"""Stochastic gradient push when nodes freeze, die and join, and when messages are lost."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.errors import WireError
from p2pdrl.strategies.gossip.push import PushHead
from p2pdrl.strategies.gossip.sgp import ABSENT_S
from p2pdrl.transport.protocol import Incoming, Refusal

from .pushers import D, Pushers, settle, sgp, spread, start, totals, vectors

pytestmark = pytest.mark.looptime


@pytest.fixture
def make(make_swarm):
    return lambda count, options=None, **network: make_swarm(
        count, options or sgp(), {"learning_rate": 0.0}, **network
    )


@pytest.mark.slow
async def test_a_frozen_node_blocks_nobody_and_comes_back(make):
    swarm = make(8, sgp(partners="random"))
    mean, first = vectors(swarm.nodes).mean(axis=0), spread(swarm.nodes)
    await start(swarm, train=False)
    pushers = Pushers(swarm.nodes)
    swarm.network.freeze(swarm.nodes[3].id)
    await asyncio.sleep(30)
    others = [node for node in swarm.nodes if node is not swarm.nodes[3]]
    assert spread(others) < 0.05 * first
    swarm.network.thaw(swarm.nodes[3].id)
    await asyncio.sleep(30)
    await settle(swarm, pushers)
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(8.0, rel=1e-12)
    assert np.allclose(stands, 8 * mean, rtol=1e-5, atol=2e-5)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-3)


async def test_a_killed_node_takes_its_part_along_and_a_joiner_brings_its_own(make):
    swarm = make(8, sgp(partners="random"))
    await start(swarm, train=False)
    pushers = Pushers(swarm.nodes)
    await asyncio.sleep(1)
    await swarm.kill(swarm.nodes[5])
    await asyncio.sleep(ABSENT_S + 10)
    await settle(swarm, pushers)
    assert spread(swarm.living) < 1e-3
    assert all(node.strategy.under_way == 0 for node in swarm.living)
    joiner = swarm.add(sgp(partners="random"), np.full(D, 5.0, np.float32), learning_rate=0.0)
    swarm.introduce()
    weight, stands = totals(swarm.living)
    await joiner.start(train=False)
    pushers = Pushers(swarm.living)
    await asyncio.sleep(20)
    await settle(swarm, pushers)
    assert np.allclose(vectors(swarm.living), stands / weight, atol=1e-3)
    assert totals(swarm.living)[0] == pytest.approx(weight, rel=1e-12)


def lose_answers(node, losses: int) -> list[bytes]:
    """Lose the first answers to a node after they were written; the list holds what it sends."""
    call, metas = node.transport.call, []

    async def losing(to, peer, route, meta, **options):
        metas.append(meta)
        answer = await call(to, peer, route, meta, **options)
        if len(metas) <= losses:
            raise WireError("cut off")
        return answer

    node.transport.call = losing
    return metas


async def test_a_push_whose_answer_was_lost_is_sent_again_and_taken_once(make):
    swarm = make(2)
    a, b = swarm.nodes
    weight, stands = totals(swarm.nodes)
    await start(swarm, train=False)
    metas = lose_answers(a, 3)
    a.strategy.updated(1)
    await asyncio.sleep(0.05)
    assert (a.strategy.weight, b.strategy.weight) == (0.5, 1.5)
    assert a.strategy.under_way == 0.5
    await asyncio.sleep(5)
    heads = [msgspec.msgpack.decode(meta, type=PushHead) for meta in metas]
    assert len(heads) == 4
    assert len({(head.boot, head.number, head.mass) for head in heads}) == 1
    assert (a.strategy.outcomes, b.strategy.outcomes) == ({"unsure": 3, "pushed": 1}, {"ok": 1})
    assert totals(swarm.nodes)[0] == pytest.approx(weight, rel=1e-12)
    assert np.allclose(totals(swarm.nodes)[1], stands, atol=1e-5)


@pytest.mark.parametrize("why", ["nobody listens", "refused"])
async def test_a_push_that_never_arrived_is_taken_back(make, why):
    swarm = make(2)
    a, b = swarm.nodes
    before = a.learner.now()
    if why == "refused":

        async def refuse(_incoming: Incoming):
            raise Refusal(503, "not now")

        b.strategy.answer = refuse
        await b.start(train=False)
    await a.start(train=False)
    a.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert a.strategy.weight == pytest.approx(1.0, rel=1e-12)
    assert a.strategy.under_way == 0
    assert np.allclose(a.learner.now(), before, atol=1e-6)
    assert set(a.strategy.outcomes) == {"failed" if why == "nobody listens" else why}


async def test_what_is_under_way_to_the_dead_is_lost(make):
    swarm = make(2)
    a, b = swarm.nodes
    await start(swarm, train=False)
    swarm.network.freeze(b.id)
    a.strategy.updated(1)
    await asyncio.sleep(3)
    assert a.strategy.under_way > 0
    await swarm.kill(b)
    await asyncio.sleep(ABSENT_S + 2)
    assert a.strategy.under_way == 0
    assert a.strategy.outcomes["lost"] == 1
    swarm.network.thaw(b.id)
