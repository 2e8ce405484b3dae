"""Who dies, freezes, comes, goes, or is cut off: the others go on within seconds, with the newest state."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from .swarms import CONFIG, now, strategy, swarm_of

pytestmark = pytest.mark.looptime

DETECT_S = 1.0
"""A death is known to membership after this; a pipeline that works finds it out by itself."""


def config(stages: int):
    return msgspec.structs.replace(CONFIG, stages=stages)


def names(nodes) -> str:
    return "".join(node.id[-1] for node in nodes)


@pytest.mark.parametrize(("stages", "victim"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
async def test_a_rank_dies_at_work(stages: int, victim: int):
    async with swarm_of(stages, config(stages)) as swarm:
        await swarm.working(names(swarm.nodes))
        await asyncio.sleep(0.6)
        head_version = swarm.nodes[0].learner.version
        await swarm.sim.kill(swarm.nodes[victim])
        survivors = names(swarm.living)
        assert await swarm.working(survivors) < 5.0
        lost = head_version - min(began.policy_version for began in [swarm.living[0].stages.began[-1]])
        assert lost <= CONFIG.state_every
        swarm.begun_alike()
        swarm.generations_grow()


@pytest.mark.parametrize(("stages", "victim"), [(2, 0), (2, 1), (3, 0), (3, 1), (3, 2)])
async def test_a_rank_freezes_at_work_and_comes_back(stages: int, victim: int):
    async with swarm_of(stages, config(stages)) as swarm:
        everybody = names(swarm.nodes)
        await swarm.working(everybody)
        frozen = swarm.nodes[victim]
        swarm.network.freeze(frozen.id)
        others = [node for node in swarm.nodes if node is not frozen]
        want = [tuple(names(others))]
        took_s = await swarm.until(lambda: swarm.pipelines(others) == want, what="no pipeline without it")
        assert took_s < CONFIG.deadline_s + 5.0
        await asyncio.sleep(1.0)
        swarm.network.thaw(frozen.id)
        await swarm.working(everybody, within_s=40.0)
        swarm.begun_alike()
        swarm.generations_grow()


@pytest.mark.parametrize("fault", ["kill", "freeze"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("after_s", [0.05, 0.3, 0.36, 0.42])
async def test_a_rank_is_lost_while_the_pipeline_is_formed(fault: str, victim: int, after_s: float):
    async with swarm_of(3, config(3)) as swarm:
        await asyncio.sleep(after_s)
        lost = swarm.nodes[victim]
        others = [node for node in swarm.nodes if node is not lost]
        if fault == "kill":
            await swarm.sim.kill(lost)
        else:
            swarm.network.freeze(lost.id)
        want = [tuple(names(others))]
        took_s = await swarm.until(lambda: swarm.pipelines(others) == want, what="no pipeline without it")
        assert took_s < CONFIG.deadline_s + 5.0
        if fault == "freeze":
            swarm.network.thaw(lost.id)


async def test_a_node_that_joins_lets_the_update_be_finished_first():
    async with swarm_of(1, config(2)) as swarm:
        await swarm.working("0")
        (new,) = swarm.add(1, config(2))
        await swarm.start([new])
        await swarm.working("01")
        first = swarm.nodes[0]
        assert first.strategy.outcomes.get("broken", 0) == 0
        assert [r.outcome for r in first.swarm.rounds if r.outcome != "ok"] == []
        before, after = first.stages.began[-2:]
        assert after.policy_version > before.policy_version
        swarm.begun_alike()


async def test_a_pipeline_goes_on_when_others_come_and_go():
    async with swarm_of(2) as swarm:
        await swarm.working("01")
        generation = swarm.nodes[0].stages.order.generation
        two = swarm.add(2)
        await swarm.start(two)
        await swarm.working("01", "23")
        await swarm.sim.kill(two[0])
        await swarm.until(lambda: strategy(two[1]).figures.standby)
        await swarm.working("01")
        assert swarm.nodes[0].stages.order.generation == generation
        assert len(swarm.nodes[0].stages.began) == len(swarm.nodes[1].stages.began) == 1


@pytest.mark.parametrize("leaver", [0, 1, 2])
async def test_who_leaves_has_the_update_finished_first(leaver: int):
    async with swarm_of(3, config(3)) as swarm:
        await swarm.working("012")
        gone = swarm.nodes[leaver]
        await gone.strategy.stop(5.0)
        assert gone.swarm.told[-1][0] != "pipeline-broken"
        assert not [r for node in swarm.nodes for r in node.swarm.rounds if r.outcome == "broken"]
        assert len(swarm.versions()) == 1
        gone.vanish()
        others = names(node for node in swarm.nodes if node is not gone)
        assert await swarm.working(others) < 5.0


@pytest.mark.parametrize("together", [True, False])
async def test_all_stop_with_the_same_version(together: bool):
    async with swarm_of(3, config(3)) as swarm:
        await swarm.working("012")
        await asyncio.sleep(0.33)
        began_s = now()
        if together:
            await asyncio.gather(*(node.strategy.stop(5.0) for node in swarm.nodes))
        else:
            for node in reversed(swarm.nodes):
                await node.strategy.stop(5.0)
        assert now() - began_s < 5.0
        assert len(swarm.versions()) == 1
        assert swarm.vectors_agree(swarm.nodes)
        assert all(node.stages.order is None for node in swarm.nodes)
        for node in swarm.nodes:
            await asyncio.wait_for(node.strategy.watch(), 1.0)


@pytest.mark.parametrize("victim", [0, 1])
async def test_a_learner_that_dies_leaves_its_node_out_until_it_is_back(victim: int):
    async with swarm_of(2) as swarm:
        await swarm.working("01")
        node = swarm.nodes[victim]
        node.stages.die()
        assert await swarm.working(names(n for n in swarm.nodes if n is not node)) < 5.0
        await asyncio.sleep(3.0)
        other = swarm.nodes[1 - victim]
        assert len(other.stages.began) == 2, "it isn't disturbed meanwhile"
        node.stages.revive()
        await swarm.working("01")
        swarm.begun_alike()


@pytest.mark.parametrize(("stages", "victim"), [(2, 1), (3, 1), (3, 2)])
async def test_a_learner_that_is_stopped_leaves_its_node_out(stages: int, victim: int):
    async with swarm_of(stages, config(stages)) as swarm:
        everybody = names(swarm.nodes)
        await swarm.working(everybody)
        node = swarm.nodes[victim]
        node.stages.stick()
        others = [other for other in swarm.nodes if other is not node]
        want = [tuple(names(others))]
        took_s = await swarm.until(lambda: swarm.pipelines(others) == want, what="no pipeline without it")
        assert took_s < CONFIG.deadline_s + 5.0
        node.stages.unstick()
        await swarm.working(everybody, within_s=40.0)
        swarm.begun_alike()
        swarm.generations_grow()


@pytest.mark.parametrize("weak", [0, 1])
async def test_two_with_whom_it_always_breaks_are_parted_for_longer_and_longer(weak: int):
    """The learner of one takes its place each time, and fails at the first update."""
    async with swarm_of(2, start=False) as swarm:
        swarm.nodes[weak].stages.fails = True
        await swarm.start()
        await swarm.until(
            lambda: any(
                strategy(node).figures.copies > 30 and len(strategy(node).figures.ranks) == 1
                for node in swarm.nodes
            ),
            60.0,
        )
        swarm.nodes[weak].stages.fails = False
        await swarm.working("01", within_s=60.0)


async def test_a_partition_and_its_end():
    async with swarm_of(4) as swarm:
        await swarm.working("01", "23")
        left, right = (swarm.nodes[0], swarm.nodes[2]), (swarm.nodes[1], swarm.nodes[3])
        for one in left:
            for other in right:
                swarm.network.cut(one.id, other.id)
        await swarm.until(lambda: swarm.pipelines() == [("0", "2"), ("1", "3")], 30.0)
        await swarm.progress()
        swarm.network.heal()
        await swarm.until(lambda: len(swarm.pipelines()) == 2, 60.0)
        await swarm.until(lambda: all(strategy(node).figures.pipelines == 2 for node in swarm.nodes), 60.0)
        await swarm.progress()
        swarm.begun_alike()
        swarm.generations_grow()


@pytest.mark.parametrize("seed", range(3))
async def test_lost_messages_hold_up_and_no_more(seed: int):
    async with swarm_of(3, config(3), seed=seed, start=False) as swarm:
        swarm.network.loss, swarm.network.duplicate = 0.2, 0.1
        await swarm.start()
        await swarm.working("012", within_s=60.0)
        swarm.begun_alike()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
async def test_whatever_happens_it_ends_well(seed: int):
    """Random deaths, freezes, learners' ends, cuts, joins and losses; then all alive are in their places."""
    rng = random.Random(seed)
    stages = rng.choice([2, 3])
    async with swarm_of(rng.randint(2, 6), config(stages), seed=seed) as swarm:
        for _ in range(10):
            await asyncio.sleep(rng.uniform(0.05, 3.0))
            what = rng.choice(["kill", "freeze", "learner", "stick", "cut", "join", "loss"])
            node = rng.choice(swarm.living)
            if what == "kill" and len(swarm.living) > 2:
                await swarm.sim.kill(node)
            elif what == "freeze":
                swarm.network.freeze(node.id)
                await asyncio.sleep(rng.uniform(0.05, 5.0))
                swarm.network.thaw(node.id)
            elif what == "learner":
                node.stages.die()
                await asyncio.sleep(rng.uniform(0.0, 2.0))
                node.stages.revive()
            elif what == "stick":
                node.stages.stick()
                await asyncio.sleep(rng.uniform(0.0, 6.0))
                node.stages.unstick()
            elif what == "cut":
                other = rng.choice(swarm.living)
                swarm.network.cut(node.id, other.id, one_way=rng.random() < 0.5)
                await asyncio.sleep(rng.uniform(0.0, 6.0))
                swarm.network.heal()
                swarm.sim.introduce()
            elif what == "join":
                await swarm.start(swarm.add(1, config(stages)))
            else:
                swarm.network.loss = rng.choice([0.0, 0.05])
        swarm.network.loss = 0.0
        size = min(stages, len(swarm.living))
        want = len(swarm.living) // size
        await swarm.until(
            lambda: len(swarm.pipelines()) == want and all(len(p) == size for p in swarm.pipelines()), 90.0
        )
        await swarm.progress()
        swarm.begun_alike()
        swarm.generations_grow()
