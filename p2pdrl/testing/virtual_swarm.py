"""Strategies on nodes without membership, disk or learner process: everybody knows everybody.

A death is known after ``detect_s``. Time is the event loop's own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from p2pdrl.clock import LoopClock
from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.group.compatibility import Summary
from p2pdrl.group.service import Group
from p2pdrl.strategies.protocol import ROUTES, RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.registry import build
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.testing.fake_learner import FakeLearner
from p2pdrl.testing.fake_stages import FakePipes, FakeStages
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.transport.pipe.ticket import PipeReply
from p2pdrl.transport.protocol import Address, Incoming, Reply

__all__ = ["FakeSwarm", "SimNode", "SimSwarm"]


class FakeSwarm:
    """What a strategy asks of its node, and what it told.

    Args:
        node_id: own id.
        epoch: mode epoch that the node is in.
    """

    def __init__(self, node_id: str, epoch: int = 1) -> None:
        self._id = node_id
        self.peers: dict[str, Address] = {}
        self.says: Summary | None = Summary(node_id, "task", "layout", epoch, "aa", 100, 10)
        self.adoptions: list[tuple[str, str]] = []
        self.heals: list[str] = []
        self.strikes: list[str] = []
        self.held: set[str] = set()
        self.trusts: dict[str, float] = {}
        self.seen: list[tuple[str, float]] = []
        self.rounds: list[RoundReport] = []
        self.told: list[tuple[str, str]] = []
        self.facts: list[Mapping[str, int]] = []
        """One for each that was told."""
        self.take: Callable[[str], Awaitable[bool]] | None = None
        """What an adoption does; `SimSwarm` copies the donor's vector."""
        self.steps = 0

    @property
    def node_id(self) -> str:
        """Own id."""
        return self._id

    def alive(self) -> dict[str, Address]:
        """Members that exchanges may begin with."""
        return {peer: address for peer, address in self.peers.items() if peer not in self.held}

    def name_of(self, peer: str) -> str:
        """Its id."""
        return peer

    def steps_since(self) -> int:
        """Steps since the last call."""
        steps, self.steps = self.steps, 0
        return steps

    def summary(self) -> Summary | None:
        """What we say of ourselves."""
        return self.says

    def adopt(self, donor: str, lineage: str, why: str) -> None:
        """Note it."""
        self.adoptions.append((donor, why))

    async def adopted(self, donor: str, lineage: str, why: str) -> bool:
        """Note it, and take the donor's vector where the test says how."""
        self.adoptions.append((donor, why))
        return self.take is not None and await self.take(donor)

    def heal(self, why: str) -> None:
        """Note it."""
        self.heals.append(why)

    def strike(self, peer: str, why: str) -> None:
        """Note it."""
        self.strikes.append(peer)

    def trust(self, peer: str) -> float:
        """What the test says; else 1."""
        return self.trusts.get(peer, 1.0)

    def quarantined(self, peer: str) -> bool:
        """Whether the test holds that peer in quarantine."""
        return peer in self.held

    def observed(self, outcome: str, seconds: float) -> None:
        """Note it."""
        self.seen.append((outcome, seconds))

    def round(self, report: RoundReport) -> None:
        """Note it."""
        self.rounds.append(report)

    def tell(
        self, kind: str, message: str, *, warning: bool = False, facts: Mapping[str, int] | None = None
    ) -> None:
        """Note it."""
        self.told.append((kind, message))
        self.facts.append(facts or {})


class SimNode:
    """A strategy, its fake node and its fake learner.

    Args:
        network: joins all nodes.
        number: makes id and address.
        config: the strategy.
        learner: makes the learner, which works by that mode.
        epoch: mode epoch.
        trusted: whether torch.distributed may be used.
        bounded: whether ``mixing = "auto"`` bounds what a peer can do.
    """

    def __init__(
        self,
        network: MemoryNetwork,
        number: int,
        config: StrategyConfig,
        learner: Callable[[LearnerMode], FakeLearner],
        *,
        epoch: int = 1,
        trusted: bool = False,
        bounded: bool = False,
    ) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.config = config
        self.epoch = epoch
        self.trusted, self.bounded, self.direct = trusted, bounded, True
        self.transport = network.join(self.id, self.address)
        self.swarm = FakeSwarm(self.id, epoch)
        self.learner = learner(config.learner_mode)
        self.rng = random.Random(number)
        self.stages = FakeStages(self.id, self.learner, network)
        self.pipes = FakePipes(network, self.id)
        self.strategy: Strategy = build(config, self.context())
        self.dead = False
        self._training: asyncio.Task[None] | None = None

    def context(self) -> StrategyContext:
        """What the strategy is given."""
        return StrategyContext(
            swarm=self.swarm,
            learner=self.learner,
            transport=self.transport,
            clock=LoopClock(),
            rng=self.rng,
            epoch=self.epoch,
            size=self.learner.x.size,
            max_abs=1e6,
            trusted_network=self.trusted,
            bounded=self.bounded,
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
        return self.strategy.group

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's call; a test may put another function in its place."""
        return await self.strategy.answer(incoming)

    @property
    def failure(self) -> BaseException | None:
        """What the learner died of."""
        done = self._training is not None and self._training.done() and not self._training.cancelled()
        return self._training.exception() if done and self._training is not None else None

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
        self.learner.learner_mode = config.learner_mode
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
        return await self.strategy.accept(incoming)


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
        self.bounded = False
        """Of nodes that are added from now on."""

    def add(
        self,
        config: StrategyConfig,
        start: Float32Array,
        *,
        epoch: int = 1,
        trusted: bool = False,
        **options: Any,
    ) -> SimNode:
        """Make one more node; it isn't started, and nobody knows it before `introduce`.

        Args:
            start: the learner's first vector.
            options: of its `FakeLearner`.
        """
        return self.add_learner(
            config, lambda mode: FakeLearner(start, mode, **options), epoch=epoch, trusted=trusted
        )

    def add_learner(
        self,
        config: StrategyConfig,
        learner: Callable[[LearnerMode], FakeLearner],
        *,
        epoch: int = 1,
        trusted: bool = False,
    ) -> SimNode:
        """The same with a learner that is made here."""
        node = SimNode(
            self.network, len(self.nodes), config, learner, epoch=epoch, trusted=trusted, bounded=self.bounded
        )
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
