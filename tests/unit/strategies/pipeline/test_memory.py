"""What stages may take: told of hosts only, and respected when a pipeline is formed."""

from __future__ import annotations

import msgspec
import psutil
import pytest

from p2pdrl.strategies.pipeline import recruit
from p2pdrl.strategies.pipeline.memory import usable_bytes

from .swarms import CONFIG, strategy, swarm_of

pytestmark = pytest.mark.looptime


def test_a_part_of_the_hosts_memory_and_nothing_known_of_other_devices(monkeypatch):
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert usable_bytes("cpu") == 800
    assert usable_bytes("cuda:0") == 0


# Blocks as in test_planning: 6 on one peer alone need 30,000 bytes.
async def test_a_pipeline_is_formed_where_one_peer_alone_has_too_little(monkeypatch):
    monkeypatch.setattr(recruit, "usable_bytes", lambda *_: 20_000)
    async with swarm_of(2, msgspec.structs.replace(CONFIG, backend="auto"), start=False) as swarm:
        swarm.network.delay_s = (0.04, 0.04)  # slower than one alone
        await swarm.start()
        await swarm.working("01")
        assert "doesn't fit one peer alone" in strategy(swarm.nodes[0]).figures.why


@pytest.mark.parametrize("nodes", [1, 2])
async def test_where_it_fits_nowhere_people_are_told_and_it_is_tried_again(monkeypatch, nodes: int):
    monkeypatch.setattr(recruit, "usable_bytes", lambda *_: 5_000)
    async with swarm_of(nodes) as swarm:
        head = swarm.nodes[0]
        await swarm.until(lambda: any(kind == "pipeline-failed" for kind, _ in head.swarm.told))
        told = [text for kind, text in head.swarm.told if kind == "pipeline-failed"]
        assert len(told) == 1
        assert "30.0 kB" in told[0]
        assert "5.00 kB" in told[0]
        assert all(node.stages.order is None for node in swarm.nodes)
        monkeypatch.setattr(recruit, "usable_bytes", lambda *_: 0)
        await swarm.working("01" if nodes == 2 else "0", within_s=60.0)
