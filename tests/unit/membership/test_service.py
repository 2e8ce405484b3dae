from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.membership import swarm_records
from p2pdrl.membership.events import MemberEvent
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.joining import JoinHooks
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.messages import GossipMessage, JoinRequest, Nack, encode
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.service import MembershipService
from p2pdrl.membership.state import open_core
from p2pdrl.testing.memory_transport import MemoryNetwork, MemoryTransport
from p2pdrl.transport.protocol import Address, Refusal
from p2pdrl.versions import ProtocolRange

pytestmark = pytest.mark.looptime


class Node:
    """One member on the in-memory network."""

    def __init__(self, network: MemoryNetwork, number: int, seeds: list[str], **options: object) -> None:
        self.identity = options.pop("identity", None) or Identity(bytes([number]) * 32)
        self.address = str(options.pop("address", f"10.0.0.{number}:7600"))
        self.events: list[MemberEvent] = []
        folder = options.pop("folder", None)
        known = KnownMembers(folder)
        clock = LoopClock()
        self.transport: MemoryTransport = network.join(self.identity.node_id, Address.parse(self.address))
        core = open_core(
            config=MembershipConfig.lan(),
            signer=self.identity,
            swarm_id="swarm",
            name=f"n{number}",
            address=str(options.pop("claims", self.address)),
            clock=clock,
            rng=random.Random(number),
            known=known,
            **{name: options.pop(name) for name in ("spoken", "release") if name in options},
        )
        self.service = MembershipService(
            core,
            self.transport,
            clock,
            [Address.parse(seed) for seed in seeds],
            known=known,
            rng=random.Random(number),
            **options,
        )
        self.service.subscribe(self.events.append)

    async def start(self) -> Node:
        await self.transport.start()
        await self.service.start()
        return self

    async def kill(self) -> None:
        """As by kill -9: no goodbye."""
        await self.service.close()
        await self.transport.close()

    def states(self) -> dict[str, str]:
        return {member.name: member.state for member in self.service.members()}


Start = Callable[..., "asyncio.Future[Node]"]


@pytest.fixture
async def network() -> MemoryNetwork:
    return MemoryNetwork(random.Random(0), delay_s=(0.001, 0.003))


@pytest.fixture
async def start(network: MemoryNetwork) -> AsyncIterator[Start]:
    nodes: list[Node] = []

    async def make(number: int, seeds: list[str], **options: object) -> Node:
        node = Node(network, number, seeds, **options)
        nodes.append(node)
        return await node.start()

    yield make
    for node in nodes:
        await node.kill()


async def test_three_nodes_meet_and_one_is_killed(start: Start) -> None:
    one = await start(1, [])
    two = await start(2, ["10.0.0.1:7600"])
    three = await start(3, ["10.0.0.1:7600"])
    await asyncio.wait_for(asyncio.gather(*(node.service.joined.wait() for node in (one, two, three))), 3)
    await asyncio.sleep(3)
    for node in (one, two, three):
        assert node.states() == {"n1": "alive", "n2": "alive", "n3": "alive"}
    await three.kill()
    await asyncio.sleep(9)
    assert one.states()["n3"] == two.states()["n3"] == "dead"
    dead = next(member for member in one.service.members() if member.name == "n3")
    assert "connection refused" in dead.state_reason
    assert dead.state_reason.endswith("s ago)")
    assert [event.kind for event in one.events if event.member.name == "n3"] == ["joined", "suspect", "dead"]


async def test_a_leaver_tells_three_and_ends_within_its_time(start: Start) -> None:
    nodes = [await start(number, [] if number == 1 else ["10.0.0.1:7600"]) for number in range(1, 6)]
    await asyncio.sleep(4)
    leaver = nodes[4]
    assert await leaver.service.leave(timeout_s=5.0) == 3
    await leaver.kill()
    await asyncio.sleep(15)
    assert [node.states()["n5"] for node in nodes[:4]] == ["left"] * 4


