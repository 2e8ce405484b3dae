"""From one pipeline to another: other options, other numbers of stages, and swarms of one key that meet."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.strategies.registry import build

from .swarms import CONFIG, strategy, swarm_of

pytestmark = pytest.mark.looptime


def config(**changes):
    return msgspec.structs.replace(CONFIG, **changes)


@pytest.mark.parametrize(
    ("changes", "pipelines"),
    [
        ({"stages": 4}, ["0123"]),
        ({"stages": 1}, ["0", "1", "2", "3"]),
        ({"schedule": "gpipe", "microbatches": 8}, ["01", "23"]),
        ({"schedule": "interleaved", "chunks": 2}, ["01", "23"]),
        ({"cuts": (1,)}, ["01", "23"]),
    ],
)
@pytest.mark.parametrize("apart_s", [0.0, 0.4, 3.0])
async def test_other_options_follow_without_a_break(changes, pipelines, apart_s: float):
    async with swarm_of(4) as swarm:
        await swarm.working("01", "23")
        await asyncio.sleep(0.5)
        before = max(swarm.versions())
        for node in swarm.nodes:
            node.stages.began.clear()  # this clock gives the first views of both modes the same number

        async def switch(number: int) -> None:
            await asyncio.sleep(number * apart_s)
            await swarm.nodes[number].switch(config(**changes), 2)

        await asyncio.gather(*map(switch, range(4)))
        await swarm.working(*pipelines)
        outcomes = [report.outcome for node in swarm.nodes for report in node.swarm.rounds]
        assert "broken" not in outcomes
        assert min(swarm.versions()) >= before - CONFIG.state_every
        swarm.begun_alike()


async def test_two_swarms_of_one_key_meet_and_all_follow_the_greater_lineage():
    """Both have been at work; all ranks are of one lineage afterwards, and hold its parameters."""
    async with swarm_of(4, start=False) as swarm:
        left, right = swarm.nodes[:2], swarm.nodes[2:]
        for nodes, lineage, steps in ((left, "aa", 100), (right, "bb", 9000)):
            for node in nodes:
                node.swarm.says = msgspec.structs.replace(
                    node.swarm.says, lineage=lineage, lineage_steps=steps
                )
                take = node.swarm.take

                async def taken(donor: str, node=node, take=take) -> bool:
                    other = next(one for one in swarm.nodes if one.id == donor)
                    node.swarm.says = msgspec.structs.replace(
                        node.swarm.says,
                        lineage=other.swarm.says.lineage,
                        lineage_steps=other.swarm.says.lineage_steps,
                    )
                    return await take(donor)

                node.swarm.take = taken
                node.swarm.adopt = lambda donor, lineage, why, node=node: adoptions.append(
                    asyncio.ensure_future(node.swarm.adopted(donor, lineage, why))
                )
                node.strategy = build(CONFIG, node.context())
        adoptions: list[asyncio.Future[bool]] = []
        for one in left:
            for other in right:
                swarm.network.cut(one.id, other.id)
        for node in left:
            node.swarm.peers = {other.id: other.address for other in left if other is not node}
        for node in right:
            node.swarm.peers = {other.id: other.address for other in right if other is not node}
        for node in swarm.nodes:
            await node.start()
        await swarm.working("01", "23")
        swarm.network.heal()
        swarm.sim.introduce()
        await swarm.until(lambda: all(node.swarm.says.lineage == "bb" for node in swarm.nodes), 40.0)
        await swarm.until(lambda: all(strategy(node).figures.pipelines == 2 for node in swarm.nodes))
        await swarm.working("01", "23")
        await swarm.until(lambda: np.linalg.norm(left[0].learner.now() - right[0].learner.now()) < 1.0, 40.0)
        await asyncio.gather(*adoptions)
        swarm.begun_alike()


@pytest.mark.parametrize("stages", [1, 2, 3])
async def test_it_is_stopped_at_any_moment_of_its_forming(stages: int):
    for moment in range(1, 40):
        async with swarm_of(3, config(stages=stages), seed=moment) as swarm:
            await asyncio.sleep(moment * 0.013)
            await asyncio.wait_for(asyncio.gather(*(node.strategy.stop(5.0) for node in swarm.nodes)), 8.0)
            names = {task.get_name() for task in asyncio.all_tasks()}
            assert not names & {"pipeline", "form", "pipe", "take-place", "heads", "view-ended", "leave"}
