"""A swarm in one process: strategies over an in-memory network, with learners that descend a bowl.

`SimNode` is a node without membership, disk or learner process: everybody knows everybody, and a death is
known after ``detect_s``. The learner is a coroutine that follows its `Regime` as the real one does; its
problem is f(x) = ½ |x − target|², so that every result can be computed by hand. Time is the loop's own,
which tests replace by a virtual one.

Shapes: every vector is flat, of D elements; names carry no suffix.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from p2pdrl.config.regime import FREE, Regime, regime_of
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.strategies.judgement import Summary
from p2pdrl.strategies.protocol import ROUTES, AnswerKind, Context, Post, RoundReport, Strategy
from p2pdrl.strategies.registry import build
from p2pdrl.tensors.board import BoardSpec, DaemonBoard, LearnerBoard
from p2pdrl.tensors.layout import Entry, Float32Array, Layout
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.transport.memory import MemoryNetwork
from p2pdrl.transport.protocol import Address, Incoming, Reply

__all__ = ["FakeLearner", "FakeSwarm", "LoopClock", "SimNode", "SimSwarm"]

Gradient = Callable[[Float32Array], Float32Array]
Step = Callable[[Float32Array, Float32Array], Float32Array]


class LoopClock:
    """The running loop's time."""

    def monotonic(self) -> float:
        """Seconds."""
        return asyncio.get_running_loop().time()

    def wall(self) -> float:
        """Seconds since the Unix epoch, of an invented day."""
        return 1_700_000_000.0 + self.monotonic()


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
        self.seen: list[tuple[str, float]] = []
        self.rounds: list[RoundReport] = []
        self.told: list[tuple[str, str]] = []
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

    def quarantined(self, peer: str) -> bool:
        """Whether the test holds that peer in quarantine."""
        return peer in self.held

    def observed(self, outcome: str, seconds: float) -> None:
        """Note it."""
        self.seen.append((outcome, seconds))

    def round(self, report: RoundReport) -> None:
        """Note it."""
        self.rounds.append(report)

    def tell(self, kind: str, message: str, *, warning: bool = False) -> None:
        """Note it."""
        self.told.append((kind, message))


