"""A group over the in-memory network: who is in one, and what passes in it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pdrl.group.rendezvous import ranked
from p2pdrl.group.service import ROUTE
from p2pdrl.group.view import Activate, Invite, ViewKey
from p2pdrl.transport.protocol import Refusal

from .worlds import WAIT_S, now_s, world

pytestmark = pytest.mark.looptime


async def test_nodes_that_start_together_agree_and_know_each_other_s_notes():
    async with world(5) as swarm:
        await swarm.agree()
        assert now_s() < 0.6
        active = [await node.group.active() for node in swarm.nodes]
        assert all(one == active[0] for one in active)
        assert active[0].notes == {node.id: node.note for node in swarm.nodes}
        assert active[0].view.key.proposer == ranked("group 1", [node.id for node in swarm.nodes])[0]
        for node in swarm.nodes:
            assert len(node.swarm.told) == 1
            assert node.swarm.told[0][1].startswith("group of 5: ")


async def test_alone_a_view_is_there_when_start_returns():
    async with world(1) as swarm:
        [node] = swarm.nodes
        assert node.group.view.members == (node.id,)
        assert (await node.group.active()).notes == {node.id: b"00"}


async def test_a_death_that_is_known_costs_less_than_half_a_second():
    async with world(5) as swarm:
        await swarm.agree()
        for node in (swarm.proposer, swarm.others(swarm.proposer)[0]):
            before = swarm.others(node)[0].group.view.key
            await node.die()
            swarm.introduce()
            began_s = now_s()
            await swarm.agree()
            assert now_s() - began_s < 0.5
            assert swarm.living[0].group.view.key > before


async def test_a_newcomer_is_in_within_half_a_second_and_strangers_merge():
    async with world(4, acquainted=False) as swarm:
        assert {len(node.group.view.members) for node in swarm.nodes} == {1}
        swarm.introduce()
        await swarm.agree()
        assert now_s() < 1.0
        node = swarm.add()
        await node.start()
        swarm.introduce()
        began_s = now_s()
        await swarm.agree()
        assert now_s() - began_s < 0.5


async def test_waiters_hear_of_each_view_and_of_its_end():
    async with world(3) as swarm:
        await swarm.agree()
        node = swarm.others(swarm.proposer)[0]
        key = node.group.view.key
        ended = asyncio.create_task(node.group.ended(key))
        newer = asyncio.create_task(node.group.active(key))
        await asyncio.sleep(5.0)
        assert not ended.done()
        assert not newer.done()
        await swarm.others(swarm.proposer, node)[0].die()
        swarm.introduce()
        async with asyncio.timeout(WAIT_S):
            await ended
            assert (await newer).view.key > key
        await node.group.ended(key)  # long over


async def test_only_messages_of_the_view_in_force_pass():
    async with world(2) as swarm:
        await swarm.agree()
        group, key = swarm.nodes[0].group, swarm.nodes[0].group.view.key
        group.check(key)
        for other in (
            ViewKey(key.epoch, key.generation - 1, key.proposer),
            ViewKey(key.epoch, key.generation + 1, key.proposer),
            ViewKey(key.epoch, key.generation, "f" * 32),
        ):
            with pytest.raises(Refusal) as caught:
                group.check(other)
            assert caught.value.status == 409
            assert str(key) in caught.value.reason


async def test_while_a_view_forms_nothing_passes():
    async with world(2) as swarm:
        await swarm.agree()
        node = swarm.others(swarm.proposer)[0]
        view = node.group.view
        greater = msgspec.structs.replace(view.key, generation=view.key.generation + 1)
        message = Invite(msgspec.structs.replace(view, key=greater))
        await swarm.proposer.transport.call(
            node.address, node.id, ROUTE, msgspec.msgpack.encode(message), deadline_s=1.0
        )
        assert node.group.view is None
        for key in (view.key, greater):
            with pytest.raises(Refusal, match="is being formed"):
                node.group.check(key)
        await swarm.agree()  # the proposer finds out, and forms a new one


async def test_a_partition_gives_two_views_then_one():
    async with world(5) as swarm:
        await swarm.agree()
        sides = swarm.nodes[:2], swarm.nodes[2:]
        for a in sides[0]:
            for b in sides[1]:
                swarm.network.cut(a.id, b.id)
                del a.swarm.peers[b.id], b.swarm.peers[a.id]
        await asyncio.sleep(6.0)
        for side in sides:
            assert {node.group.view.members for node in side} == {tuple(node.id for node in side)}
        swarm.network.heal()
        swarm.introduce()
        began_s = now_s()
        await swarm.agree()
        assert now_s() - began_s < 2.0


async def test_the_longest_group_fits_in_one_message():
    """200 members with notes of 256 bytes: within the 65,536 bytes of metadata that a route takes."""
    members = [f"{number:032x}" for number in range(200)]
    activate = Activate(ViewKey(2**53 - 1, 2**52, members[0]), dict.fromkeys(members, bytes(256)))
    assert len(msgspec.msgpack.encode(activate)) <= 65536
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(activate), type=Activate) == activate


async def test_it_works_under_loss_delay_and_duplicates():
    async with world(6, loss=0.1, duplicate=0.2) as swarm:
        await swarm.agree()
        await swarm.proposer.die()
        swarm.introduce()
        await swarm.agree()
