"""A swarm under test: nodes with a target each, and a transport that a test may look at or tamper with."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.errors import PeerRefusedError, TransportError
from p2pdrl.strategies.registry import build
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm
from p2pdrl.transport.protocol import Address, Answer

from .promises import Case

SIZE = 16
PERIOD_S = 0.1
STRIKES = 3


class Sent(NamedTuple):
    """A message that a node sent."""

    to: Address
    peer: str | None
    route: str
    meta: bytes
    vector: bytes


class Wire:
    """A node's transport, through which tests look and tamper.

    Args:
        transport: the true one.
    """

    def __init__(self, transport: Any) -> None:
        self._transport = transport
        self.sent: list[Sent] = []
        self.tamper: Callable[[Sent], Sent] = lambda sent: sent
        self.on_call: Callable[[Sent], None] = lambda sent: None
        self.statuses: list[int] = []
        """With which the calls that `tamper` changed were answered: 0 for a good answer, -1 for none."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    async def call(
        self, to: Address, peer: str | None, route: str, meta: bytes, *, vector: Any = None, **options: Any
    ) -> Answer:
        honest = Sent(to, peer, route, meta, b"" if vector is None else bytes(vector))
        sent = self.tamper(honest)
        self.sent.append(sent)
        self.on_call(sent)
        body = memoryview(sent.vector) if sent.vector else None
        with noting(self.statuses if sent is not honest else []):
            return await self._transport.call(
                sent.to, sent.peer, sent.route, sent.meta, vector=body, **options
            )

    async def say(self, sent: Sent, deadline_s: float = 5.0) -> int:
        """Send a message by hand; return the status of its refusal, 0 for an answer, -1 for none."""
        statuses: list[int] = []
        with contextlib.suppress(TransportError), noting(statuses):
            await self._transport.call(
                sent.to,
                sent.peer,
                sent.route,
                sent.meta,
                vector=memoryview(sent.vector) if sent.vector else None,
                into=lambda _, nbytes: memoryview(bytearray(nbytes)),
                deadline_s=deadline_s,
            )
        return statuses[0]


@contextlib.contextmanager
def noting(statuses: list[int]) -> Any:
    """Note how a call ends."""
    try:
        yield
        statuses.append(0)
    except PeerRefusedError as refused:
        statuses.append(refused.status)
        raise
    except TransportError:
        statuses.append(-1)
        raise


class Crowd:
    """Nodes with one strategy; all random numbers come from ``seed``.

    Args:
        case: the strategy.
        nodes: how many.
        seed: of targets, starts and the network.
        learning_rate: of the learners; 0: they learn nothing.
    """

    def __init__(self, case: Case, nodes: int = 4, *, seed: int = 0, learning_rate: float = 0.05) -> None:
        self.case = case
        self.rng = np.random.default_rng(seed)
        self.network = MemoryNetwork(random.Random(seed), delay_s=(0.001, 0.003))
        self.swarm = SimSwarm(self.network)
        self.learning_rate = learning_rate
        self.strikes = STRIKES
        """Poisoned messages after which a node quarantines a peer."""
        for _ in range(nodes):
            self.add()
        self.swarm.introduce()

    @property
    def nodes(self) -> list[SimNode]:
        return self.swarm.nodes

    @property
    def living(self) -> list[SimNode]:
        return self.swarm.living

    def add(self, config: StrategyConfig | None = None, *, epoch: int = 1) -> SimNode:
        """One more node, with a `Wire`, that quarantines who poisons it too often."""
        target = self.rng.standard_normal(SIZE).astype(np.float32)
        learner = self.case.learner if self.learning_rate else {"learning_rate": self.case.still_rate}
        node = self.swarm.add(
            self.case.config if config is None else config,
            self.rng.standard_normal(SIZE).astype(np.float32),
            epoch=epoch,
            gradient=lambda x: x - target,
            **{"learning_rate": self.learning_rate, "period_s": PERIOD_S, **learner},
        )
        node.target = target
        node.times = [0.0]
        node.transport = Wire(node.transport)
        node.strategy = build(node.config, node.context())
        strike = node.swarm.strike

        def struck(peer: str, why: str) -> None:
            strike(peer, why)
            if node.swarm.strikes.count(peer) >= self.strikes:
                node.swarm.held.add(peer)

        node.swarm.strike = struck
        return node

    async def start(self, nodes: list[SimNode] | None = None, **options: Any) -> None:
        for node in self.nodes if nodes is None else nodes:
            await node.start(**options)
            told = node.learner.on_update
            node.learner.on_update = lambda n, node=node, told=told: (node.times.append(now()), told(n))

    async def until(self, happens: Callable[[], bool], within_s: float = 20.0) -> None:
        """Wait for ``happens()``."""
        began_s = now()
        while not happens():
            assert now() - began_s < within_s, ("it didn't happen in time", self.outcomes())
            await asyncio.sleep(0.02)

    async def rounds(self, more: int, nodes: list[SimNode] | None = None, within_s: float = 20.0) -> None:
        """Wait until each of ``nodes`` had ``more`` more rounds that moved it."""
        nodes = self.living if nodes is None else nodes
        want = {node.id: moved(node, self.case) + more for node in nodes}
        await self.until(lambda: all(moved(node, self.case) >= want[node.id] for node in nodes), within_s)

    def xs(self, nodes: list[SimNode] | None = None) -> np.ndarray:
        nodes = self.living if nodes is None else nodes
        return np.array([node.learner.now() for node in nodes], np.float64)

    def mean(self, nodes: list[SimNode] | None = None) -> np.ndarray:
        return self.xs(nodes).mean(axis=0)

    def goal(self, nodes: list[SimNode] | None = None) -> np.ndarray:
        return np.mean([node.target for node in nodes or self.living], axis=0, dtype=np.float64)

    def spread(self, nodes: list[SimNode] | None = None) -> float:
        """How far the vectors are from their mean."""
        return apart(self.xs(nodes))

    def most(self) -> float:
        """No entry of an honest vector is greater than this."""
        mine = np.abs(self.xs()).max()
        if not self.case.still_rate:
            return float(mine)
        return float(1.5 * max(mine, *(np.abs(node.target).max() for node in self.nodes)))

    def scale(self, nodes: list[SimNode] | None = None) -> float:
        """How far the targets are from theirs."""
        return apart(np.array([node.target for node in nodes or self.living], np.float64))

    def outcomes(self) -> list[dict[str, int]]:
        return [node.strategy.outcomes for node in self.nodes]

    async def __aenter__(self) -> Crowd:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.swarm.close()


def now() -> float:
    return asyncio.get_running_loop().time()


def apart(xs: np.ndarray) -> float:
    return float(np.linalg.norm(xs - xs.mean(axis=0), axis=1).mean())


def moved(node: SimNode, case: Case) -> int:
    """Rounds in which the node's vector was moved by its strategy."""
    return sum(node.strategy.outcomes.get(outcome, 0) for outcome in case.moved)


def stall_s(node: SimNode, since_s: float) -> float:
    """Longest time between two updates of the node's learner that ended after ``since_s``, up to now."""
    before = max((t for t in node.times if t <= since_s), default=0.0)
    times = [before, *(t for t in node.times if t > since_s), now()]
    return max(b - a for a, b in itertools.pairwise(times))


def serving(node: SimNode) -> bool:
    """Whether the node is a server."""
    return "server" in str(node.strategy.facts.get("role", ""))


def victim(crowd: Crowd) -> SimNode:
    """Whom to lose: a server where there are any."""
    if crowd.case.serves:
        return next(node for node in crowd.nodes if serving(node))
    return crowd.nodes[1]
