"""What is begun and comes to nothing leaves nothing behind: no pipe, no learner that goes on by itself."""

from __future__ import annotations

import msgspec
import pytest

from .swarms import CONFIG, swarm_of

pytestmark = pytest.mark.looptime


def config(stages: int):
    return msgspec.structs.replace(CONFIG, stages=stages)


@pytest.mark.parametrize("rank", [1, 2])
async def test_pipes_of_a_formation_that_comes_to_nothing_are_closed(rank: int):
    async with swarm_of(3, config(3), start=False) as swarm:
        weak = swarm.nodes[rank]
        weak.stages.ready_s = 11.0  # longer than a learner may take
        await swarm.start()
        await swarm.until(lambda: len(weak.stages.began) + len(weak.swarm.told) > 3, 60.0)
        weak.stages.ready_s = 0.05
        await swarm.working("012", within_s=60.0)
        ends = [pipe for node in swarm.nodes for pipe in node.pipes.ends]
        held = {id(pipe) for node in swarm.nodes for pipe in node.stages.pipes.values()}
        assert [pipe for pipe in ends if not pipe.closed and id(pipe) not in held] == []


@pytest.mark.parametrize("ready_s", [0.3 + 0.05 * step for step in range(12)])
async def test_a_learner_whose_place_was_given_up_before_it_was_ready_ends(ready_s: float):
    """Somebody joins while a lone learner takes its place: it mustn't train on by itself meanwhile."""
    async with swarm_of(1, config(2), start=False) as swarm:
        swarm.network.delay_s = (0.03, 0.03)  # so that the next pipeline's forming takes a while
        first = swarm.nodes[0]
        first.stages.ready_s = ready_s
        await swarm.start()
        await swarm.until(lambda: first.stages.order is not None)
        first.stages.ready_s = 0.05
        await swarm.start(swarm.add(1, config(2)))
        await swarm.working("01")
        assert [r.outcome for r in first.swarm.rounds if r.outcome != "ok"] == []
        swarm.begun_alike()
