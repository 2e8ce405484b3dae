"""Calls to a member that nobody can dial, through relays that are honest, dead, busy and liars."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec
import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import (
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    TransportError,
    WireError,
)
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.service import failed
from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import TOKEN_BYTES
from p2pdrl.transport.protocol import Address, Incoming, Reply
from p2pdrl.transport.rate import NodeRates, RateLimits
from p2pdrl.transport.relay import OPEN_ROUTE

KEY = b"the swarm's key"
NOWHERE = Address("127.0.0.1", 9)
"""Where the member says that it lives; nothing listens there."""


class Peer:
    """One node on a real port."""

    def __init__(self, name: str, limits: TransportLimits, rates: NodeRates | None) -> None:
        identity = Identity(name.encode() * 32)
        self.id = identity.node_id
        self.transport = HttpTransport(
            self.id, "default", identity.tls([KEY]), clock=SystemClock(), limits=limits, rates=rates
        )
        self.listener = Listener(limits, SystemClock(), self.transport.counters)
        self.transport.relayed.take = self.listener.take
        self.address = NOWHERE

    async def start(self) -> None:
        async def echo(incoming: Incoming) -> Reply:
            vector = bytearray(incoming.vector_nbytes)
            await incoming.read_vector_into(memoryview(vector))
            return Reply(incoming.meta + incoming.sender.encode(), memoryview(vector) if vector else None)

        self.transport.serve("echo", echo, max_vector_bytes=1 << 24)
        app = web.Application()
        self.transport.mount(app)
        self.address = await self.listener.listen(app, "127.0.0.1", 0, has_key=True)
        await self.transport.start()

    async def close(self) -> None:
        await self.transport.close()
        await self.listener.close()
        assert self.listener.connections == 0
        assert self.transport.relay.tunnels == 0

    def through(self, member: Peer, *relays: Peer | tuple[str, Address]) -> None:
        """Dial ``member`` through these from now on."""
        found = [relay if isinstance(relay, tuple) else (relay.id, relay.address) for relay in relays]
        self.transport.relays.relays = lambda node: found if node == member.id else None

    async def echo(self, member: Peer, *, deadline_s: float = 5.0, nbytes: int = 0) -> bytes:
        out = bytearray(nbytes)
        sent = os.urandom(nbytes)
        answer = await self.transport.call(
            NOWHERE,
            member.id,
            "echo",
            b"hello ",
            vector=memoryview(sent) if nbytes else None,
            into=lambda _meta, _nbytes: memoryview(out),
            deadline_s=deadline_s,
            lane="bulk" if nbytes else "probe",
        )
        assert (answer.sender, bytes(out)) == (member.id, sent)
        return answer.meta


Make = Callable[..., AsyncIterator[Peer]]


@pytest.fixture
async def make() -> AsyncIterator[Callable[..., object]]:
    async with AsyncExitStack() as stack:

        async def made(name: str, rates: NodeRates | None = None, **limits: float) -> Peer:
            given = {"shutdown_grace_s": 0.05, **limits}
            peer = Peer(name, TransportLimits(**given), rates)  # type: ignore[arg-type]
            await peer.start()
            stack.push_async_callback(peer.close)
            return peer

        made.stack = stack  # type: ignore[attr-defined]
        yield made


async def attach(make, member: Peer, relay: Peer, address: Address | None = None) -> None:
    """Have ``relay`` relay for ``member`` until the test's end."""
    await member.transport.relayed.attach(relay.id, address or relay.address)

    async def serve() -> None:
        try:
            await member.transport.relayed.serve(relay.id, address or relay.address)
        except TransportError:
            pass

    task = asyncio.create_task(serve())
    make.stack.callback(task.cancel)


async def test_calls_and_vectors_pass_and_prove_who_sent_them(make) -> None:
    alice, relay, bob = [await make(name) for name in "arb"]
    await attach(make, bob, relay)
    alice.through(bob, relay)
    for nbytes in (0, 3_000_000, 0):
        assert await alice.echo(bob, nbytes=nbytes) == b"hello " + alice.id.encode()
    assert relay.transport.relay.members == [bob.id]
    assert 6_000_000 < relay.transport.relay.nbytes < 6_500_000
    assert relay.transport.relay.tunnels == 3  # of probes, of questions for streams, and a stream
    assert bob.transport.relayed.tunnels == 3


