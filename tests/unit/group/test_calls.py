"""Calls to a group's members: where they are, how long one insists, and who is doubted meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    PoisonedVectorError,
    WireError,
)
from p2pdrl.group.view import Holding

from .worlds import WAIT_S, now_s, world

pytestmark = pytest.mark.looptime


class Tries:
    """Fails as told, then succeeds."""

    def __init__(self, *failures: Exception) -> None:
        self.failures, self.times_s = list(failures), []

    async def __call__(self) -> str:
        self.times_s.append(now_s())
        if self.failures:
            raise self.failures.pop(0)
        return "done"


def unreachable(*, sent: bool) -> PeerUnreachableError:
    return PeerUnreachableError("nobody there", sent=sent)


async def doubted_while(swarm, insisting) -> bool:
    """Whether the view changed, for the peer was left out."""
    group = swarm.proposer.group  # which heeds any doubt; another asks the proposer whether it lives
    key = group.view.key
    assert await insisting == "done"
    await asyncio.sleep(0.3)
    return group.view is None or group.view.key != key


@pytest.mark.parametrize(
    "failures",
    [
        [unreachable(sent=True)],  # a connection broke
        [unreachable(sent=False), unreachable(sent=True)],  # but it answers when it is asked
        [PeerRefusedError(409, "not yet")] * 5,
        [WireError("malformed"), PoisonedVectorError("nan")],
    ],
)
async def test_a_peer_that_lives_is_called_again_and_not_doubted(failures):
    async with world(2) as swarm:
        await swarm.agree()
        a = swarm.proposer
        b = swarm.others(a)[0]
        tries = Tries(*failures)
        assert not await doubted_while(swarm, a.group.insist(b.id, tries))
        pauses = [later - sooner for sooner, later in zip(tries.times_s, tries.times_s[1:], strict=False)]
        assert pauses == sorted(pauses)
        assert max(pauses) < 0.3


async def test_who_is_gone_is_doubted_and_so_is_who_is_late():
    for failures, late_after_s in (
        ([PeerTimeoutError("silent")], 100.0),
        ([PeerRefusedError(409, "not yet")], 0.0),
    ):
        async with world(2) as swarm:
            await swarm.agree()
            a = swarm.proposer
            b = swarm.others(a)[0]
            insisting = a.group.insist(b.id, Tries(*failures), late_after_s=late_after_s)
            assert await doubted_while(swarm, insisting)


@pytest.mark.parametrize("sent", [False, True])
async def test_who_cannot_be_reached_nor_answers_is_doubted(sent):
    async with world(2) as swarm:
        await swarm.agree()
        a = swarm.proposer
        b = swarm.others(a)[0]
        await b.transport.close()
        failures = [unreachable(sent=sent)] * (2 if sent else 1)
        assert await doubted_while(swarm, a.group.insist(b.id, Tries(*failures)))


async def test_a_bug_ends_it():
    async with world(2) as swarm:
        await swarm.agree()
        a = swarm.proposer
        b = swarm.others(a)[0]
        with pytest.raises(ZeroDivisionError):
            await a.group.insist(b.id, Tries(ZeroDivisionError()))


async def test_a_member_is_where_it_was_when_the_view_began():
    async with world(2) as swarm:
        await swarm.agree()
        a = swarm.proposer
        b = swarm.others(a)[0]
        a.swarm.peers.clear()
        assert a.group.address(b.id) == b.address
        with pytest.raises(PeerUnreachableError):
            a.group.address("f" * 32)
        assert not await a.group.lives("f" * 32)
        assert await a.group.lives(b.id)


async def test_a_call_says_its_number():
    async with world(2) as swarm:
        await swarm.agree()
        a = swarm.proposer
        b = swarm.others(a)[0]
        seen = []

        async def serve(incoming):
            seen.append(incoming.meta)
            raise ZeroDivisionError

        b.transport.serve("push", serve)
        for _ in range(2):
            with pytest.raises(PeerRefusedError):
                await a.group.call(b.id, "push", Holding(1, 0), deadline_s=1.0)
        assert len(set(seen)) == 2


async def test_breaking_up_asks_for_a_new_view_and_doubts_the_silent():
    async with world(3) as swarm:
        await swarm.agree()
        a = swarm.nodes[0]
        silent = swarm.others(a)[0]
        swarm.network.freeze(silent.id)
        view = a.group.view
        breaking = asyncio.create_task(a.group.break_up(view, "it broke"))
        async with asyncio.timeout(WAIT_S):
            newer = await a.group.active(view.key)
            while silent.id in newer.view.members:
                newer = await a.group.active(newer.view.key)
        breaking.cancel()
        await asyncio.gather(breaking, return_exceptions=True)
