"""Who forms a pipeline with whom, and with which state."""

from __future__ import annotations

import msgspec
import pytest

from .swarms import CONFIG, strategy, swarm_of

pytestmark = pytest.mark.looptime


@pytest.mark.parametrize(
    ("nodes", "stages", "pipelines", "standby"),
    [
        (1, 2, ["0"], 0),
        (2, 2, ["01"], 0),
        (3, 2, ["01"], 1),
        (4, 2, ["01", "23"], 0),
        (5, 2, ["01", "23"], 1),
        (2, 3, ["01"], 0),
        (3, 3, ["012"], 0),
        (4, 3, ["012"], 1),
        (5, 3, ["012"], 2),
    ],
)
async def test_so_many_nodes_form_these_pipelines(nodes, stages, pipelines, standby):
    async with swarm_of(nodes, msgspec.structs.replace(CONFIG, stages=stages)) as swarm:
        await swarm.working(*pipelines)
        assert sum(strategy(node).figures.standby for node in swarm.nodes) == standby
        swarm.begun_alike()
        await swarm.until(
            lambda: all(
                node.strategy.outcomes.get("ok") or strategy(node).figures.standby for node in swarm.nodes
            )
        )
        assert not [
            report for node in swarm.nodes for report in node.swarm.rounds if report.outcome == "broken"
        ]