class FakeLearner:
    """A learner as a coroutine: plain gradient descent under any regime.

    Args:
        start: its first vector.
        regime: how it works.
        gradient: of its own loss; None is that of ½ |x|².
        learning_rate: of its own steps, and told to servers.
        samples: behind each gradient.
        period_s: time that one gradient takes.
        step: gives the next vector from vector and gradient; None is plain gradient descent.
    """

    def __init__(
        self,
        start: Float32Array,
        regime: Regime = FREE,
        *,
        gradient: Gradient | None = None,
        learning_rate: float = 0.1,
        samples: int = 1,
        period_s: float = 0.01,
        step: Step | None = None,
    ) -> None:
        spec = BoardSpec(Layout((Entry("x", (start.size,)),)))
        self._region = SharedRegion.create(spec.nbytes, "learner")
        self.board = DaemonBoard(self._region, spec)
        self._own = LearnerBoard(self._region, spec)
        self.x = start.astype(np.float32)
        self.version = 10
        self.regime = regime
        self.gradient = gradient if gradient is not None else lambda x: x
        self.learning_rate = learning_rate
        self.samples = samples
        self.period_s = period_s
        self.told_learning_rate: float | None = None
        """With the last answer."""
        self.step = step if step is not None else self._descend
        self.updates = 0
        self.waited_s = 0.0
        self.history: list[Float32Array] = []
        """The vector after each update, when ``keep_history`` is set."""
        self.keep_history = False
        self.on_update: Callable[[int], None] = lambda _updates: None
        self._posts: asyncio.Queue[Post] = asyncio.Queue()
        self._answers: dict[int, asyncio.Future[AnswerKind]] = {}
        self._number = 0
        self._extra = np.zeros(start.size, np.float32)
        self._own.publish(self.x, None, self.version)

    async def next_post(self) -> Post:
        """Wait for the learner's next post."""
        return await self._posts.get()

    def answer(self, post: Post, kind: AnswerKind, learning_rate: float | None = None) -> None:
        """Let the learner go on."""
        self.told_learning_rate = learning_rate
        future = self._answers.get(post.number)
        if future is not None and not future.done():
            future.set_result(kind)

    async def run(self, updates: int | None = None) -> None:
        """Make ``updates`` updates (None: for ever)."""
        made = 0
        while updates is None or made < updates:
            await asyncio.sleep(self.period_s)
            await self._update()
            made += 1

    async def _update(self) -> None:
        self.absorb()
        gradient = self.gradient(self.x).astype(np.float32)
        if self.regime.sends == "gradients":
            await self._send(gradient)
        else:
            self.x = self.step(self.x, gradient)
        self.version += 1
        self.updates += 1
        self.publish()
        if self.regime.sends == "parameters" and self.updates % self.regime.every == 0:
            await self._ask(self._post("parameters", None))
            self.absorb()
            self.publish()
        if self.keep_history:
            self.history.append(self.x.copy())
        self.on_update(1)

    async def _send(self, gradient: Float32Array) -> None:
        post = self._post("gradients", gradient.copy())
        if self.regime.ahead:
            self._answers[post.number].add_done_callback(lambda done: self._late(post, done))
            while len(self._answers) > self.regime.ahead:
                await asyncio.wait(self._answers.values(), return_when=asyncio.FIRST_COMPLETED)
                await asyncio.sleep(0)
            gradient = gradient + self._extra
            self._extra[:] = 0
        else:
            kind = await self._ask(post)
            if kind == "replace" and post.vector is not None:
                gradient = post.vector.copy()
            elif kind == "add" and post.vector is not None:
                gradient = gradient + post.vector
            elif kind == "set":
                self.absorb()
                return
        if self.regime.steps:
            self.x = self.step(self.x, gradient)
        self.absorb()

    def _descend(self, x: Float32Array, gradient: Float32Array) -> Float32Array:
        told = self.told_learning_rate
        return x - np.float32(self.learning_rate if told is None else told) * gradient

    def _late(self, post: Post, done: asyncio.Future[AnswerKind]) -> None:
        del self._answers[post.number]
        if not done.cancelled() and done.result() == "add" and post.vector is not None:
            self._extra += post.vector

    def _post(self, kind: str, vector: Float32Array | None) -> Post:
        self._number += 1
        made = Post(
            self._number,
            "gradients" if kind == "gradients" else "parameters",
            self.version,
            self.samples,
            vector,
        )
        self._answers[made.number] = asyncio.get_running_loop().create_future()
        self._posts.put_nowait(made)
        return made

    async def _ask(self, post: Post) -> AnswerKind:
        began_s = asyncio.get_running_loop().time()
        try:
            return await self._answers[post.number]
        finally:
            self.waited_s += asyncio.get_running_loop().time() - began_s
            del self._answers[post.number]

    def absorb(self) -> None:
        """Take what was posted to the board."""
        self.board.flush()
        taken = self._own.take()
        if taken is None:
            return
        if taken.kind == "set":
            self.x = taken.vector.copy()
            self.version = taken.policy_version
        else:
            self.x = self.x + taken.vector
            self.version = max(self.version, taken.policy_version)
        self.publish()

    def publish(self) -> None:
        """Show the vector as it is."""
        self._own.publish(self.x, None, self.version)

    def drop_posts(self) -> None:
        """Wait for no answer any more: the strategy that was asked has ended."""
        while not self._posts.empty():
            self._posts.get_nowait()
        for answer in tuple(self._answers.values()):
            if not answer.done():
                answer.set_result("none")

    def now(self) -> Float32Array:
        """The vector with everything that was posted."""
        out = np.empty_like(self.x)
        self.board.now(out)
        return out

    def close(self) -> None:
        """Free the board."""
        self._region.close()


class SimNode:
    """A strategy, its fake node and its fake learner.

    Args:
        network: joins all nodes.
        number: makes id and address.
        config: the strategy.
        start: the learner's first vector.
        epoch: mode epoch.
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
        **learner: object,
    ) -> None:
        self.id = f"{number:032x}"
        self.address = Address("10.0.0.1", 7000 + number)
        self.config = config
        self.epoch = epoch
        self.transport = network.join(self.id, self.address)
        self.swarm = FakeSwarm(self.id, epoch)
        self.learner = FakeLearner(start, regime_of(config), **learner)  # type: ignore[arg-type]
        self.rng = random.Random(number)
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
        )

    async def start(self, updates: int | None = None, *, train: bool = True) -> None:
        """Serve, begin the strategy and (unless told not to) the learner."""
        await self.transport.start()
        for route in ROUTES:
            self.transport.serve(route, self._answer, max_vector_bytes=1 << 26)
        self.learner.on_update = self._updated
        await self.strategy.start()
        if train:
            self._training = asyncio.create_task(self.learner.run(updates), name=f"learner {self.id[-2:]}")

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
        self.learner.regime = regime_of(config)
        self.strategy = build(config, self.context())
        await self.strategy.start()

    def vanish(self) -> None:
        """Die as by a power cut: nothing is said, calls to it are refused from now on."""
        self.dead = True
        if self._training is not None:
            self._training.cancel()

    async def close(self) -> None:
        """End everything."""
        await self.strategy.stop(0.0)
        if self._training is not None:
            self._training.cancel()
            await asyncio.gather(self._training, return_exceptions=True)
        await self.transport.close()
        self.learner.close()

    def _updated(self, updates: int) -> None:
        self.swarm.steps += updates * self.learner.samples
        if self.swarm.says is not None:
            self.swarm.says = msgspec.structs.replace(self.swarm.says, policy_version=self.learner.version)
        self.strategy.updated(updates)

    async def _answer(self, incoming: Incoming) -> Reply:
        return await self.strategy.answer(incoming)


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
                taker.learner.board.post_set(node.learner.now(), None, node.learner.version)
                return True
        return False
