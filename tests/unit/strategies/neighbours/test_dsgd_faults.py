"""Neighbours that die, freeze, come late or send poison: rounds go on, and whoever is left keeps the mean."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import DsgdConfig
from p2pdrl.errors import PeerRefusedError
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.neighbours.round import NeighbourHead
from p2pdrl.testing.virtual_swarm import SimNode
from p2pdrl.transport.framing import join_views
from p2pdrl.transport.protocol import Reply

from ..graphs import SIZE, Crowd

pytestmark = [pytest.mark.looptime, pytest.mark.slow]

CONFIG = DsgdConfig(compression="none", deadline_s=2.0)


def slow(*arguments: object, **options: object) -> Crowd:
    """Learners that make 20 updates a second: less to simulate."""
    return Crowd(*arguments, period_s=0.05, **options)


async def running(crowd: Crowd, seconds: float = 2.5) -> None:
    await crowd.start()
    await asyncio.sleep(seconds)
    assert crowd.spread() < 1e-6


def moved_apart(crowd: Crowd) -> None:
    """Give each learner another vector, as if it had learned."""
    for node in crowd.swarm.living:
        node.learner.board.post_delta(crowd.rng.standard_normal(SIZE).astype(np.float32), 1)


def updates(crowd: Crowd) -> list[int]:
    return [node.learner.updates for node in crowd.swarm.living]


async def going_on(crowd: Crowd, seconds: float, least: int) -> None:
    before = updates(crowd)
    await asyncio.sleep(seconds)
    assert all(now - then >= least for then, now in zip(before, updates(crowd), strict=True)), (
        before,
        updates(crowd),
        crowd.outcomes(),
    )


async def test_a_death_in_a_round_costs_a_view():
    async with slow(CONFIG, 6, delay_s=(0.01, 0.02)) as crowd:
        await crowd.start()
        await asyncio.sleep(0.5)
        victim = crowd.nodes[3]
        await crowd.swarm.kill(victim)
        await asyncio.sleep(3)
        moved_apart(crowd)
        mean = crowd.mean()
        await going_on(crowd, 6, 70)
        assert crowd.nodes[0].strategy.facts["members"] == 5
        assert np.allclose(crowd.mean(), mean, atol=1e-6)
        assert crowd.spread() < 1e-6


async def test_a_newcomer_is_a_neighbour_soon():
    async with slow(CONFIG, 4) as crowd:
        await running(crowd)
        newcomer = crowd.add(np.full(SIZE, 5.0))
        mean = crowd.mean()
        crowd.swarm.introduce()
        await newcomer.start()
        await going_on(crowd, 4, 50)
        assert crowd.spread() < 1e-6
        assert np.allclose(crowd.mean(), mean, atol=1e-6)


async def test_a_frozen_neighbour_holds_nobody_up_for_long():
    async with slow(CONFIG, 5) as crowd:
        await running(crowd)
        frozen = crowd.nodes[2]
        crowd.network.freeze(frozen.id)
        others = [node for node in crowd.nodes if node is not frozen]
        before = [node.learner.updates for node in others]
        await asyncio.sleep(10)
        assert all(node.learner.updates - then > 120 for node, then in zip(others, before, strict=True))
        crowd.network.thaw(frozen.id)
        await asyncio.sleep(5)
        moved_apart(crowd)
        await going_on(crowd, 5, 60)
        assert crowd.spread() < 1e-6


@pytest.mark.parametrize("who", [0, *(pytest.param(who, marks=pytest.mark.slow) for who in (2, 4))])
async def test_a_learner_that_pauses_is_left_out_and_comes_back(who):
    async with slow(CONFIG, 5) as crowd:
        await running(crowd)
        paused = crowd.nodes[who].learner
        period_s, paused.period_s = paused.period_s, 20.0
        others = [node for node in crowd.nodes if node.learner is not paused]
        await asyncio.sleep(5)
        before = [node.learner.updates for node in others]
        await asyncio.sleep(10)
        assert all(node.learner.updates - then > 120 for node, then in zip(others, before, strict=True))
        paused.period_s = period_s
        await asyncio.sleep(30)
        moved_apart(crowd)
        await going_on(crowd, 5, 60)
        assert crowd.spread() < 1e-6


async def test_two_halves_mix_apart_and_then_together():
    async with slow(CONFIG, 6) as crowd:
        await running(crowd)
        left, right = crowd.nodes[:3], crowd.nodes[3:]
        for a in left:
            for b in right:
                crowd.network.cut(a.id, b.id)
                a.swarm.peers.pop(b.id)
                b.swarm.peers.pop(a.id)
        await asyncio.sleep(8)
        moved_apart(crowd)
        mean = crowd.mean()
        await going_on(crowd, 5, 60)
        assert crowd.spread(left) < 1e-6
        assert crowd.spread(right) < 1e-6
        assert crowd.spread() > 0.1
        crowd.network.heal()
        crowd.swarm.introduce()
        await going_on(crowd, 6, 70)
        assert crowd.spread() < 1e-6
        assert np.allclose(crowd.mean(), mean, atol=1e-5)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
async def test_a_lossy_network_moves_the_mean_by_no_more_than_its_unsure_edges(seed):
    async with slow(CONFIG, 6, seed=seed) as crowd:
        await running(crowd)
        crowd.network.loss = 0.02
        for _ in range(5):
            moved_apart(crowd)
            await asyncio.sleep(5)
        crowd.network.loss = 0.0
        await asyncio.sleep(10)
        moved_apart(crowd)
        mean = crowd.mean()
        await going_on(crowd, 4, 50)
        assert crowd.spread() < 1e-6
        assert np.allclose(crowd.mean(), mean, atol=1e-5)


async def test_who_lags_a_round_catches_up():
    async with slow(CONFIG, 4) as crowd:
        await running(crowd)
        first = max(node.strategy.facts["round"] for node in crowd.nodes)
        await come_early(crowd, crowd.nodes[1], 7)
        await come_early(crowd, crowd.nodes[2], 19)
        await going_on(crowd, 3, 40)
        numbers = {node.strategy.facts["round"] for node in crowd.nodes}
        assert min(numbers) > first + 40 + 19 - 7
        assert max(numbers) - min(numbers) <= 1
        before = crowd.outcomes()["ok"]
        await asyncio.sleep(1)
        assert crowd.outcomes()["ok"] - before > 4 * 15


async def come_early(crowd: Crowd, node: SimNode, by: int) -> None:
    """Let a node hear of a neighbour that it is so many rounds ahead."""
    names = str(node.strategy.facts["neighbours"]).split(", ")
    other = next(one for one in crowd.nodes if one.id in names and one.id < node.id)
    key, number = node.group.view.key, int(node.strategy.facts["round"]) + by
    head = NeighbourHead(key, number, "parameters", "float32", other.swarm.says, 0.1)
    with contextlib.suppress(PeerRefusedError):  # it may come to that round in time
        await other.transport.call(
            node.address,
            node.id,
            "neighbour",
            msgspec.msgpack.encode(head),
            vector=memoryview(bytes(4 * SIZE)),
            into=lambda _, nbytes: memoryview(bytearray(nbytes)),
            deadline_s=1.0,
        )


def poison(node: SimNode, bad: float) -> None:
    """Let all numbers that a node sends be bad."""
    call = node.transport.call

    def spoilt(vector) -> memoryview:
        numbers = np.frombuffer(join_views(vector), np.float32).copy()
        numbers[3] = bad
        return memoryview(numbers).cast("B")

    async def calling(to, peer, route, meta, *, vector=None, **options):
        vector = None if vector is None else spoilt(vector)
        return await call(to, peer, route, meta, vector=vector, **options)

    async def answer(incoming):
        reply = await node.strategy.answer(incoming)
        return Reply(reply.meta, spoilt(reply.vector), on_end=reply.on_end) if reply.vector else reply

    node.transport.call, node.answer = calling, answer


@pytest.mark.parametrize("poisoned", [0, 2])
@pytest.mark.parametrize("bad", [np.nan, 1e30])
async def test_poison_is_a_strike_and_stays_outside(poisoned, bad):
    async with slow(CONFIG, 3) as crowd:
        node = crowd.nodes[poisoned]
        poison(node, bad)
        await crowd.start(5)
        await crowd.trained()
        others = [other for other in crowd.nodes if other is not node]
        assert all(node.id in other.swarm.strikes for other in others)
        assert not node.swarm.strikes
        assert np.isfinite(crowd.xs(others)).all()
        assert crowd.spread(others) < 1e-2


async def test_our_own_poison_is_healed_not_sent():
    async with slow(CONFIG, 3) as crowd:
        await running(crowd)
        bad = crowd.nodes[1]
        bad.learner.x[4] = np.nan
        bad.learner.publish()
        await asyncio.sleep(1)
        assert bad.swarm.heals
        assert not any(node.swarm.strikes for node in crowd.nodes)
        assert np.isfinite(crowd.xs([crowd.nodes[0], crowd.nodes[2]])).all()


async def test_who_is_far_behind_adopts():
    async with slow(CONFIG, 2) as crowd:
        one, two = crowd.nodes
        one.learner.version += 5000
        one.swarm.says = msgspec.structs.replace(one.swarm.says, policy_version=5010)
        await crowd.start(1)
        await crowd.trained()
        assert [donor for donor, _ in two.swarm.adoptions] == [one.id]
        assert one.swarm.adoptions == []
        assert crowd.spread() > 0.1
        assert {report.outcome for report in one.swarm.rounds} == {"ahead"}
        assert {report.outcome for report in two.swarm.rounds} == {"behind"}


async def test_a_call_of_another_view_is_refused():
    async with slow(CONFIG, 3) as crowd:
        await running(crowd)
        one, two, _ = crowd.nodes
        key = two.group.view.key
        for other, within_s in ((ViewKey(1, key.generation - 1, key.proposer), 0.1),):
            head = NeighbourHead(other, 10_000, "parameters", "float32", one.swarm.says, 1.0)
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(PeerRefusedError) as refused:
                await one.transport.call(
                    two.address,
                    two.id,
                    "neighbour",
                    msgspec.msgpack.encode(head),
                    vector=memoryview(bytes(4 * SIZE)),
                    deadline_s=1.0,
                )
            assert refused.value.status == 409
            assert asyncio.get_running_loop().time() - began_s < within_s


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"number": 10**6, "wait_s": 0.05}, 408),
        ({"wire": "bf16"}, 422),
        ({"summary": None}, 400),
    ],
)
async def test_malformed_calls_are_refused(change, status):
    async with slow(CONFIG, 3) as crowd:
        await running(crowd)
        one, two, _ = crowd.nodes
        two.learner.period_s = 0.2
        key, number = two.group.view.key, two.strategy.facts["round"] + 1
        head = msgspec.structs.asdict(
            NeighbourHead(key, number, "parameters", "float32", one.swarm.says, 5.0)
        )
        with pytest.raises(PeerRefusedError) as refused:
            await one.transport.call(
                two.address,
                two.id,
                "neighbour",
                msgspec.msgpack.encode(head | change),
                vector=memoryview(bytes(4 * SIZE)),
                deadline_s=5.0,
            )
        assert refused.value.status == status


async def test_an_answer_that_is_lost_is_counted():
    async with Crowd(CONFIG, 2, delay_s=(0.05, 0.05)) as crowd:
        one, two = crowd.nodes
        await crowd.start()
        await asyncio.sleep(2.0)
        assert set(crowd.outcomes()) == {"ok"}
        crowd.network.cut(two.id, one.id, one_way=True)
        await asyncio.sleep(0.5)
        crowd.network.heal()
        await asyncio.sleep(5)
        assert two.strategy.outcomes["unsure"] >= 1
        before = crowd.outcomes()["ok"]
        await going_on(crowd, 5, 10)
        assert crowd.outcomes()["ok"] > before
