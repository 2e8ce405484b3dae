"""What stages may take: of hosts and of GPUs, looked at anew and respected when a pipeline is formed."""

from __future__ import annotations

import msgspec
import psutil
import pytest

from p2pdrl.strategies.pipeline.forming import usable_bytes

from .swarms import CONFIG, Swarm, strategy, swarm_of

pytestmark = pytest.mark.looptime


def test_a_part_of_the_hosts_memory_or_of_what_a_learner_says_of_its_gpu(monkeypatch):
    class Memory:
        available = 1000

    monkeypatch.setattr(psutil, "virtual_memory", Memory)
    assert usable_bytes("cpu") == 800
    assert usable_bytes("cpu", 5000) == 800
    assert usable_bytes("cuda:0", 5000) == 4000
    assert usable_bytes("cuda:0") == usable_bytes("mps") == 0


def usable(swarm: Swarm, nbytes: int) -> None:
    """What each learner's GPU has free."""
    for node in swarm.nodes:
        node.stages.device, node.stages.usable_bytes = "cuda:0", int(nbytes / 0.8) + 1


# Blocks as in test_planning: 6 on one peer alone need 30,000 bytes.
async def test_a_pipeline_is_formed_where_one_peer_alone_has_too_little():
    async with swarm_of(2, msgspec.structs.replace(CONFIG, backend="auto"), start=False) as swarm:
        swarm.network.delay_s = (0.04, 0.04)  # slower than one alone
        usable(swarm, 20_000)
        await swarm.start()
        await swarm.working("01")
        assert "doesn't fit one peer alone" in strategy(swarm.nodes[0]).figures.why


@pytest.mark.parametrize("nodes", [1, 2])
async def test_where_it_fits_nowhere_people_are_told_and_it_is_tried_again(nodes: int):
    async with swarm_of(nodes, start=False) as swarm:
        usable(swarm, 5_000)
        await swarm.start()
        head = swarm.nodes[0]
        await swarm.until(lambda: any(kind == "pipeline-failed" for kind, _ in head.swarm.told))
        told = [text for kind, text in head.swarm.told if kind == "pipeline-failed"]
        assert len(told) == 1
        assert "30.0 kB" in told[0]
        assert "5.00 kB" in told[0]
        assert all(node.stages.order is None for node in swarm.nodes)
        usable(swarm, 10**9)
        await swarm.working("01" if nodes == 2 else "0", within_s=60.0)


@pytest.mark.parametrize("backend", ["stream", "auto"])
async def test_who_has_less_of_a_gpu_holds_less(backend: str):
    async with swarm_of(2, msgspec.structs.replace(CONFIG, backend=backend), start=False) as swarm:
        for node, free in zip(swarm.nodes, (10**9, 11_000 / 0.8), strict=True):
            node.stages.device, node.stages.usable_bytes = "cuda:0", int(free)
        await swarm.start()
        await swarm.working("01")
        assert swarm.nodes[0].stages.order.cuts == (4,)


async def test_a_gpu_that_becomes_free_is_found_out_when_a_pipeline_is_formed():
    """Of a rank as well, whose learner was asked what its blocks cost long ago."""
    async with swarm_of(2, start=False) as swarm:
        for node, free in zip(swarm.nodes, (15_000, 5_000), strict=True):
            node.stages.device, node.stages.usable_bytes = "cuda:0", free
        head, rank = swarm.nodes
        await swarm.start()
        await swarm.until(lambda: any(kind == "pipeline-failed" for kind, _ in head.swarm.told))
        rank.stages.usable_bytes = 30_000
        await swarm.working("01", within_s=90.0)
        assert 0 < head.stages.order.cuts[0] < 3
