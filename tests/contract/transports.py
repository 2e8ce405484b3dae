"""Two nodes over each transport: in memory, and over HTTP with and without TLS and streams."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.membership.identity import Identity
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.certificates import Authority, Credentials
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Answer, Transport
from p2pdrl.transport.rate import NodeRates

IDENTITIES = [Identity(name * 32) for name in (b"a", b"b", b"c")]
ALICE, BOB, STRANGER = (identity.node_id for identity in IDENTITIES)
MIB = 1 << 20


@dataclass
class Pair:
    """Alice calls Bob; `stranger` is a transport of another swarm; nothing listens at `nowhere`."""

    alice: Transport
    bob: Transport
    bob_at: Address
    stranger: Transport
    nowhere: Address


async def memory(roles: frozenset[str] | None = None) -> AsyncIterator[Pair]:
    """Two nodes in memory; Alice's certificate allows her these ``roles`` alone."""
    network = MemoryNetwork(random.Random(1))
    if roles is not None:
        network.allowed[ALICE] = roles
    addresses = [Address("10.0.0.1", 7600 + i) for i in range(4)]
    alice = network.join(ALICE, addresses[0])
    bob = network.join(BOB, addresses[1])
    stranger = network.join(STRANGER, addresses[2], swarm_id="other")
    for transport in (alice, bob, stranger):
        await transport.start()
    yield Pair(alice, bob, addresses[1], stranger, addresses[3])
    for transport in (alice, bob, stranger):
        await transport.close()


class BulkTransport(HttpTransport):
    """All calls take the bulk lane."""

    async def call(self, *args: Any, **kwargs: Any) -> Answer:
        return await super().call(*args, **{**kwargs, "lane": "bulk"})


def no_rates(_name: str) -> NodeRates | None:
    return None


async def http(
    swarm_key: bytes | None,
    *,
    streams: bool,
    hides: bool = True,
    other_key: bytes | None = None,
    rates: Callable[[str], NodeRates | None] = no_rates,
    roles: frozenset[str] | None = None,
) -> AsyncIterator[Pair]:
    """Two nodes over HTTP; the stranger has another key, or none; Alice may be invited for ``roles``."""
    clock = SystemClock()
    limits = TransportLimits(shutdown_grace_s=0.05, max_streams_per_peer=8 if streams else 0)
    kind = BulkTransport if streams else HttpTransport

    def made(name: str, identity: Identity, swarm_id: str, key: bytes | None) -> HttpTransport:
        tls = identity.tls([key]) if key is not None else None
        if key is not None and roles is not None and name == "alice":
            authority = Authority(key)
            certificate = authority.certify(identity.public_key, roles)
            tls = identity.tls(Credentials(certificate, (authority.certificate,)))
        return kind(
            identity.node_id, swarm_id, tls, hides=hides, clock=clock, limits=limits, rates=rates(name)
        )

    alice = made("alice", IDENTITIES[0], "default", swarm_key)
    bob = made("bob", IDENTITIES[1], "default", swarm_key)
    stranger = made("stranger", IDENTITIES[2], "other", other_key)
    app = web.Application()
    bob.mount(app)
    listener = Listener(limits, clock, bob.counters)
    bob_at = await listener.listen(app, "localhost", 0, has_key=swarm_key is not None)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        nowhere = Address("127.0.0.1", free.getsockname()[1])
    bob.relayed.take = listener.take
    for transport in (alice, bob, stranger):
        await transport.start()
    yield Pair(alice, bob, bob_at, stranger, nowhere)
    for transport in (alice, bob, stranger):
        await transport.close()
    await listener.close()
    assert listener.connections == 0


async def relayed(swarm_key: bytes | None, *, streams: bool) -> AsyncIterator[Pair]:
    """Bob is reached through a relay, but by who doesn't know his id: seeds are dialled."""
    clock = SystemClock()
    limits = TransportLimits(shutdown_grace_s=0.05, max_streams_per_peer=8 if streams else 0)
    async with aclosing(http(swarm_key, streams=streams)) as made:
        pair = await anext(made)
        identity = Identity(b"r" * 32)
        tls = identity.tls([swarm_key]) if swarm_key is not None else None
        relay = HttpTransport(identity.node_id, "default", tls, clock=clock, limits=limits)
        app = web.Application()
        relay.mount(app)
        listener = Listener(limits, clock, relay.counters)
        relay_at = await listener.listen(app, "127.0.0.1", 0, has_key=swarm_key is not None)
        await relay.start()
        alice, bob = pair.alice, pair.bob
        assert isinstance(alice, HttpTransport)
        assert isinstance(bob, HttpTransport)
        alice.relays.relays = lambda node: [(relay.node_id, relay_at)] if node == BOB else None
        await bob.relayed.attach(relay.node_id, relay_at)
        serving = asyncio.create_task(bob.relayed.serve(relay.node_id, relay_at))
        yield pair
        serving.cancel()
        await asyncio.wait([serving])
        await relay.close()
        await listener.close()
        assert (relay.relay.tunnels, listener.connections) == (0, 0)
        with suppress(StopAsyncIteration):
            await anext(made)
