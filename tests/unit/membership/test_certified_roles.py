"""Members whose certificates limit their roles: what others believe of them and from them."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.config.node import tags_of
from p2pdrl.errors import PeerRefusedError
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.messages import (
    Digest,
    GossipMessage,
    JoinRequest,
    Nack,
    SwarmEntry,
    encode,
    without_settings,
)
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import (
    BadRecordError,
    Incarnation,
    SwarmRecord,
    Verifier,
    sign_member,
    sign_swarm_record,
)
from p2pdrl.membership.service import MembershipService
from p2pdrl.membership.state import open_core, own_record
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.protocol import Address

ALICE, BOB, CAROL = (Identity(name * 32) for name in (b"a", b"b", b"c"))
ACTOR = frozenset({"actor"})


def record(identity: Identity, tags: dict[str, str]):
    return sign_member(identity, "swarm", own_record(identity, "bob", "10.0.0.2:7600", 1, tags))


@pytest.mark.parametrize(
    ("tags", "beyond"),
    [
        (tags_of(("actor",)), None),
        (tags_of(("actor",), promote=True), "learner"),
        (tags_of(("actor", "learner")), "learner"),
        (tags_of(()), "learner and server"),
        ({}, "learner and server"),
        (tags_of(("replay",)), "replay"),
    ],
)
def test_a_record_beyond_the_certificate_is_refused(tags: dict[str, str], beyond: str | None) -> None:
    limits = {BOB.node_id: ACTOR}
    verifier = Verifier("swarm", verify, allowed=limits.get)
    if beyond is None:
        verifier.check_member(record(BOB, tags), 1.0)
    else:
        words = f"bob is certified for actor alone, and wants to be {beyond}, too"
        with pytest.raises(BadRecordError, match=words) as told:
            verifier.check_member(record(BOB, tags), 1.0)
        assert told.value.status == 403
    limits.clear()
    verifier.check_member(record(BOB, tags), 1.0)


def setting() -> SwarmRecord:
    plain = SwarmRecord("pause", 1, BOB.node_id, b"\xc3", BOB.public_key)
    return sign_swarm_record(BOB, "swarm", plain)


def test_messages_without_settings_keep_all_else() -> None:
    member = record(BOB, {})
    told = GossipMessage(Incarnation(1, 0), (member, setting()))
    assert without_settings(told) == GossipMessage(Incarnation(1, 0), (member,))
    only = GossipMessage(Incarnation(1, 0), (member,))
    assert without_settings(only) is only
    digest = Digest(False, (), (SwarmEntry("pause", 1, BOB.node_id),))
    assert without_settings(digest) == Digest(False)
    assert without_settings(Nack("x", (setting(),))) == Nack("x")
    join = JoinRequest(member)
    assert without_settings(join) is join


class Node:
    """One member on the in-memory network."""

    def __init__(self, network: MemoryNetwork, identity: Identity, number: int, *seeds: str) -> None:
        self.address = f"10.0.0.{number}:7600"
        self.transport = network.join(identity.node_id, Address.parse(self.address))
        known, clock = KnownMembers(None), LoopClock()
        core = open_core(
            config=MembershipConfig.lan(),
            signer=identity,
            swarm_id="swarm",
            name=f"n{number}",
            address=self.address,
            clock=clock,
            rng=random.Random(number),
            known=known,
            tags=tags_of(("actor",)),
            allowed=self.transport.roles_of,
        )
        addresses = [Address.parse(seed) for seed in seeds]
        self.service = MembershipService(
            core, self.transport, clock, addresses, known=known, rng=random.Random(number)
        )

    async def start(self) -> Node:
        await self.transport.start()
        await self.service.start()
        return self

    async def end(self) -> None:
        await self.service.close()
        await self.transport.close()


@pytest.mark.looptime
async def test_who_only_acts_has_no_say_in_settings_by_itself_or_by_others() -> None:
    """Two such nodes together can't bring one in either: neither is believed about the other."""
    network = MemoryNetwork(random.Random(0), delay_s=(0.001, 0.003))
    network.allowed |= {BOB.node_id: ACTOR, CAROL.node_id: ACTOR}
    alice = await Node(network, ALICE, 1).start()
    bob = await Node(network, BOB, 2, "10.0.0.1:7600").start()
    carol = await Node(network, CAROL, 3, "10.0.0.1:7600").start()
    await asyncio.sleep(5)
    bob.service.propose("pause", True)
    await asyncio.sleep(120)
    assert carol.service.records.value("pause") is None
    assert alice.service.records.value("pause") is None
    alice.service.propose("stop", "when it is solved")
    await asyncio.sleep(60)
    for node in (bob, carol):
        assert node.service.records.value("stop") == "when it is solved"
    assert {member.state for member in alice.service.members()} == {"alive"}
    for node in (alice, bob, carol):
        await node.end()


@pytest.mark.looptime
async def test_nobody_joins_through_a_member_that_only_acts() -> None:
    network = MemoryNetwork(random.Random(0), delay_s=(0.001, 0.003))
    network.allowed[BOB.node_id] = ACTOR
    alice = await Node(network, ALICE, 1).start()
    bob = await Node(network, BOB, 2, "10.0.0.1:7600").start()
    await asyncio.sleep(5)
    carol = await Node(network, CAROL, 3, "10.0.0.2:7600").start()
    await asyncio.sleep(5)
    assert not carol.service.joined.is_set()
    (trouble,) = carol.service.joiner.troubles().values()
    assert trouble == "it is certified for actor alone: name another member"
    for node in (alice, bob, carol):
        await node.end()


@pytest.mark.looptime
async def test_a_newcomer_with_roles_beyond_its_certificate_is_refused_in_words() -> None:
    network = MemoryNetwork(random.Random(0))
    network.allowed[BOB.node_id] = ACTOR
    alice = await Node(network, ALICE, 1).start()
    transport = network.join(BOB.node_id, Address.parse("10.0.0.2:7600"))
    await transport.start()
    join = JoinRequest(record(BOB, tags_of(("actor", "learner"))))
    with pytest.raises(PeerRefusedError, match="certified for actor alone") as told:
        await transport.call(
            Address.parse(alice.address), ALICE.node_id, "swim/join", encode(join), deadline_s=5
        )
    assert told.value.status == 403
    assert [member.name for member in alice.service.members()] == ["n1"]
    await alice.end()
    await transport.close()
