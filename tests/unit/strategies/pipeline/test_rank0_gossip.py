"""Heads' exchanges end with the generation, and on time."""

from __future__ import annotations

import asyncio

import pytest

from p2pdrl.strategies.pipeline.rank0_gossip import Rank0Gossip

from .swarms import CONFIG, swarm_of

pytestmark = pytest.mark.looptime


async def test_who_is_called_away_while_an_exchange_ends_has_ended_it():
    async with swarm_of(2, start=False) as swarm:
        swarm.sim.introduce()
        me, other = swarm.nodes
        for node in swarm.nodes:
            await node.transport.start()
        swarm.network.freeze(other.id)  # so that the exchange takes as long as it may
        heads = Rank0Gossip(CONFIG, me.context())
        heads.set_peers((me.id, other.id))
        watch = await heads.begin()
        await asyncio.sleep(0.05)
        assert gossiping()
        ending = asyncio.create_task(heads.end(1.0))
        await asyncio.sleep(0.05)
        assert gossiping()
        ending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await ending
        assert not gossiping()
        await heads.end(0.5)
        await watch
        swarm.network.thaw(other.id)


def gossiping() -> bool:
    return any(task.get_name() == "strategy" for task in asyncio.all_tasks())