async def test_leaving_alone_takes_no_time(start: Start) -> None:
    node = await start(1, [])
    assert await node.service.leave(timeout_s=5.0) == 0


async def test_seeds_are_tried_for_ever(start: Start) -> None:
    two = await start(2, ["10.0.0.1:7600"])
    assert not await two.service.joiner.once()
    assert two.service.joiner.troubles().keys() == {"10.0.0.1:7600"}
    await asyncio.sleep(120)
    assert not two.service.joined.is_set()
    one = await start(1, [])
    await asyncio.wait_for(two.service.joined.wait(), 31)
    assert one.service.joined.is_set()


async def test_two_islands_of_the_same_seeds_become_one(start: Start, network: MemoryNetwork) -> None:
    seeds = ["10.0.0.1:7600", "10.0.0.2:7600"]
    ids = [Identity(bytes([number]) * 32).node_id for number in range(1, 5)]
    for left in (0, 2):
        for right in (1, 3):
            network.cut(ids[left], ids[right])
    nodes = [await start(number, seeds) for number in range(1, 5)]
    await asyncio.sleep(40)
    assert set(nodes[0].states()) == {"n1", "n3"}
    network.heal()
    await asyncio.sleep(40)
    for node in nodes:
        assert node.states() == dict.fromkeys(["n1", "n2", "n3", "n4"], "alive")


async def test_ourselves_among_the_seeds_is_noticed(start: Start) -> None:
    one = await start(1, ["10.0.0.1:7600"])
    assert not await one.service.joiner.once()
    assert one.service.joiner.own_address_among_seeds
    # also when we are known by another address
    two = await start(2, ["10.0.0.2:7600"], claims="198.51.100.2:7600")
    assert not await two.service.joiner.once()
    assert two.service.joiner.own_address_among_seeds
    assert not two.service.joined.is_set()


async def test_every_address_of_a_name_is_tried_and_names_are_resolved_anew(start: Start) -> None:
    answers = [["10.0.0.8", "10.0.0.1"], ["10.0.0.1", "10.0.0.2"]]
    asked: list[str] = []

    async def resolver(host: str) -> list[str]:
        asked.append(host)
        return answers[0]

    one = await start(1, [])
    three = await start(3, ["swarm.example:7600"], resolver=resolver)
    await asyncio.sleep(2)
    assert three.service.joined.is_set()
    two = await start(2, [])
    answers[0] = answers[1]
    await asyncio.sleep(60)
    assert set(two.states()) == set(one.states()) == {"n1", "n2", "n3"}
    assert set(asked) == {"swarm.example"}


async def test_a_name_that_isnt_known_is_tried_again(start: Start) -> None:
    known: list[str] = []

    async def resolver(host: str) -> list[str]:
        if not known:
            raise OSError(-2, "Name or service not known")
        return known

    await start(1, [])
    two = await start(2, ["swarm.example:7600"], resolver=resolver)
    await asyncio.sleep(5)
    assert two.service.joiner.troubles() == {"swarm.example:7600": "name or service not known"}
    known.append("10.0.0.1")
    await asyncio.wait_for(two.service.joined.wait(), 31)
    await asyncio.sleep(1)
    assert two.service.joiner.troubles() == {}


async def test_a_name_that_no_resolver_takes_is_no_bug(start: Start) -> None:
    async def resolver(host: str) -> list[str]:
        raise UnicodeError("label empty or too long")  # as Python's own does for what it can't encode

    two = await start(2, ["swarm.example:7600"], resolver=resolver)
    assert not await two.service.joiner.once()
    assert "label" in two.service.joiner.troubles()["swarm.example:7600"]


