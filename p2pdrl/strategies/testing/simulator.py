"""Nodes without membership, disk or learner process: everybody knows everybody.

A death is known after ``detect_s``. Time is the loop's own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec

from p2pdrl.clock import LoopClock
from p2pdrl.config.regime import regime_of
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.strategies.group.service import Group
from p2pdrl.strategies.protocol import ROUTES, Context, Strategy
from p2pdrl.strategies.registry import build
from p2pdrl.strategies.testing.learner import FakeLearner
from p2pdrl.strategies.testing.pipes import FakePipes
from p2pdrl.strategies.testing.stages import FakeStages
from p2pdrl.strategies.testing.swarm import FakeSwarm
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.memory import MemoryNetwork
from p2pdrl.transport.pipe import PipeReply
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

__all__ = ["SimNode", "SimSwarm"]


class SimNode:
    """A strategy, its fake node and its fake learner.

    Args:
        network: joins all nodes.
        number: makes id and address.
        config: the strategy.
        start: the learner's first vector.
        epoch: mode epoch.
        trusted: whether torch.distributed may be used.
        learner: options of `FakeLearner`.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        config: StrategyConfig,
        start: Float32Array,
        *,
        epoch: int = 1,
        trusted: bool = False,
        **learner: object,
    ) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.config = config
        self.epoch = epoch
        self.trusted, self.direct = trusted, True
        self.transport = network.join(self.id, self.address)
        self.swarm = FakeSwarm(self.id, epoch)
        self.learner = FakeLearner(start, regime_of(config), **learner)  # type: ignore[arg-type]
        self.rng = random.Random(number)
        self.stages = FakeStages(self.id, self.learner, network)
        self.pipes = FakePipes(network, self.id)
        self.strategy: Strategy = build(config, self.context())
        self.dead = False
        self._training: asyncio.Task[None] | None = None

    def context(self) -> Context:
        """What the strategy is given."""
        return Context(
            swarm=self.swarm,
            learner=self.learner,
            transport=self.transport,
            clock=LoopClock(),
            rng=self.rng,
            epoch=self.epoch,
            size=self.learner.x.size,
            max_abs=1e6,
            trusted_network=self.trusted,
            direct=self.direct,
            stages=self.stages,
            pipes=self.pipes,
        )

    async def start(self, updates: int | None = None, *, train: bool = True) -> None:
        """Serve, begin the strategy and (unless told not to) the learner."""
        await self.transport.start()
        for route in ROUTES:
            self.transport.serve(route, self._serve, max_vector_bytes=1 << 26)
        self.learner.on_update = self._updated
        self.pipes.serve(self.address, self._accept)
        await self.strategy.start()
        if train:
            self.train(updates)

    @property
    def group(self) -> Group | None:
        """The group that the strategy agrees on views in; None where it has none."""
        return getattr(self.strategy, "group", None)

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's call; a test may put another function in its place."""
        return await self.strategy.answer(incoming)

    def train(self, updates: int | None = None) -> None:
        """Let the learner begin, or go on after `pause`."""
        self._training = asyncio.create_task(self.learner.run(updates), name=f"learner {self.id[-2:]}")

    async def pause(self) -> None:
        """Stop the learner where it is; the strategy goes on."""
        if self._training is not None:
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)

    async def trained(self) -> None:
        """Wait until the learner has made its updates."""
        if self._training is not None:
            await self._training

    async def switch(self, config: StrategyConfig, epoch: int) -> None:
        """Change to another strategy, as a live node does."""
        await self.strategy.stop(1.0)
        self.config, self.epoch = config, epoch
        if self.swarm.says is not None:
            self.swarm.says = msgspec.structs.replace(self.swarm.says, mode_epoch=epoch)
        self.learner.drop_posts()
        self.stages.release()
        self.learner.regime = regime_of(config)
        self.strategy = build(config, self.context())
        await self.strategy.start()

    def vanish(self) -> None:
        """Die as by a power cut: nothing is said, calls to it are refused from now on."""
        self.dead = True
        self.stages.release()
        self.pipes.close()
        if self._training is not None:
            self._training.cancel()

    async def close(self) -> None:
        """End everything."""
        await self.strategy.stop(0.0)
        await self.pause()
        await self.stages.close()
        self.pipes.close()
        await self.transport.close()
        self.learner.close()

    def _updated(self, updates: int) -> None:
        self.swarm.steps += updates * self.learner.samples
        if self.swarm.says is not None:
            self.swarm.says = msgspec.structs.replace(self.swarm.says, policy_version=self.learner.version)
        self.strategy.updated(updates)

    async def _serve(self, incoming: Incoming) -> Reply:
        return await self.answer(incoming)

    async def _accept(self, incoming: Incoming) -> PipeReply:
        accept: Callable[[Incoming], Awaitable[PipeReply]] | None = getattr(self.strategy, "accept", None)
        if accept is None:
            raise Refusal(409, f"{self.strategy.mode} has no use for pipes")
        return await accept(incoming)


class SimSwarm:
    """Nodes that know each other.

    Args:
        network: joins them.
        detect_s: time after which a death is known to all.
    """

    def __init__(self, network: MemoryNetwork, detect_s: float = 1.0) -> None:
        self.network = network
        self.detect_s = detect_s
        self.nodes: list[SimNode] = []

    def add(self, config: StrategyConfig, start: Float32Array, **options: object) -> SimNode:
        """Make one more node; it isn't started, and nobody knows it before `introduce`."""
        node = SimNode(self.network, len(self.nodes), config, start, **options)  # type: ignore[arg-type]
        node.swarm.take = lambda donor: self._copy(donor, node)
        self.nodes.append(node)
        return node

    @property
    def living(self) -> list[SimNode]:
        """Those that didn't die."""
        return [node for node in self.nodes if not node.dead]

    def introduce(self) -> None:
        """Let all the living know each other, and nobody else."""
        for node in self.living:
            node.swarm.peers = {other.id: other.address for other in self.living if other is not node}

    async def kill(self, node: SimNode) -> None:
        """Let a node die; the others learn of it after ``detect_s``."""
        node.vanish()
        for other in self.nodes:
            self.network.cut(node.id, other.id)
        await node.transport.close()
        await node.strategy.stop(0.0)
        asyncio.get_running_loop().call_later(self.detect_s, self.introduce)

    async def close(self) -> None:
        """End all."""
        for node in self.nodes:
            await node.close()

    async def _copy(self, donor: str, taker: SimNode) -> bool:
        for node in self.living:
            if node.id == donor:
                taker.learner.board.post_set(node.learner.now(), None, node.learner.board.policy_version)
                return True
        return False
