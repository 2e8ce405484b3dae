"""Links are measured whatever the backend, remembered, and never waited for too long."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerUnreachableError
from p2pdrl.pipeline.layers import FREE, PeerLink
from p2pdrl.strategies.pipeline.link_probe import ALL_S, GOOD_FOR_S, LinkPair, LinkTable
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.testing.virtual_swarm import FakeSwarm, SimNode
from p2pdrl.transport.protocol import Refusal

from .swarms import CONFIG, now, strategy, swarm_of

pytestmark = pytest.mark.looptime

FAST, SLOW = PeerLink(0.0001, 1e9), PeerLink(0.02, 1e6)


class World:
    """Peers that answer after a while, or never."""

    def __init__(self, took_s: float = 0.1) -> None:
        self.took_s, self.asked, self.gone = took_s, [], set()
        context = StrategyContext(FakeSwarm("0"), None, None, LoopClock(), random.Random(0), 1, 4, 1e6)
        self.table = LinkTable(context, self.measure)

    def address(self, peer: str) -> str:
        return peer

    async def measure(self, transport, to, peer, route, **_) -> LinkPair:
        self.asked.append(peer)
        await asyncio.sleep(self.took_s)
        if peer in self.gone:
            raise PeerUnreachableError("gone")
        return LinkPair(SLOW, FAST)

    async def between(self, *ranks: str) -> dict[tuple[int, int], PeerLink]:
        return await self.table.between(self.address, ranks)


async def test_links_are_measured_once_for_a_while():
    world = World()
    want = {(0, 1): SLOW, (1, 0): FAST, (0, 2): SLOW, (2, 0): FAST}
    assert await world.between("0", "1", "2") == want
    assert await world.between("0", "1", "2") == want
    assert world.asked == ["1", "2"]
    await asyncio.sleep(GOOD_FOR_S)
    await world.between("0", "1", "2")
    assert world.asked == ["1", "2", "1", "2"]


async def test_what_cant_be_measured_is_as_it_was_known_before_or_free():
    world = World()
    await world.between("0", "1")
    world.gone = {"1", "2"}
    await asyncio.sleep(GOOD_FOR_S)
    found = await world.between("0", "1", "2")
    assert found == {(0, 1): SLOW, (1, 0): FAST, (0, 2): FREE, (2, 0): FREE}


@pytest.mark.parametrize(("peers", "measured"), [(20, 6), (3, 3)])
async def test_so_many_or_so_slow_that_forming_would_wait_are_left(peers: int, measured: int):
    world = World(took_s=0.6)
    began_s = now()
    found = await world.between(*map(str, range(peers + 1)))
    assert now() - began_s <= ALL_S
    assert len(found) == 2 * peers
    assert sum(link == SLOW for link in found.values()) == measured


async def test_one_that_never_answers_doesnt_hold_up_forming():
    world = World(took_s=1e6)
    began_s = now()
    assert await world.between("0", "1") == {(0, 1): FREE, (1, 0): FREE}
    assert now() - began_s == pytest.approx(ALL_S)


def when_probed(node: SimNode, act: Callable[[], Awaitable[None]]) -> None:
    """Do something before a node answers a probe."""

    async def answer(incoming):
        if incoming.route == PIPE_ROUTE and msgspec.msgpack.decode(incoming.meta).get("type") == "probe":
            await act()
        return await node.strategy.answer(incoming)

    node.answer = answer


@pytest.mark.parametrize("backend", ["stream", "auto", "torch"])
async def test_ranks_are_ordered_and_times_predicted_by_links_whatever_the_backend(backend: str):
    config = msgspec.structs.replace(CONFIG, backend=backend, stages=3)
    async with swarm_of(3, config, start=False, trusted=True) as swarm:
        head, middle, far = swarm.nodes
        when_probed(middle, lambda: asyncio.sleep(0.02))
        await swarm.start()
        await swarm.until(lambda: strategy(head).figures.rank == 0)
        figures = strategy(head).figures
        assert figures.ranks == (head.id, far.id, middle.id)
        free_s = (4 + 3 - 1) * 0.02  # six blocks of 10 ms over three: 20 ms a stage, four microbatches
        assert figures.step_s > free_s + 0.008


async def test_a_pipeline_is_formed_though_no_link_could_be_measured():
    async def refuse() -> None:
        refused.append(now())
        raise Refusal(503, "no probes here")

    refused = []
    async with swarm_of(2, start=False) as swarm:
        for node in swarm.nodes:
            when_probed(node, refuse)
        await swarm.start()
        await swarm.working("01")
        assert refused