async def test_another_task_is_refused_in_plain_words_on_both_sides(start: Start) -> None:
    told: list[tuple[str, str]] = []

    def check(meta: bytes) -> str | None:
        return None if meta == b"cartpole" else "this swarm trains cartpole"

    hooks = JoinHooks(check_join=check, on_refused=lambda *refusal: told.append(refusal))
    mine = JoinHooks(meta=lambda: b"pong", on_refused=lambda *refusal: told.append(refusal))
    one = await start(1, [], hooks=hooks)
    two = await start(2, ["10.0.0.1:7600"], hooks=mine)
    await asyncio.sleep(1)
    assert ("10.0.0.1:7600", "this swarm trains cartpole") in told
    assert ("10.0.0.2:7600", "we refused it: this swarm trains cartpole") in told
    assert two.service.joiner.refusals() == {"10.0.0.1:7600": "this swarm trains cartpole"}
    await asyncio.sleep(100)
    assert sum(address == "10.0.0.1:7600" for address, _ in told) == 1  # told once, tried slowly
    assert set(one.states()) == {"n1"}


async def test_another_version_is_refused_once_in_plain_words(start: Start) -> None:
    told: list[tuple[str, str]] = []
    hooks = JoinHooks(on_refused=lambda *refusal: told.append(refusal))
    one = await start(1, [], hooks=hooks)
    two = await start(2, ["10.0.0.1:7600"], hooks=hooks, spoken=ProtocolRange(98, 99))
    await asyncio.sleep(20)
    here = "this node speaks protocol 6–7, that one 98–99: install a newer p2pdrl where this node runs"
    there = "this node speaks protocol 98–99, that one 6–7: install a newer p2pdrl where that one runs"
    assert told == [("10.0.0.2:7600", f"we refused it: {here}"), ("10.0.0.1:7600", there)]
    assert not two.service.joined.is_set()
    assert set(one.states()) == {"n1"}


async def test_members_of_two_releases_are_one_swarm_and_tell_what_they_run(start: Start) -> None:
    one = await start(1, [], release="1.0")
    two = await start(2, ["10.0.0.1:7600"], release="1.1", spoken=ProtocolRange(7, 8))
    await asyncio.sleep(5)
    one.service.retag({"roles": "learner"})  # what it runs stays told
    await asyncio.sleep(5)
    for node in (one, two):
        told = {member.name: (member.tags["release"], member.spoken) for member in node.service.members()}
        assert told == {"n1": ("1.0", ProtocolRange(6, 7)), "n2": ("1.1", ProtocolRange(7, 8))}


async def test_a_later_release_has_more_kinds_of_settings(start: Start, monkeypatch) -> None:
    one = await start(1, [])
    two = await start(2, ["10.0.0.1:7600"])
    await asyncio.sleep(2)
    monkeypatch.setattr(swarm_records, "RECORD_KEYS", swarm_records.RECORD_KEYS | {"later"})
    setting = two.service.records.compose("later", 5, two.identity)
    monkeypatch.undo()
    message = encode(GossipMessage(two.service.core.me.incarnation, (setting,)))
    await two.transport.call(
        Address.parse(one.address), one.service.node_id, "swim/gossip", message, deadline_s=1.0
    )
    assert one.service.core.refused_records == 0
    assert one.service.records.get("later") is None


async def test_not_yet_is_no_refusal(start: Start) -> None:
    ready: list[bool] = []
    told: list[tuple[str, str]] = []

    def check(meta: bytes) -> str | None:
        if not ready:
            raise Refusal(503, "still looking for the swarm")
        return None

    await start(1, [], hooks=JoinHooks(check_join=check))
    two = await start(2, ["10.0.0.1:7600"], hooks=JoinHooks(on_refused=lambda *refusal: told.append(refusal)))
    await asyncio.sleep(2)
    assert not two.service.joined.is_set()
    ready.append(True)
    await asyncio.wait_for(two.service.joined.wait(), 10)
    assert told == []


