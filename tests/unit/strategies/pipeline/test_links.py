"""Links are measured whatever the backend, remembered, and never waited for too long."""

from __future__ import annotations

import asyncio
import random

import msgspec
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerUnreachableError
from p2pdrl.pipeline.layers import FREE, Link
from p2pdrl.strategies.pipeline import links
from p2pdrl.strategies.pipeline.links import ALL_S, GOOD_FOR_S, LinkBook
from p2pdrl.strategies.pipeline.probe import LinkPair
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.testing.swarm import FakeSwarm

from .swarms import CONFIG, now, strategy, swarm_of

pytestmark = pytest.mark.looptime

FAST, SLOW = Link(0.0001, 1e9), Link(0.02, 1e6)


class World:
    """Peers that answer after a while, or never."""

    def __init__(self, monkeypatch, took_s: float = 0.1) -> None:
        self.took_s, self.asked, self.gone = took_s, [], set()
        monkeypatch.setattr(links, "measure_link", self.measure)
        context = Context(FakeSwarm("0"), None, None, LoopClock(), random.Random(0), 1, 4, 1e6)
        self.book = LinkBook(context)

    def address(self, peer: str) -> str:
        return peer

    async def measure(self, transport, to, peer, route, **_) -> LinkPair:
        self.asked.append(peer)
        await asyncio.sleep(self.took_s)
        if peer in self.gone:
            raise PeerUnreachableError("gone")
        return LinkPair(SLOW, FAST)

    async def between(self, *ranks: str) -> dict[tuple[int, int], Link]:
        return await self.book.between(self, ranks)


async def test_links_are_measured_once_for_a_while(monkeypatch):
    world = World(monkeypatch)
    want = {(0, 1): SLOW, (1, 0): FAST, (0, 2): SLOW, (2, 0): FAST}
    assert await world.between("0", "1", "2") == want
    assert await world.between("0", "1", "2") == want
    assert world.asked == ["1", "2"]
    await asyncio.sleep(GOOD_FOR_S)
    await world.between("0", "1", "2")
    assert world.asked == ["1", "2", "1", "2"]


async def test_what_cant_be_measured_is_as_it_was_known_before_or_free(monkeypatch):
    world = World(monkeypatch)
    await world.between("0", "1")
    world.gone = {"1", "2"}
    await asyncio.sleep(GOOD_FOR_S)
    found = await world.between("0", "1", "2")
    assert found == {(0, 1): SLOW, (1, 0): FAST, (0, 2): FREE, (2, 0): FREE}


@pytest.mark.parametrize(("peers", "measured"), [(20, 6), (3, 3)])
async def test_so_many_or_so_slow_that_forming_would_wait_are_left(monkeypatch, peers: int, measured: int):
    world = World(monkeypatch, took_s=0.6)
    began_s = now()
    found = await world.between(*map(str, range(peers + 1)))
    assert now() - began_s <= ALL_S
    assert len(found) == 2 * peers
    assert sum(link == SLOW for link in found.values()) == measured


async def test_one_that_never_answers_doesnt_hold_up_forming(monkeypatch):
    world = World(monkeypatch, took_s=1e6)
    began_s = now()
    assert await world.between("0", "1") == {(0, 1): FREE, (1, 0): FREE}
    assert now() - began_s == pytest.approx(ALL_S)


@pytest.mark.parametrize("backend", ["stream", "auto", "torch"])
async def test_ranks_are_ordered_and_times_predicted_by_links_whatever_the_backend(monkeypatch, backend: str):
    config = msgspec.structs.replace(CONFIG, backend=backend, stages=3)
    async with swarm_of(3, config, start=False, trusted=True) as swarm:
        head, middle, far = swarm.nodes

        async def measure(transport, to, peer, route, **_) -> LinkPair:
            near = Link(0.001, 1e9)
            return LinkPair(near, near) if peer == far.id else LinkPair(Link(0.004, 5e5), Link(0.004, 5e5))

        monkeypatch.setattr(links, "measure_link", measure)
        await swarm.start()
        await swarm.until(lambda: strategy(head).figures.rank == 0)
        figures = strategy(head).figures
        assert figures.ranks == (head.id, far.id, middle.id)
        free_s = (4 + 3 - 1) * 0.02  # six blocks of 10 ms over three: 20 ms a stage, four microbatches
        assert figures.step_s > free_s + 0.008


async def test_a_pipeline_is_formed_though_no_link_could_be_measured(monkeypatch):
    async def measure(*_, **__) -> LinkPair:
        raise PeerUnreachableError("no probes here")

    monkeypatch.setattr(links, "measure_link", measure)
    async with swarm_of(2) as swarm:
        await swarm.working("01")
