"""Whether others can dial a node, asked of nodes that really try, and the relays that it keeps."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from types import SimpleNamespace

import msgspec
import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.membership.events import MemberView
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.records import Incarnation, relays_in, with_relays
from p2pdrl.node import reachability
from p2pdrl.node.events import EventLog
from p2pdrl.node.reachability import CHECK_ROUTE, DialBack, DialedBack, Reachability
from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.calls import IncomingCall
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Refusal

NONCE = b"n" * reachability.NONCE_BYTES


class Swarm:
    """Members that know each other at once: what one tells of itself all others see."""

    def __init__(self) -> None:
        self.nodes: dict[str, Peer] = {}


class Peer:
    """One node on a real port, with the part of membership that reachability uses."""

    def __init__(self, swarm: Swarm, name: str, limits: TransportLimits) -> None:
        identity = Identity(name.encode().ljust(32, b"."))
        clock = SystemClock()
        self.swarm, self.name, self.id = swarm, name, identity.node_id
        self.state, self.address = "alive", "127.0.0.1:9"
        self.tags: dict[str, str] = {}
        self.me = self.core = self  # as the service and its core show them
        self.refutations = 0
        self.events = EventLog(100, clock)
        self.transport = HttpTransport(self.id, "default", None, clock=clock, limits=limits)
        self.listener = Listener(limits, clock, self.transport.counters)
        self.transport.relayed.take = self.listener.take
        self.reachability = Reachability(
            self,  # type: ignore[arg-type]
            self.transport,
            clock,
            self.events,
            random.Random(1),
        )

    def view(self, by: Peer) -> MemberView:
        return MemberView(
            self.id, self.name, self.address, self.state, "", Incarnation(1, 1), 0.001, 0.0,
            dict(self.tags), (), 5, b"", is_self=by is self,
        )  # type: ignore[arg-type]  # fmt: skip

    def members(self) -> list[MemberView]:
        return [node.view(self) for node in self.swarm.nodes.values()]

    def member(self, node_id: str, _now: float) -> MemberView | None:
        node = self.swarm.nodes.get(node_id)
        return None if node is None or node is self else node.view(self)

    def relays_of(self, node_id: str) -> list[tuple[str, Address]] | None:
        member = self.member(node_id, 0.0)
        ids = None if member is None else relays_in(member.tags)
        nodes = [self.swarm.nodes[relay] for relay in ids or () if self.swarm.nodes[relay].state == "alive"]
        return None if ids is None else [(node.id, Address.parse(node.address)) for node in nodes]

    def tell_relays(self, relays: list[str] | None) -> None:
        self.tags = with_relays(self.tags, relays)

    @property
    def relays(self) -> set[str] | None:
        found = relays_in(self.tags)
        return None if found is None else {self.swarm.nodes[relay].name for relay in found}

    def kinds(self) -> list[str]:
        return [event["kind"] for event in self.events.since(0)]


Make = Callable[..., Awaitable[Peer]]


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Make]:
    for name, value in {"LOOK_S": 0.02, "CONFIRM_S": 0.02, "LEAST_S": 0.1, "DIAL_S": 0.5}.items():
        monkeypatch.setattr(reachability, name, value)
    again = {"unknown": 0.1, "direct": 30.0, "outbound-only": 0.3}
    monkeypatch.setattr(reachability, "AGAIN_S", again)
    monkeypatch.setattr(reachability, "DIALS_BURST", 1000.0)
    swarm = Swarm()
    async with AsyncExitStack() as stack:

        async def made(name: str, address: Address | None = None, **limits: int) -> Peer:
            peer = Peer(swarm, name, TransportLimits(shutdown_grace_s=0.05, **limits))  # type: ignore[arg-type]
            app = web.Application()
            peer.transport.mount(app)
            bound = await peer.listener.listen(app, "127.0.0.1", 0)
            peer.address = str(address or bound)
            peer.transport.start_address = bound  # type: ignore[attr-defined]
            await peer.transport.start()
            swarm.nodes[peer.id] = peer
            stack.push_async_callback(peer.listener.close)
            stack.push_async_callback(peer.transport.close)
            task = asyncio.create_task(peer.reachability.run())

            async def end() -> None:
                task.cancel()
                await asyncio.wait([task])
                assert task.cancelled(), task.exception()

            stack.push_async_callback(end)
            return peer

        yield made


async def until(condition: Callable[[], object], what: str) -> None:
    for _ in range(750):
        if condition():
            return
        await asyncio.sleep(0.02)
    raise AssertionError(f"still not: {what}")


async def test_a_node_that_others_can_dial_says_nothing_of_it(make: Make) -> None:
    one, two = await make("one"), await make("two")
    await until(lambda: one.reachability.reach == two.reachability.reach == "direct", "both are direct")
    assert (one.tags, two.tags) == ({}, {})
    assert one.kinds() == []
    assert one.reachability.figures()["seen_from"] == "127.0.0.1"


async def test_a_node_alone_knows_nothing(make: Make) -> None:
    one = await make("one")
    await asyncio.sleep(0.3)
    assert one.reachability.figures() == {
        "state": "unknown", "why": "", "seen_from": "", "checked_s": None, "relays": [], "relays_for": [],
        "tunnels": 0, "relayed_bytes": 0,
    }  # fmt: skip


async def test_an_outbound_only_node_keeps_two_relays_and_gives_them_up_when_it_can_be_dialled(
    make: Make,
) -> None:
    others = [await make(name) for name in ("one", "two", "three")]
    async with FaultProxy(Address("127.0.0.1", 9)) as router:
        router.refuse()
        home = await make("home", router.address)
        router.target = home.transport.start_address
        await until(lambda: len(home.relays or ()) == 2, "it has two relays")
        assert home.reachability.reach == "outbound-only"
        assert "refused" in home.reachability.why
        assert home.kinds() == ["outbound-only", "relays"]
        used = home.relays or set()
        assert {node.name for node in others if node.reachability.figures()["relays_for"]} == used

        lost = next(node for node in others if node.name in used)
        lost.state = "dead"
        await until(lambda: lost.name not in (home.relays or ()) and len(home.relays or ()) == 2, "another")

        router.heal()
        await until(lambda: home.relays is None, "it can be dialled")
        assert home.reachability.reach == "direct"
        assert home.kinds()[-1] == "direct"


async def test_full_relays_are_passed_over_and_none_is_told(make: Make) -> None:
    full = await make("full", max_relayed=0)
    async with FaultProxy(Address("127.0.0.1", 9)) as router:
        router.refuse()
        home = await make("home", router.address)
        await until(lambda: home.kinds() == ["outbound-only", "relays"], "it says that it has none")
        assert home.relays == set()
        other = await make("other")
        await until(lambda: home.relays == {"other"}, "it finds one")
        assert full.reachability.figures()["relays_for"] == []
        assert other.reachability.figures()["relays_for"] == ["home"]


async def test_one_liar_of_three_is_outvoted(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    liar, two, three = [await make(name) for name in ("liar", "two", "three")]
    await until(lambda: two.reachability.reach == three.reachability.reach == "direct", "they know")

    async def never(*_: object) -> str:
        return "no"

    monkeypatch.setattr(liar.reachability, "_dial", never)
    home = await make("home")
    await until(lambda: home.reachability.reach != "unknown", "it knows")
    assert home.reachability.reach == "direct"


async def test_being_accused_makes_it_look_again(make: Make) -> None:
    await make("one")
    async with FaultProxy(Address("127.0.0.1", 9)) as router:
        home = await make("home", router.address)
        router.target = home.transport.start_address
        await until(lambda: home.reachability.reach == "direct", "it can be dialled")
        router.refuse()
        await asyncio.sleep(0.3)
        assert home.reachability.reach == "direct"  # nobody has complained
        home.refutations += 1
        await until(lambda: home.relays == {"one"}, "it is relayed")


class Asks:
    """A member's question, as it came from somewhere."""

    def __init__(self, peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.peer = peer
        self.dialed: list[str] = []
        self.handler = peer.transport._server.routes.find(CHECK_ROUTE).handler  # noqa: SLF001
        monkeypatch.setattr(peer.transport, "call_anew", self._note)

    async def _note(self, to: Address, *_: object, **__: object) -> SimpleNamespace:
        self.dialed.append(str(to))
        raise PeerRefusedError(403, "not me")

    async def ask(self, sender: str, host: str, port: int = 7700) -> DialedBack:
        incoming = IncomingCall(
            sender=sender,
            route=CHECK_ROUTE,
            meta=msgspec.msgpack.encode(DialBack(port, NONCE)),
            vector_nbytes=0,
            remote_host=host,
            read_vector=lambda _: asyncio.sleep(0),  # type: ignore[arg-type,return-value]
        )
        reply = await self.handler(incoming)
        return msgspec.msgpack.decode(reply.meta, type=DialedBack)


async def test_nobody_can_have_others_dialled(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A member is dialled where it lives by its record, and where it asks from, and nowhere else."""
    one, home = await make("one"), await make("home")
    asks = Asks(one, monkeypatch)
    assert not (await asks.ask(home.id, "203.0.113.9", 22)).reached
    assert asks.dialed == [home.address, "203.0.113.9:22"]
    asks.dialed.clear()
    await asks.ask("f" * 32, "203.0.113.9", 22)  # no member that is known
    assert asks.dialed == ["203.0.113.9:22"]
    asks.dialed.clear()
    for host in ("169.254.169.254", "0.0.0.0", "224.0.0.1", "::", "", "fe80::1"):
        assert not (await asks.ask("e" * 32, host)).reached
    assert asks.dialed == []


async def test_a_member_that_asks_too_often_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "DIALS_BURST", 3.0)
    one = await make("one")
    asks = Asks(one, monkeypatch)
    for _ in range(3):
        await asks.ask("e" * 32, "127.0.0.1")
    with pytest.raises(Refusal, match="429"):
        await asks.ask("e" * 32, "127.0.0.1")
    for number in range(3):  # others are dialled; but not one host for many names
        await asks.ask(f"{number:032x}", "203.0.113.9")
    with pytest.raises(Refusal, match="429"):
        await asks.ask("d" * 32, "203.0.113.9")
    assert len(asks.dialed) == 6


async def test_who_is_relayed_itself_dials_nobody(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    await make("one")
    async with FaultProxy(Address("127.0.0.1", 9)) as router:
        router.refuse()
        home = await make("home", router.address)
        await until(lambda: home.relays == {"one"}, "it is relayed")
        asks = Asks(home, monkeypatch)
        with pytest.raises(Refusal, match="409"):
            await asks.ask("e" * 32, "127.0.0.1")