async def test_the_welcome_carries_join_info_and_settings_and_may_be_declined(start: Start) -> None:
    seen: list[bytes] = []
    changed: list[str] = []

    def decline(info: bytes) -> str | None:
        seen.append(info)
        return "its task needs --allow-import" if len(seen) == 1 else None

    one = await start(1, [], hooks=JoinHooks(info=lambda: b"task"))
    one.service.propose("mode", {"name": "dsgd"})
    two = await start(
        2,
        ["10.0.0.1:7600"],
        hooks=JoinHooks(check_welcome=decline),
        on_record=lambda record: changed.append(record.key),
    )
    await asyncio.sleep(1)
    assert not two.service.joined.is_set()
    assert two.service.joiner.refusals() == {"10.0.0.1:7600": "its task needs --allow-import"}
    assert await two.service.joiner.once()
    assert seen == [b"task", b"task"]
    assert two.service.records.value("mode") == {"name": "dsgd"}
    assert changed == ["mode"]


async def test_who_declines_says_goodbye_where_it_was_taken_in(start: Start) -> None:
    one = await start(1, [])
    two = await start(2, ["10.0.0.1:7600"], hooks=JoinHooks(check_welcome=lambda data: "another task"))
    await asyncio.sleep(1)
    me = two.service.core.me.id
    assert {member.id: member.state for member in one.service.members()}[me] == "alive"
    await two.service.leave()
    assert {member.id: member.state for member in one.service.members()}[me] == "left"


async def test_a_node_that_doesnt_know_its_address_learns_it(start: Start) -> None:
    await start(1, [])
    two = await start(2, ["10.0.0.1:7600"], claims="0.0.0.0:7600")
    await asyncio.wait_for(two.service.joined.wait(), 10)
    assert two.service.members()[0].address == "10.0.0.2:7600"


async def test_a_killed_node_comes_back_as_itself_and_by_memory(start: Start, tmp_path: Path) -> None:
    one = await start(1, [])
    two = await start(2, ["10.0.0.1:7600"], folder=tmp_path)
    await asyncio.sleep(8)
    await two.kill()
    await asyncio.sleep(2)
    again = await start(2, [], folder=tmp_path, address="10.0.0.22:7600")
    await asyncio.sleep(2)
    assert again.service.joined.is_set()  # no seeds were given: it remembered
    assert one.states() == {"n1": "alive", "n2": "alive"}
    assert one.service.members()[1].address == "10.0.0.22:7600"
    assert "dead" not in [event.kind for event in one.events]


async def test_a_node_frozen_for_20_s_comes_back(start: Start, network: MemoryNetwork) -> None:
    nodes = [await start(number, [] if number == 1 else ["10.0.0.1:7600"]) for number in range(1, 5)]
    await asyncio.sleep(3)
    frozen = nodes[3]
    for other in nodes[:3]:  # cut off for as long, which looks the same from outside
        network.cut(frozen.identity.node_id, other.identity.node_id)
    await asyncio.sleep(20)
    assert [node.states()["n4"] for node in nodes[:3]] == ["dead"] * 3
    network.heal()
    await asyncio.sleep(15)
    for node in nodes:
        assert node.states() == dict.fromkeys(["n1", "n2", "n3", "n4"], "alive")


async def test_malformed_requests_are_refused(start: Start) -> None:
    one, two = await start(1, []), await start(2, [])
    for route, meta, status in [
        ("swim/ping", b"\xc1", 400),
        ("swim/ping", encode(Nack("no")), 400),
        ("swim/join", encode(JoinRequest(one.service.core.me)), 403),
    ]:
        with pytest.raises(PeerRefusedError) as caught:
            await two.transport.call(Address.parse(one.address), None, route, meta, deadline_s=1.0)
        assert caught.value.status == status
    assert set(one.states()) == {"n1"}


async def test_a_bug_in_a_subscriber_is_told_loudly(start: Start) -> None:
    def broken(event: MemberEvent) -> None:
        raise RuntimeError("a bug")

    one, two = await start(1, []), await start(2, ["10.0.0.1:7600"])
    two.service.subscribe(broken)
    with pytest.raises(RuntimeError, match="a bug"):
        await asyncio.wait_for(two.service.watch(), 5)
    assert set(one.states()) == {"n1", "n2"}


