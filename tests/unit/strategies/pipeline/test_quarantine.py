"""Whoever a node holds in quarantine has no place in its pipelines, and the others go on."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pdrl.errors import PeerRefusedError
from p2pdrl.strategies.pipeline.messages import PipeHead, RankRequest
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE

from .swarms import swarm_of

pytestmark = pytest.mark.looptime


async def test_calls_and_pipes_from_quarantine_are_refused():
    async with swarm_of(2) as swarm:
        await swarm.working("01")
        head, rank = swarm.nodes
        rank.swarm.held.add(head.id)
        key = rank.group.view.key
        for ask in (
            head.transport.call(
                rank.address, rank.id, PIPE_ROUTE, msgspec.msgpack.encode(RankRequest(key)), deadline_s=3.0
            ),
            head.pipes.open_pipe(
                rank.address, rank.id, PIPE_ROUTE, msgspec.msgpack.encode(PipeHead(key, 9, 0)), deadline_s=3.0
            ),
        ):
            with pytest.raises(PeerRefusedError) as refused:
                await ask
            assert refused.value.status == 403


@pytest.mark.parametrize(("who", "whom"), [(1, 0), (0, 1), (2, 0), (3, 1)])
async def test_a_quarantine_on_one_side_parts_two_and_nobody_else(who: int, whom: int):
    """Meanwhile all that can train do; it ends after a while, as in life, and all are in their places."""
    async with swarm_of(4) as swarm:
        await swarm.working("01", "23")
        judge, judged = swarm.nodes[who], swarm.nodes[whom]
        judge.swarm.held.add(judged.id)
        await asyncio.sleep(5.0)
        before = sum(node.stages.updates for node in swarm.nodes)
        await asyncio.sleep(20.0)
        made = sum(node.stages.updates for node in swarm.nodes) - before
        assert made > 100, (made, swarm.story())  # one pipeline makes 20 a second
        judge.swarm.held.clear()
        await swarm.until(lambda: len(swarm.pipelines()) == 2, 90.0)
        await swarm.progress()
        swarm.begun_alike()
