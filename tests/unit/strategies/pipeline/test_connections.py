"""Pipes of a rank: given, opened until the next rank has begun, and closed where it comes to nothing."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.pipeline.connections import RankConnections
from p2pdrl.strategies.pipeline.messages import PipeHead
from p2pdrl.testing.fake_stages import FakePipe, FakePipes
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Refusal

pytestmark = pytest.mark.looptime

KEY = ViewKey(1, 2, "p")
RANKS = ("a", "b", "c")
AT = {name: Address("10.0.0.1", 7000 + number) for number, name in enumerate(RANKS)}


class World:
    """Three ranks that take each other's pipes."""

    def __init__(self, *, circle: bool = False) -> None:
        self.network = MemoryNetwork(random.Random(0), delay_s=(0.001, 0.001))
        self.refuse: Refusal | None = None
        self.connections, self.pipes = {}, {}
        for rank, name in enumerate(RANKS):
            pipes = self.pipes[name] = FakePipes(self.network, name)
            self.connections[name] = RankConnections(pipes, KEY, 5, RANKS, rank, circle=circle)
            pipes.serve(AT[name], lambda incoming, name=name: self.accept(name, incoming))

    async def accept(self, name, incoming):
        if self.refuse is not None:
            raise self.refuse
        return self.connections[name].accept(incoming.sender, decode(incoming.meta, PipeHead, "pipe"))

    def complete(self, name, deadline_s=10.0):
        return self.connections[name].complete(AT.__getitem__, deadline_s)


@pytest.mark.parametrize("circle", [False, True])
async def test_a_chain_and_a_circle(circle: bool):
    world = World(circle=circle)
    a, b, c = await asyncio.gather(*map(world.complete, RANKS))
    sides = [sorted(pipes) for pipes in (a, b, c)]
    assert sides == ([["next", "previous"]] * 3 if circle else [["next"], ["next", "previous"], ["previous"]])
    assert (a["next"].peer, b["previous"].peer, b["next"].peer) == ("b", "a", "c")
    for connections in world.connections.values():
        await connections.close()
    assert not a["next"].closed, "they belong to whoever took them"


async def test_two_ranks_in_a_circle_have_two_pipes():
    network = MemoryNetwork(random.Random(0), delay_s=(0.001, 0.001))
    made = [
        RankConnections(FakePipes(network, n), KEY, 5, ("a", "b"), r, circle=True) for r, n in enumerate("ab")
    ]
    assert [(one.next, one.previous) for one in made] == [("b", "b"), ("a", "a")]
    one_rank = RankConnections(FakePipes(network, "a"), KEY, 5, ("a",), 0, circle=True)
    assert await one_rank.complete(AT.__getitem__, 1.0) == {}


async def test_it_waits_until_the_next_rank_has_begun():
    world = World()
    world.refuse = Refusal(503, "not yet")
    opening = asyncio.gather(*map(world.complete, RANKS))
    await asyncio.sleep(2.0)
    assert not opening.done()
    world.refuse = None
    await opening


async def test_what_is_missing_is_told_and_what_is_there_is_closed():
    world = World()
    with pytest.raises(PeerTimeoutError, match="previous"):
        await world.complete("b", 1.0)
    _, there = world.pipes["b"].ends
    assert not there.closed
    await world.connections["c"].close()
    assert there.closed


async def test_a_next_rank_that_is_gone_or_says_no_for_good():
    world = World()
    gone = RankConnections(FakePipes(world.network, "c"), KEY, 5, ("c", "x"), 0, circle=False)
    with pytest.raises(PeerUnreachableError):
        await gone.complete(lambda _: Address("10.0.0.9", 1), 10.0)
    world.refuse = Refusal(403, "quarantined")
    with pytest.raises(WireError, match="takes no pipe"):
        await world.complete("a")


@pytest.mark.parametrize(
    ("sender", "head"),
    [
        ("a", PipeHead(KEY, 4, 0)),
        ("a", PipeHead(ViewKey(1, 1, "p"), 5, 0)),
        ("a", PipeHead(KEY, 5, 2)),
        ("c", PipeHead(KEY, 5, 0)),
    ],
)
async def test_pipes_for_others_are_refused(sender, head):
    with pytest.raises(Refusal) as refused:
        World().connections["b"].accept(sender, head)
    assert refused.value.status == 409


async def test_the_last_of_several_pipes_counts():
    connections = World().connections["b"]
    network = MemoryNetwork(random.Random(0))
    pipes = [FakePipe(network, "b", "a") for _ in range(2)]
    for pipe in pipes:
        connections.accept("a", PipeHead(KEY, 5, 0)).take(pipe)
    assert [pipe.closed for pipe in pipes] == [True, False]
    connections.accept("a", PipeHead(KEY, 5, 0)).take(None)
    await connections.close()
    assert pipes[1].closed


async def test_who_doesnt_know_that_its_pipe_was_taken_gives_up_at_once():
    """The answer to the first was lost, and the next rank has begun with it."""
    world = World()
    b = asyncio.create_task(world.complete("b"))
    lost = FakePipe(world.network, "b", "a")
    world.connections["b"].accept("a", PipeHead(KEY, 5, 0)).take(lost)
    await asyncio.gather(b, world.complete("c"))
    with pytest.raises(PeerUnreachableError, match="lost"):
        await world.complete("a")
    with pytest.raises(Refusal) as refused:
        world.connections["b"].accept("c", PipeHead(KEY, 5, 0))
    assert refused.value.status == 409