async def test_closing_twice_leaves_no_task_behind(start: Start) -> None:
    before = asyncio.all_tasks()
    nodes = [await start(1, ["10.0.0.7:7600"]), await start(2, ["10.0.0.1:7600"])]
    await asyncio.sleep(3)
    for node in nodes * 2:
        await node.kill()
    assert asyncio.all_tasks() == before


async def test_a_setting_is_told_to_everybody_at_once(start: Start) -> None:
    nodes = [await start(number, [] if number == 1 else ["10.0.0.1:7600"]) for number in range(1, 25)]
    await asyncio.sleep(20)
    nodes[7].service.propose("mode", {"name": "dsgd"})
    await asyncio.sleep(0.05)  # a gossip round is ten times as long
    assert [node.service.records.value("mode") for node in nodes] == [{"name": "dsgd"}] * len(nodes)


async def test_a_setting_reaches_everybody_over_a_lossy_network(start: Start, network: MemoryNetwork) -> None:
    nodes = [await start(number, [] if number == 1 else ["10.0.0.1:7600"]) for number in range(1, 13)]
    await asyncio.sleep(20)
    network.loss = 0.4
    nodes[3].service.propose("pause", True)
    await asyncio.sleep(6)
    assert [node.service.records.value("pause") for node in nodes] == [True] * len(nodes)


async def test_a_straggler_is_told_the_newer_settings_at_once(start: Start, network: MemoryNetwork) -> None:
    one = await start(1, [])
    two = await start(2, ["10.0.0.1:7600"])
    await asyncio.sleep(5)
    old = one.service.propose("mode", {"name": "dsgd"})
    await asyncio.sleep(1)
    network.cut(one.identity.node_id, two.identity.node_id)
    one.service.propose("mode", {"name": "sgp"})
    await asyncio.sleep(0.2)
    network.heal(one.identity.node_id, two.identity.node_id)
    assert two.service.records.get("mode") == old
    one.service.tell_settings(two.identity.node_id)  # it was refused for its older mode
    await asyncio.sleep(0.02)
    assert two.service.records.value("mode") == {"name": "sgp"}


async def test_who_tells_an_older_setting_learns_the_newer_one_from_the_answer(
    start: Start, network: MemoryNetwork
) -> None:
    one = await start(1, [])
    two = await start(2, ["10.0.0.1:7600"])
    await asyncio.sleep(5)
    one.service.propose("mode", {"name": "dsgd"})
    await asyncio.sleep(1)
    network.cut(one.identity.node_id, two.identity.node_id)
    one.service.propose("mode", {"name": "sgp"})
    await asyncio.sleep(0.2)
    network.heal(one.identity.node_id, two.identity.node_id)
    two.service.tell_settings(one.identity.node_id)
    await asyncio.sleep(0.02)
    assert two.service.records.value("mode") == {"name": "sgp"}


async def test_who_relays_for_a_member_is_known_to_all_while_they_live(start: Start) -> None:
    one = await start(1, [])
    two, three = await start(2, ["10.0.0.1:7600"]), await start(3, ["10.0.0.1:7600"])
    await asyncio.sleep(5)
    home, relay = three.identity.node_id, two.identity.node_id
    assert one.service.relays_of(home) is None
    three.service.tell_relays([relay, "f" * 32])
    three.service.retag({"roles": "learner"})
    await asyncio.sleep(5)
    assert one.service.relays_of(home) == [(relay, Address("10.0.0.2", 7600))]
    assert one.service.relays_of(relay) is None
    assert next(m for m in one.service.members() if m.id == home).tags["roles"] == "learner"
    two.service.tell_relays([])  # one that can't be dialled itself is nobody's
    await asyncio.sleep(5)
    assert one.service.relays_of(home) == []
    three.service.tell_relays(None)
    await asyncio.sleep(5)
    assert one.service.relays_of(home) is None
