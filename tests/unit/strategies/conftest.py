"""Nodes that gossip over the in-memory network, on the loop's virtual time."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.group.compatibility import Summary
from p2pdrl.strategies.gossip import adpsgd
from p2pdrl.strategies.gossip.adpsgd import AdpsgdStrategy
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import FakeSwarm
from p2pdrl.transport.protocol import Address, Incoming, Reply

SIZE = 16
GOSSIP = AdpsgdConfig(compression="none", deadline_s=1.0)


class GossipNode:
    """A strategy, its board, and a learner that only absorbs what is posted."""

    def __init__(
        self, network: MemoryNetwork, number: int, start_D: np.ndarray, config: AdpsgdConfig
    ) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.transport = network.join(self.id, self.address)
        self.swarm = FakeSwarm(self.id)
        spec = BoardSpec(Layout((TensorEntry("x", (start_D.size,)),)))
        self.region = SharedRegion.create(spec.nbytes, "gossip")
        self.board, self.own = DaemonBoard(self.region, spec), LearnerBoard(self.region, spec)
        self.x_D = start_D.astype(np.float32)
        self.version = 10
        self.own.publish(self.x_D, None, self.version)
        self.config = config
        self.use(self.transport)

    def use(self, transport: Any, **options: Any) -> None:
        """Gossip over ``transport``."""
        self.strategy = AdpsgdStrategy(
            self.config,
            StrategyContext(
                swarm=self.swarm,
                learner=self,
                transport=transport,
                clock=LoopClock(),
                rng=random.Random(int(self.id, 16)),
                epoch=1,
                size=self.x_D.size,
                max_abs=1e6,
                **options,
            ),
        )

    async def read_through(self, on_read: Callable[[], None]) -> None:
        """Begin anew with a board that calls ``on_read`` before each read."""
        await self.strategy.stop(0.0)
        self.board = WatchedBoard(self.board, on_read)
        self.use(self.transport)
        await self.strategy.start()

    async def start(self) -> None:
        await self.transport.start()
        self.transport.serve(adpsgd.ROUTE, self.answer, max_vector_bytes=1 << 22)
        await self.strategy.start()

    async def answer(self, incoming: Incoming) -> Reply:
        return await self.strategy.answer(incoming)

    async def close(self) -> None:
        await self.strategy.stop(0.0)
        await self.transport.close()
        self.region.close()

    def now(self) -> np.ndarray:
        out_D = np.empty(self.x_D.size, np.float32)
        self.board.now(out_D)
        return out_D

    def turn(self) -> None:
        """What a learner does between two unrolls."""
        taken = self.own.take()
        if taken is not None:
            self.x_D = self.x_D + taken.vector if taken.kind == "delta" else taken.vector.copy()
            self.version = max(self.version, taken.policy_version)
        self.own.publish(self.x_D, None, self.version)

    def say(self, **changes: Any) -> None:
        """Change what the node says of itself."""
        self.swarm.says = msgspec.structs.replace(self.swarm.says, **changes)

    def moved(self) -> bool:
        return not np.array_equal(self.now(), self.x_D)


class WatchedBoard:
    """A board whose readers a test holds up or lets fail.

    Args:
        board: the true one.
        on_read: called before each read.
    """

    def __init__(self, board: DaemonBoard, on_read: Callable[[], None]) -> None:
        self._board, self._on_read = board, on_read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._board, name)

    def now(self, *arguments: Any) -> Any:
        self._on_read()
        return self._board.now(*arguments)


class Swarm:
    """Several nodes that know each other."""

    config = GOSSIP

    def __init__(self, network: MemoryNetwork) -> None:
        self.network = network
        self.nodes: list[GossipNode] = []

    @staticmethod
    def says(node: GossipNode) -> Summary:
        """What a node says of itself at first."""
        return Summary(node.id, "task", "layout", 1, "aa", 100, 10)

    async def grow(
        self, count: int, config: AdpsgdConfig = GOSSIP, size: int = SIZE, **options: Any
    ) -> list[GossipNode]:
        rng = np.random.default_rng(0)
        for number in range(count):
            node = GossipNode(self.network, number, rng.standard_normal(size), config)
            node.use(node.transport, **options)
            self.nodes.append(node)
        for node in self.nodes:
            node.swarm.peers = {other.id: other.address for other in self.nodes if other is not node}
            await node.start()
        return self.nodes

    async def close(self) -> None:
        for node in self.nodes:
            await node.close()


@pytest.fixture
def network() -> MemoryNetwork:
    return MemoryNetwork(random.Random(0), delay_s=(0.01, 0.01))


@pytest.fixture
async def swarm(network: MemoryNetwork) -> Any:
    made = Swarm(network)
    yield made
    await made.close()


@pytest.fixture
def make_board() -> Iterator[Callable[[np.ndarray], DaemonBoard]]:
    """Makes boards on which a vector is published."""
    regions = []

    def make(start_D: np.ndarray) -> DaemonBoard:
        spec = BoardSpec(Layout((TensorEntry("x", (start_D.size,)),)))
        regions.append(SharedRegion.create(spec.nbytes, "pair"))
        board = DaemonBoard(regions[-1], spec)
        board.seed(start_D.astype(np.float32), None, 1)
        return board

    yield make
    for region in regions:
        region.close()