async def test_a_relay_calls_its_own_member(make) -> None:
    relay, bob = await make("r"), await make("b")
    await attach(make, bob, relay)
    relay.through(bob)
    for nbytes in (0, 1_000_000):
        assert await relay.echo(bob, nbytes=nbytes) == b"hello " + relay.id.encode()
    assert relay.transport.relay.nbytes == 0  # nothing was copied


async def test_a_member_calls_another_one_that_is_relayed_as_well(make) -> None:
    relay, bob, carol = [await make(name) for name in "rbc"]
    for member in (bob, carol):
        await attach(make, member, relay)
    bob.through(carol, relay)
    assert await bob.echo(carol) == b"hello " + bob.id.encode()


async def test_a_relay_that_connects_somebody_else_is_found_out(make) -> None:
    alice, relay, bob, carol = [await make(name) for name in "arbc"]
    await attach(make, carol, relay)
    honest = relay.transport.relay.open

    async def instead(incoming: Incoming) -> Reply:
        incoming.meta = msgspec.msgpack.encode(carol.id)  # type: ignore[misc]
        return await honest(incoming)

    routes = relay.transport._server.routes._routes  # noqa: SLF001 - a liar's
    routes[OPEN_ROUTE] = dataclasses.replace(routes[OPEN_ROUTE], handler=instead)
    alice.through(bob, relay)
    with pytest.raises((PeerRefusedError, WireError)) as info:
        await alice.echo(bob)
    assert carol.id in str(info.value)
    assert relay.transport.relay.nbytes > 0


async def test_another_relay_serves_when_one_is_dead_slow_or_doesn_t_know_the_member(make) -> None:
    alice, relay, other, bob = [await make(name) for name in "arob"]
    await attach(make, bob, relay)
    for bad in ((other.id, NOWHERE), other):
        alice.through(bob, bad, relay)
        assert await alice.echo(bob)
        await alice.transport.close()
        await alice.transport.start()
    async with FaultProxy(other.address) as proxy:
        proxy.hang()
        alice.through(bob, (other.id, proxy.address), relay)
        assert await alice.echo(bob, deadline_s=2.0)


async def test_what_it_means_that_no_relay_connects(make) -> None:
    """Where all relays say that it isn't there, it counts as a refused connection; else nothing is sure."""
    alice, relay, bob = [await make(name) for name in "arb"]

    async def kind(*relays: Peer | tuple[str, Address]) -> str:
        alice.through(bob, *relays)
        with pytest.raises(PeerUnreachableError) as info:
            await alice.echo(bob)
        assert not info.value.sent
        return failed(1, info.value, 0.1, 1.0, 0.25).kind

    assert await kind(relay) == "unreachable"
    assert await kind() == "timeout"
    assert await kind(("f" * 32, NOWHERE)) == "timeout"
    assert await kind(relay, ("f" * 32, NOWHERE)) == "timeout"


async def test_a_member_that_doesn_t_come_costs_its_caller_the_deadline_and_the_relay_nothing(make) -> None:
    alice, relay, bob = [await make(name) for name in "arb"]
    await attach(make, bob, relay)
    bob.transport.relayed.take = lambda sock, host: sock.close()  # it comes, and hangs up
    alice.through(bob, relay)
    with pytest.raises(TransportError):
        await alice.echo(bob, deadline_s=3.0)
    await relay.transport.relayed.attach(relay.id, relay.address)
    gone = await make("g")
    await gone.transport.relayed.attach(relay.id, relay.address)  # and never asks again
    alice.through(gone, relay)
    with pytest.raises(PeerTimeoutError):
        await alice.echo(gone, deadline_s=0.3)
    assert relay.transport.relay.tunnels <= 1  # until it is sure that it doesn't come


