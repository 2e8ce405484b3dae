"""Groups over the in-memory network, on the loop's virtual time."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

import msgspec
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.strategies.group.rendezvous import ranked
from p2pdrl.strategies.group.service import ROUTE, Group
from p2pdrl.strategies.group.view import Activate, Invite, Ping, ViewKey
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.testing.swarm import FakeSwarm
from p2pdrl.transport.memory import MemoryNetwork
from p2pdrl.transport.protocol import Address, Refusal

pytestmark = pytest.mark.looptime

WAIT_S = 20.0


class Node:
    def __init__(self, network: MemoryNetwork, number: int, epoch: int = 1) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.swarm = FakeSwarm(self.id, epoch)
        self.note = self.id[-2:].encode()
        self.dead = False
        self.group = self.make(epoch)

    def make(self, epoch: int) -> Group:
        self.group = Group(
            Context(
                swarm=self.swarm,
                learner=None,
                transport=self.transport,
                clock=LoopClock(),
                rng=random.Random(0),
                epoch=epoch,
                size=1,
                max_abs=1.0,
            ),
            lambda: self.note,
        )
        return self.group

    async def start(self) -> None:
        await self.transport.start()
        self.transport.serve(ROUTE, self._answer)
        await self.group.start()

    async def _answer(self, incoming):
        return await self.group.answer(incoming)  # of the group of the present mode

    async def die(self) -> None:
        self.dead = True
        await self.transport.close()
        await self.group.stop()


class World:
    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.nodes: list[Node] = []

    @property
    def living(self) -> list[Node]:
        return [node for node in self.nodes if not node.dead]

    def add(self, epoch: int = 1) -> Node:
        self.nodes.append(Node(self.network, len(self.nodes), epoch))
        return self.nodes[-1]

    def introduce(self) -> None:
        for node in self.living:
            node.swarm.peers = {other.id: other.address for other in self.living if other is not node}

    async def agree(self) -> None:
        """Wait until all the living are in one view."""
        wanted = tuple(sorted(node.id for node in self.living))

        def agreed() -> bool:
            views = {node.group.view for node in self.living}
            return len(views) == 1 and None not in views and views.pop().members == wanted

        async with asyncio.timeout(WAIT_S):
            while not agreed():  # noqa: ASYNC110 - on virtual time
                await asyncio.sleep(0.005)

    @property
    def proposer(self) -> Node:
        return next(node for node in self.nodes if node.id == self.living[0].group.view.key.proposer)

    def others(self, *besides: Node) -> list[Node]:
        return [node for node in self.living if node not in besides]


@asynccontextmanager
async def world(count: int, *, acquainted: bool = True, **options):
    made = World(MemoryNetwork(random.Random(1), delay_s=(0.005, 0.01), **options))
    for _ in range(count):
        made.add()
    if acquainted:
        made.introduce()
    try:
        for node in made.nodes:
            await node.start()
        yield made
    finally:
        for node in made.nodes:
            await node.group.stop()
        for node in made.nodes:
            await node.transport.close()
    left = [task for task in asyncio.all_tasks() if task.get_name().startswith("group")]
    assert left == []


def now_s() -> float:
    return asyncio.get_running_loop().time()


async def refusal(node: Node, target: Node, message, route=ROUTE) -> tuple[int, str]:
    with pytest.raises(PeerRefusedError) as caught:
        await node.transport.call(
            target.address, target.id, route, msgspec.msgpack.encode(message), deadline_s=1.0
        )
    return caught.value.status, caught.value.reason


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
        waiting = [asyncio.create_task(node.group.active(key)), asyncio.create_task(node.group.ended(key))]
        await asyncio.sleep(0.1)
        await node.group.stop()
        for result in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(result, Refusal)
            assert result.status == 503
        status, _ = await refusal(peer, node, Ping(1, proposes=False, active=None))
        assert status == 409
        await node.group.stop()
        await node.group.watch()
        node.group.doubt(peer.id, "too late")
        node.group.poke()


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
        status, reason = await refusal(swarm.nodes[2], swarm.nodes[0], Ping(1, proposes=True, active=None))
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

        node.group._core._member._note = broken
        watching = asyncio.create_task(node.group.watch())
        newer = asyncio.create_task(node.group.active(node.group.view.key))
        await swarm.others(node)[0].die()
        swarm.introduce()
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(ZeroDivisionError):
                await watching
            with pytest.raises(Refusal):
                await newer


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
