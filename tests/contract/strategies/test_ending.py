"""What every strategy leaves behind when it is stopped in the middle of a round: nothing."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from .crowd import Crowd, now
from .promises import Case, every_and_staged, every_tried
from .test_faults import in_a_round

pytestmark = pytest.mark.looptime

TIMEOUT_S = 1.0
GOODBYE_S = 1.0
"""What a group's farewell may cost beyond the timeout."""


@pytest.mark.parametrize("delay_s", [0.002, 0.3])
@every_tried
async def test_a_round_under_way_ends_in_time_and_nothing_follows(case: Case, delay_s: float):
    async with Crowd(case, seed=6) as crowd:
        await crowd.start()
        await crowd.rounds(2)
        crowd.network.delay_s = (delay_s, delay_s)
        await in_a_round(crowd, crowd.nodes[0])
        began_s = now()
        answered: list[int] = []
        for node in crowd.nodes:
            await asyncio.wait_for(node.strategy.stop(TIMEOUT_S), TIMEOUT_S + GOODBYE_S)
            assert now() - began_s <= TIMEOUT_S + GOODBYE_S
            began_s = now()
            watch = node.strategy.watch()
            await asyncio.wait_for(watch, 1.0)
            await node.pause()
            tell = node.learner.answer
            node.learner.answer = lambda post, kind, tell=tell: (
                answered.append(post.number),
                tell(post, kind),
            )
        await asyncio.sleep(2 * delay_s + 0.1)  # what was answered before the stop is written by now
        for node in crowd.nodes:
            node.learner.absorb()
        left = crowd.xs()
        rounds = [len(node.swarm.rounds) for node in crowd.nodes]
        answered.clear()
        await asyncio.sleep(3)
        assert np.array_equal(crowd.xs(), left)
        assert [len(node.swarm.rounds) for node in crowd.nodes] == rounds
        assert not answered
        ours = asyncio.current_task()
        assert {task.get_name() for task in asyncio.all_tasks() if task is not ours} == set()


@every_and_staged
async def test_it_is_stopped_at_once_and_twice(case: Case):
    async with Crowd(case, nodes=3) as crowd:
        await crowd.start(train=False)
        for node in crowd.nodes:
            began_s = now()
            await node.strategy.stop(0.0)
            await node.strategy.stop(0.0)
            assert now() - began_s <= GOODBYE_S
            await asyncio.wait_for(node.strategy.watch(), 1.0)
        ours = asyncio.current_task()
        await asyncio.sleep(1)
        assert {task.get_name() for task in asyncio.all_tasks() if task is not ours} == set()


@every_tried
async def test_one_that_leaves_is_not_missed(case: Case):
    async with Crowd(case, seed=7) as crowd:
        await crowd.start()
        await crowd.rounds(3)
        leaving = crowd.nodes[0]
        await leaving.strategy.stop(TIMEOUT_S)
        left_s = now()
        for node in crowd.nodes[1:]:
            node.swarm.peers.pop(leaving.id)
        await crowd.rounds(4, crowd.nodes[1:], within_s=6)
        for node in crowd.nodes[1:]:
            assert max((t for t in node.times), default=0) >= left_s
            assert node.swarm.strikes == node.swarm.heals == []
