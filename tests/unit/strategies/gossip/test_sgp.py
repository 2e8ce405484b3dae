"""Stochastic gradient push over the in-memory network: weights are kept, nodes come to the mean."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from p2pdrl.errors import PeerRefusedError
from p2pdrl.strategies.gossip.sgp import ROUTE
from p2pdrl.strategies.registry import build

from .pushers import LONG, D, Pushers, push, quiet, settle, sgp, spread, start, totals, vectors

pytestmark = pytest.mark.looptime


@pytest.fixture
def make(make_swarm):
    return lambda count, options=None, **network: make_swarm(
        count, options or sgp(), {"learning_rate": 0.0}, **network
    )


@pytest.mark.parametrize(
    "partners", ["exponential", *(pytest.param(slow, marks=pytest.mark.slow) for slow in ("ring", "random"))]
)
async def test_eight_nodes_come_to_their_mean(make, partners):
    swarm = make(8, sgp(partners=partners))
    mean, first = vectors(swarm.nodes).mean(axis=0), spread(swarm.nodes)
    await start(swarm, train=False)
    pushers = Pushers(swarm.nodes)
    await asyncio.sleep(40 if partners == "ring" else 15)
    await settle(swarm, pushers)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-4)
    assert spread(swarm.nodes) < 1e-4 * first
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(8.0, rel=1e-12)
    assert np.allclose(stands, 8 * mean, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
async def test_learners_that_publish_in_between_disturb_nothing(make):
    """Learners of rate 0 absorb and publish at their own pace: the mean stays, deltas count once."""
    swarm = make(8, sgp(partners="exponential"))
    mean = vectors(swarm.nodes).mean(axis=0)
    for number, node in enumerate(swarm.nodes):
        node.learner.period_s = 0.03 * (1 + 4 * number)
    await start(swarm)
    pushers = Pushers(swarm.nodes)
    await asyncio.sleep(25)
    await settle(swarm, pushers)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-4)


async def test_loss_and_doubled_messages_lose_no_weight(make):
    swarm = make(8, sgp(partners="random"), loss=0.2, duplicate=0.2)
    mean = vectors(swarm.nodes).mean(axis=0)
    await start(swarm, train=False)
    pushers = Pushers(swarm.nodes)
    await asyncio.sleep(40)
    swarm.network.loss = 0.0
    await asyncio.sleep(10)
    await settle(swarm, pushers)
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(8.0, rel=1e-12)
    assert np.allclose(stands, 8 * mean, rtol=1e-5, atol=2e-5)
    assert np.allclose(vectors(swarm.nodes), mean, atol=1e-3)
    assert sum(node.strategy.outcomes.get("timeout", 0) for node in swarm.nodes) > 10


async def test_bf16_keeps_the_sum(make):
    swarm = make(4, sgp(compression="bf16", partners="ring"))
    mean, first = vectors(swarm.nodes).mean(axis=0), spread(swarm.nodes)
    await start(swarm, train=False)
    pushers = Pushers(swarm.nodes)
    await asyncio.sleep(30)
    await settle(swarm, pushers)
    weight, stands = totals(swarm.nodes)
    assert weight == pytest.approx(4.0, rel=1e-12)
    assert np.allclose(stands, 4 * mean, rtol=1e-4, atol=1e-4)
    assert spread(swarm.nodes) < 0.02 * first


async def test_an_adopted_state_begins_anew(make):
    swarm = make(2)
    a, b = swarm.nodes
    swarm.network.freeze(b.id)
    await start(swarm, train=False)
    a.strategy.updated(1)
    await asyncio.sleep(1)
    assert a.strategy.weight < 1
    new = np.full(D, 7.0, np.float32)
    a.learner.board.post_set(new, None, 3)
    await asyncio.sleep(2.5)
    assert a.strategy.weight + a.strategy.under_way == pytest.approx(1.0)
    assert np.array_equal(a.learner.now(), new)
    swarm.network.thaw(b.id)


async def test_a_push_is_taken_once_by_number(make):
    a, b = await quiet(make(2))
    expected = b.learner.now() + (a.learner.now() - b.learner.now()) / 3
    for _ in range(3):
        assert (await push(a, b)).result == "taken"
    assert b.strategy.weight == 1.5
    assert np.allclose(b.learner.now(), expected, atol=1e-6)
    (report,) = b.swarm.rounds
    assert report.outcome == "ok"
    assert [one.weight for one in report.merged] == pytest.approx([2 / 3, 1 / 3])
    assert report.changed == pytest.approx(report.distance / 3)


@pytest.mark.parametrize(
    ("bad", "status"),
    [
        ({"mode_epoch": 2}, 409),
        ({"task_hash": "x"}, 409),
        ({"mass": 0.0}, 422),
        ({"mass": 1e30}, 422),
        ({"wire": "bf16"}, 422),
        ({"content": "gradients"}, 422),
        ({"vector": np.full(D, np.nan, np.float32)}, 422),
        ({"vector": np.zeros(3, np.float32)}, 422),
    ],
)
async def test_what_was_refused_is_void_for_ever(make, bad, status):
    a, b = await quiet(make(2))
    with pytest.raises(PeerRefusedError) as caught:
        await push(a, b, **bad)
    assert caught.value.status == status
    assert (await push(a, b)).result == "void"
    assert (await push(a, b, 2)).result == "taken"
    assert b.swarm.strikes == ([a.id] if "vector" in bad and bad["vector"].size == D else [])
    assert b.strategy.weight == 1.5


async def test_other_routes_and_nonsense_are_refused(make):
    a, b = await quiet(make(2))
    for route, status in (("exchange", 409), (ROUTE, 400)):
        with pytest.raises(PeerRefusedError) as caught:
            await a.transport.call(b.address, b.id, route, b"\xc1", deadline_s=1.0)
        assert caught.value.status == status
    b.swarm.held.add(a.id)
    with pytest.raises(PeerRefusedError, match="403"):
        await push(a, b)


@pytest.mark.parametrize("older", ["sender", "receiver"])
async def test_one_of_two_lineages_is_adopted(make, older):
    swarm = make(2)
    a, b = swarm.nodes
    steps = 500 if older == "sender" else 5
    a.swarm.says = msgspec.structs.replace(a.swarm.says, lineage="bb", lineage_steps=steps)
    await start(swarm, train=False)
    a.strategy.updated(1)
    await asyncio.sleep(0.08)
    assert a.strategy.outcomes == {"ahead" if older == "sender" else "behind": 1}
    adopter, donor = (b, a) if older == "sender" else (a, b)
    assert adopter.swarm.adoptions[0][0] == donor.id
    assert (a.strategy.weight, b.strategy.weight) == (1.0, 1.0)


async def test_our_own_poison_is_kept_to_ourselves_and_healed(make):
    swarm = make(2)
    a, b = swarm.nodes
    a.learner.x = np.full(D, np.nan, np.float32)
    a.learner.publish()
    await start(swarm, train=False)
    a.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert a.swarm.heals
    assert (b.swarm.strikes, b.strategy.outcomes, a.strategy.weight) == ([], {}, 1.0)
    with pytest.raises(PeerRefusedError, match="503"):
        await push(b, a)


async def test_what_is_beyond_the_bound_once_it_is_rounded_is_kept_to_ourselves(make):
    swarm = make(2, sgp(compression="bf16"))
    a, b = swarm.nodes
    for node in swarm.nodes:
        node.strategy = build(node.config, replace(node.context(), max_abs=1_002_500))
    a.learner.x = np.full(D, 1_002_000, np.float32)  # 1_003_520 as bf16
    a.learner.publish()
    await start(swarm, train=False)
    a.strategy.updated(1)
    await asyncio.sleep(0.3)
    assert (b.swarm.strikes, b.strategy.outcomes) == ([], {})
    assert a.swarm.heals
    assert set(a.strategy.outcomes) == {"failed"}
    assert (a.strategy.weight, a.strategy.under_way) == (pytest.approx(1.0, rel=1e-12), 0)
    assert np.array_equal(a.learner.now(), a.learner.x)


async def test_clipping_bounds_what_one_push_does(make):
    a, b = await quiet(make(2, sgp(mixing="clipped", clip_distance=0.1)))
    await push(a, b, vector=a.learner.now() * 100)
    report = b.swarm.rounds[0]
    before = vectors([b])[0]
    assert report.changed <= 0.1 * 0.1 * np.linalg.norm(before) / 3 * 1.1
    assert b.strategy.weight == 1.5


async def test_training_nodes_stay_near_the_common_minimum(make):
    swarm = make(8, sgp(partners="exponential", min_interval_s=0.1))
    rng = np.random.default_rng(5)
    targets = rng.standard_normal((8, D)).astype(np.float32)
    for node, target in zip(swarm.nodes, targets, strict=True):
        node.learner.gradient = lambda x, target=target: x - target
        node.learner.learning_rate = 0.03
    await start(swarm)
    await asyncio.sleep(15)
    xs, alone = vectors(swarm.nodes), np.linalg.norm(targets - targets.mean(axis=0), axis=1).mean()
    assert np.linalg.norm(xs - targets.mean(axis=0), axis=1).max() < 0.35 * alone


async def test_stop_leaves_nothing(make):
    swarm = make(3)
    await start(swarm)
    await asyncio.sleep(1.015)
    for node in swarm.nodes:
        await node.strategy.stop(1.0)
    assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("strategy")]
    before = vectors(swarm.nodes)
    with pytest.raises(PeerRefusedError, match="503"):
        await push(swarm.nodes[0], swarm.nodes[1], 77)
    await asyncio.sleep(1)
    assert np.allclose(vectors(swarm.nodes), before, atol=1e-6)


@pytest.mark.looptime(False)
async def test_pushes_in_threads(make):
    swarm = make(3, sgp(min_interval_s=0.01, compression="bf16"), delay_s=(0.0, 0.001), size=LONG)
    first = spread(swarm.nodes)
    await start(swarm, train=False)
    pushers = Pushers(swarm.nodes, 0.02)
    async with asyncio.timeout(60):
        while spread(swarm.nodes) > 0.1 * first:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.01)
    await pushers.stop()