async def test_who_isn_t_admitted_or_comes_too_late_is_refused(make) -> None:
    relay = await make("r", max_relayed=1)
    bob, carol = await make("b"), await make("c")
    relay.transport.relay.admits = lambda node: node != carol.id
    with pytest.raises(PeerRefusedError, match="403"):
        await carol.transport.relayed.attach(relay.id, relay.address)
    relay.transport.relay.admits = lambda node: True
    await attach(make, bob, relay)
    with pytest.raises(PeerRefusedError, match=r"429.*ask another"):
        await carol.transport.relayed.attach(relay.id, relay.address)
    assert relay.transport.relay.members == [bob.id]


@pytest.mark.parametrize("who", ["caller", "member"])
async def test_what_is_open_ends_with_a_ban(make, who: str) -> None:
    alice, carol, relay, bob = [await make(name) for name in "acrb"]
    await attach(make, bob, relay)
    for caller in (alice, carol):
        caller.through(bob, relay)
        await caller.echo(bob)
    server = relay.transport.relay
    assert server.tunnels == 2
    banned = alice.id if who == "caller" else bob.id
    server.admits = lambda node_id: node_id != banned
    server.drop(banned)
    for _ in range(10):
        await asyncio.sleep(0)  # what copies is cancelled, and ends
    assert server.tunnels == (1 if who == "caller" else 0)
    assert server.members == ([bob.id] if who == "caller" else [])
    if who == "caller":
        assert await carol.echo(bob) == b"hello " + carol.id.encode()
    else:
        with pytest.raises(TransportError):
            await carol.echo(bob)


async def test_tunnels_are_counted_by_caller(make) -> None:
    relay = await make("r", max_tunnels_per_caller=2, tunnels_per_s=1e-9)
    alice, bob, carol = [await make(name) for name in "abc"]
    await attach(make, bob, relay)

    async def ask(peer: Peer, target: str) -> bytes:
        meta = msgspec.msgpack.encode(target)
        answer = await peer.transport.call(relay.address, relay.id, OPEN_ROUTE, meta, deadline_s=5)
        return answer.meta

    assert [len(await ask(alice, bob.id)) for _ in range(2)] == [TOKEN_BYTES, TOKEN_BYTES]
    with pytest.raises(PeerRefusedError, match="429"):
        await ask(alice, bob.id)
    assert len(await ask(carol, bob.id)) == TOKEN_BYTES
    for nonsense in (b"", b"\xc1", msgspec.msgpack.encode([1]), bytes(65)):
        with pytest.raises(PeerRefusedError, match=r"4\d\d"):
            await carol.transport.call(relay.address, relay.id, OPEN_ROUTE, nonsense, deadline_s=5)


@pytest.mark.parametrize("whose", ["the relay's", "its node's"])
async def test_relayed_bytes_keep_to_a_rate(make, tmp_path: Path, whose: str) -> None:
    """Of what is relayed all passes a bound for both ways; and half of it each bound of the node."""
    if whose == "the relay's":
        relay = await make("r", relay_bytes_s=8_000_000)
    else:
        bounds = RateLimits(str(tmp_path / "rates"), 8_000_000, 16_000_000)
        relay = await make("r", NodeRates(bounds, anew=True))
    alice, bob = await make("a"), await make("b")
    await attach(make, bob, relay)
    alice.through(bob, relay)
    await alice.echo(bob)
    loop = asyncio.get_running_loop()
    began_s = loop.time()
    await alice.echo(bob, nbytes=4_000_000, deadline_s=20)
    assert loop.time() - began_s > 0.6  # 8 MB there and back, of which a quarter of a second's is free


async def test_a_member_comes_back_after_its_relay_was_gone(make) -> None:
    alice, relay, bob = [await make(name) for name in "arb"]
    async with FaultProxy(relay.address) as proxy:
        await attach(make, bob, relay, proxy.address)
        alice.through(bob, relay)
        assert await alice.echo(bob)
        proxy.reset()
        with pytest.raises(TransportError):
            await asyncio.gather(*(alice.echo(bob) for _ in range(9)))  # some over the connection of before
        await attach(make, bob, relay, proxy.address)
        assert await alice.echo(bob)
