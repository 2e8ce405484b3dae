from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable

import pytest

from p2pdrl.membership.addresses import AddressPolicy
from p2pdrl.membership.events import MemberEvent
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.opening import open_core
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.service import MembershipService
from p2pdrl.transport.memory import MemoryNetwork, MemoryTransport
from p2pdrl.transport.protocol import Address

pytestmark = pytest.mark.looptime


class LoopClock:
    """The loop's own (here: virtual) time."""

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        return 1_700_000_000.0 + self.monotonic()


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
            policy=AddressPolicy(),
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
