"""A group over the in-memory network when members are doubted, stop, change their mode or talk rubbish."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pdrl.errors import PeerRefusedError
from p2pdrl.group.service import ROUTE
from p2pdrl.group.view import Activate, GroupPing, Invite, Request, ViewKey
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

from .worlds import WAIT_S, Node, now_s, world

pytestmark = pytest.mark.looptime


async def refusal(node: Node, target: Node, message, route=ROUTE) -> tuple[int, str]:
    with pytest.raises(PeerRefusedError) as caught:
        await node.transport.call(
            target.address, target.id, route, msgspec.msgpack.encode(message), deadline_s=1.0
        )
    return caught.value.status, caught.value.reason


async def test_a_doubted_member_leaves_at_once_and_comes_back_when_it_answers():
    async with world(4) as swarm:
        await swarm.agree()
        accuser, accused = swarm.others(swarm.proposer)[:2]
        await accused.transport.close()
        key = accuser.group.view.key
        began_s = now_s()
        accuser.group.doubt(accused.id, "connection refused")
        async with asyncio.timeout(WAIT_S):
            view = (await accuser.group.active(key)).view
        assert accused.id not in view.members
        assert now_s() - began_s < 0.2
        await asyncio.sleep(3.0)
        assert accuser.group.view == view
        await accused.transport.start()
        await swarm.agree()


@pytest.mark.parametrize("askers", ["proposer", "others", "all"])
async def test_whoever_asks_for_a_new_view_gets_one_of_all_who_are_fit(askers):
    async with world(4) as swarm:
        await swarm.agree()
        view, began_s = swarm.nodes[0].group.view, now_s()
        others = swarm.others(swarm.proposer)
        asking = {"proposer": [swarm.proposer], "others": others[:2], "all": swarm.nodes}[askers]
        for node in asking:
            node.group.renew(view.key, "what they share broke")
        async with asyncio.timeout(WAIT_S):
            renewed = (await others[0].group.active(view.key)).view
        assert renewed.members == view.members
        assert now_s() - began_s < 0.2
        await asyncio.sleep(4.0)
        assert {node.group.view for node in swarm.nodes} == {renewed}, "asked by many, it is renewed once"
        for node in asking:
            node.group.renew(view.key, "that is long over")
        await asyncio.sleep(4.0)
        assert {node.group.view for node in swarm.nodes} == {renewed}


async def test_a_doubted_proposer_that_is_gone_is_passed_over():
    async with world(4) as swarm:
        await swarm.agree()
        gone = swarm.proposer
        await gone.die()  # membership doesn't know
        accuser = swarm.living[0]
        key = accuser.group.view.key
        began_s = now_s()
        accuser.group.doubt(gone.id, "connection refused")
        async with asyncio.timeout(WAIT_S):
            assert gone.id not in (await accuser.group.active(key)).view.members
        await swarm.agree()
        assert now_s() - began_s < 1.0


async def test_who_stops_says_so():
    async with world(4) as swarm:
        await swarm.agree()
        leaver, stayer = swarm.others(swarm.proposer)[:2]
        key = stayer.group.view.key
        began_s = now_s()
        await leaver.group.stop()
        async with asyncio.timeout(WAIT_S):
            view = (await stayer.group.active(key)).view
        assert leaver.id not in view.members
        assert now_s() - began_s < 0.2
        await asyncio.sleep(3.0)
        assert stayer.group.view == view


async def test_a_stopping_proposer_hands_its_turn_on():
    async with world(4) as swarm:
        await swarm.agree()
        leaver = swarm.proposer
        stayers = swarm.others(leaver)
        key = leaver.group.view.key
        began_s = now_s()
        await leaver.group.stop()
        async with asyncio.timeout(WAIT_S):
            for node in stayers:
                assert leaver.id not in (await node.group.active(key)).view.members
        assert now_s() - began_s < 1.5


async def test_waiting_ends_when_the_group_stops_and_nothing_is_answered_any_more():
    async with world(3) as swarm:
        await swarm.agree()
        node, peer = swarm.nodes[:2]
        key = node.group.view.key
        newer, ended = asyncio.create_task(node.group.active(key)), asyncio.create_task(node.group.ended(key))
        await asyncio.sleep(0.1)
        await node.group.stop()
        await ended
        with pytest.raises(Refusal) as caught:
            await newer
        assert caught.value.status == 503
        status, _ = await refusal(peer, node, GroupPing(1, proposes=False, active=None))
        assert status == 409
        await node.group.stop()
        await node.group.watch()
        node.group.doubt(peer.id, "too late")


async def test_stopping_next_to_a_dead_proposer_takes_a_moment_only():
    async with world(3) as swarm:
        await swarm.agree()
        proposer = swarm.proposer
        swarm.network.freeze(proposer.id)
        began_s = now_s()
        await swarm.others(proposer)[0].group.stop()
        assert now_s() - began_s <= 0.31
        swarm.network.thaw(proposer.id)


async def test_another_mode_epoch_is_refused_and_a_late_node_is_taken_when_it_follows():
    async with world(3) as swarm:
        await swarm.agree()
        for node in swarm.nodes[:2]:
            await node.group.stop()
            await node.make(2).start()
        async with asyncio.timeout(WAIT_S):
            for node in swarm.nodes[:2]:
                view = (await node.group.active()).view
                if len(view.members) < 2:
                    view = (await node.group.active(view.key)).view
                assert view.members == tuple(node.id for node in swarm.nodes[:2])
        status, reason = await refusal(
            swarm.nodes[2], swarm.nodes[0], GroupPing(1, proposes=True, active=None)
        )
        assert (status, "mode epoch 2" in reason) == (409, True)
        await swarm.nodes[2].group.stop()
        await swarm.nodes[2].make(2).start()
        await swarm.agree()
        assert swarm.nodes[0].group.view.key.epoch == 2


@pytest.mark.parametrize(
    "meta",
    [
        b"",
        b"\xff",
        msgspec.msgpack.encode({"type": "vote"}),
        msgspec.msgpack.encode({"type": "ping", "epoch": -1, "proposes": True, "active": None}),
        msgspec.msgpack.encode(Activate(ViewKey(1, 1, "a"), {"a": bytes(257)})),
        msgspec.msgpack.encode({"type": "invite", "view": {"key": [1, 2, "x"], "members": []}}),
    ],
)
async def test_a_malformed_message_is_a_400(meta):
    async with world(2) as swarm:
        await swarm.agree()
        a, b = swarm.nodes
        with pytest.raises(PeerRefusedError) as caught:
            await a.transport.call(b.address, b.id, ROUTE, meta, deadline_s=1.0)
        assert caught.value.status == 400


async def test_a_bug_in_a_note_is_told_by_watch_and_ends_the_group():
    async with world(2) as swarm:
        await swarm.agree()
        node = swarm.proposer

        def broken() -> bytes:
            raise ZeroDivisionError("a bug")

        node.say = broken
        watching = asyncio.create_task(node.group.watch())
        newer = asyncio.create_task(node.group.active(node.group.view.key))
        await swarm.others(node)[0].die()
        swarm.introduce()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ZeroDivisionError):
                await watching
            with pytest.raises(Refusal):
                await newer


@pytest.mark.parametrize("status", [400, 429, 500])
@pytest.mark.parametrize("kind", [GroupPing, Invite, Activate])
async def test_who_refuses_for_the_moment_is_asked_again_after_a_pause(kind, status):
    """As often as the network allows would keep busy who is too busy to answer."""
    async with world(3) as swarm:
        await swarm.agree()
        proposer, asked = swarm.proposer, 0
        node = swarm.others(proposer)[0]
        answer = node.group.answer

        async def refuse(incoming: Incoming) -> Reply:
            nonlocal asked
            if isinstance(decode(incoming.meta, Request, "group message"), kind):
                asked += 1
                raise Refusal(status, "not now")
            return await answer(incoming)

        node.group.answer = refuse
        proposer.group.renew(proposer.group.view.key, "for the test")
        await asyncio.sleep(10.0)
        assert 1 <= asked <= 110
