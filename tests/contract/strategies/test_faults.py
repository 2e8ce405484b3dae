"""What every strategy does when a node dies in the middle of a round, freezes, comes back, or joins."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.testing.virtual_swarm import SimNode

from .crowd import Crowd, moved, now, stall_s, victim
from .promises import Case, every_tried

pytestmark = pytest.mark.looptime

SOON_S = 3.0
"""So long after a death is known everybody steps again."""


async def in_a_round(crowd: Crowd, node: SimNode) -> None:
    """Wait until a message with a vector from or to ``node`` is under way."""
    happened = asyncio.Event()
    for other in crowd.living:
        other.transport.on_call = lambda sent, other=other: (
            happened.set() if sent.vector and (other is node or sent.peer == node.id) else None
        )
    await asyncio.wait_for(happened.wait(), 10)
    for other in crowd.living:
        other.transport.on_call = lambda sent: None


@every_tried
async def test_a_death_in_a_round_costs_seconds(case: Case):
    async with Crowd(case) as crowd:
        await crowd.start()
        await crowd.rounds(3)
        dying = victim(crowd)
        await in_a_round(crowd, dying)
        died_s = now()
        await crowd.swarm.kill(dying)
        known_s = now() + crowd.swarm.detect_s
        before = {node.id: moved(node, case) for node in crowd.living}
        await asyncio.sleep(known_s + SOON_S + 1 - now())
        for node in crowd.living:
            assert stall_s(node, died_s) <= case.deadline_s
            assert any(known_s <= at_s <= known_s + SOON_S for at_s in node.times)
        await asyncio.sleep(4)
        for node in crowd.living:
            assert moved(node, case) >= before[node.id] + 3, node.strategy.outcomes
            last = node.swarm.rounds[-1]
            assert dying.id not in {merged.peer for merged in last.merged}
            assert node.swarm.strikes == node.swarm.heals == []
        assert crowd.spread() <= 1.5 * case.close * crowd.scale()


@every_tried
async def test_a_frozen_node_costs_seconds_and_comes_back(case: Case):
    async with Crowd(case, seed=2) as crowd:
        await crowd.start()
        await crowd.rounds(3)
        frozen = victim(crowd)
        await in_a_round(crowd, frozen)
        crowd.network.freeze(frozen.id)
        froze_s = now()
        others = [node for node in crowd.nodes if node is not frozen]
        await asyncio.sleep(1.0)
        for node in others:
            node.swarm.peers.pop(frozen.id)
        before = {node.id: moved(node, case) for node in others}
        await asyncio.sleep(7)
        for node in others:
            assert stall_s(node, froze_s) <= case.deadline_s
            assert moved(node, case) >= before[node.id] + 3, node.strategy.outcomes
        crowd.network.thaw(frozen.id)
        await asyncio.sleep(0.5)
        crowd.swarm.introduce()
        await crowd.rounds(3)
        await asyncio.sleep(2)
        assert crowd.spread() <= 2 * case.close * crowd.scale()
        assert all(node.swarm.strikes == node.swarm.heals == [] for node in crowd.nodes)


@every_tried
async def test_who_joins_takes_part(case: Case):
    async with Crowd(case, nodes=3, seed=3) as crowd:
        await crowd.start()
        await crowd.rounds(3)
        joined_s = now()
        newcomer = crowd.add()
        await crowd.start([newcomer])
        crowd.swarm.introduce()
        await crowd.rounds(5)
        peers = {
            peer.peer for node in crowd.nodes[:3] for report in node.swarm.rounds for peer in report.merged
        }
        assert newcomer.id in peers or not case.names_all
        for node in crowd.nodes:
            assert stall_s(node, joined_s) <= case.deadline_s
            assert node.swarm.strikes == node.swarm.heals == []
        await asyncio.sleep(4)
        assert crowd.spread() <= 1.5 * case.close * crowd.scale()
        assert np.linalg.norm(crowd.mean() - crowd.goal()) <= crowd.scale()
