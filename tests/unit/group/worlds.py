"""Groups of nodes on the in-memory network."""

from __future__ import annotations

import asyncio
import random
from contextlib import asynccontextmanager

from p2pdrl.clock import LoopClock
from p2pdrl.group.service import ROUTE, Group
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import FakeSwarm
from p2pdrl.transport.protocol import Address

WAIT_S = 20.0


class Node:
    def __init__(self, network: MemoryNetwork, number: int, epoch: int = 1) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.swarm = FakeSwarm(self.id, epoch)
        self.note = self.id[-2:].encode()
        self.say = lambda: self.note
        self.dead = False
        self.group = self.make(epoch)

    def make(self, epoch: int) -> Group:
        self.group = Group(
            self.swarm,
            self.transport,
            LoopClock(),
            epoch,
            lambda: self.say(),  # noqa: PLW0108 - which a test may put another in the place of
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
