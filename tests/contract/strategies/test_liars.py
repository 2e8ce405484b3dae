"""One member of four lies in each vector that it sends: with clipping the others learn on.

All nodes learn the same noisy target. How far honest ones stay from it is compared with a swarm in which
nobody lies, and with the way that they had to go.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pytest

from p2pdrl.config.strategy import (
    AdpsgdConfig,
    DsgdConfig,
    GalaConfig,
    GradAverageConfig,
    ParamAverageConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    SgpConfig,
    StrategyConfig,
)
from p2pdrl.strategies.allreduce.averager import ReduceRequest
from p2pdrl.strategies.gossip.push import PushHead
from p2pdrl.strategies.servers.messages import GradientPush
from p2pdrl.testing.virtual_swarm import SimNode
from p2pdrl.transport.framing import join_views
from p2pdrl.transport.protocol import Incoming, Reply

from .crowd import SIZE, Crowd, Sent
from .promises import Case

pytestmark = pytest.mark.looptime

QUICK = {"compression": "none", "mixing": "clipped", "deadline_s": 2.0}
SERVED = {**QUICK, "optimizer": "sgd", "pinned": (f"{0:032x}",)}
CONFIGS: dict[str, tuple[StrategyConfig, str]] = {
    "adpsgd": (AdpsgdConfig(**QUICK), "exchange"),
    "dsgd": (DsgdConfig(**QUICK, topology="complete"), "neighbour"),
    "sgp": (SgpConfig(**QUICK), "push"),
    "gala": (GalaConfig(**QUICK, partners="exponential"), "push"),
    "server_sync": (ServerSyncConfig(**SERVED), "push"),
    "server_async": (ServerAsyncConfig(**SERVED), "push"),
    "grad_average": (GradAverageConfig(**QUICK), "reduce"),
    "param_average": (ParamAverageConfig(**QUICK, every_updates=2), "reduce"),
}
ATTACKS = ("flip", "x10", "x1000", "noise", "constant", "counts")
BOTH_WAYS = ("exchange", "neighbour")
NODES = 4
UNTIL_S = 25.0
FAR = 30.0


@dataclass
class Liar:
    """What one node sends instead."""

    attack: str
    sent: int = 0

    def lie(self, meta: bytes, vector: bytes) -> tuple[bytes, bytes]:
        if len(vector) != 4 * SIZE:
            return meta, vector
        true = np.frombuffer(vector, np.float32).astype(np.float64)
        self.sent += 1
        lies: dict[str, Callable[[], Any]] = {
            "flip": lambda: -true,
            "counts": lambda: -true,
            "x10": lambda: 10 * true,
            "x1000": lambda: 1000 * true,
            "noise": lambda: 100 * np.random.default_rng(self.sent).standard_normal(SIZE),
            "constant": lambda: np.full(SIZE, -100.0),
        }
        false = np.asarray(lies[self.attack](), np.float32)
        return self._head(meta), false.tobytes()

    def _head(self, meta: bytes) -> bytes:
        if self.attack == "counts":
            for kind, name in ((ReduceRequest, "weight"), (GradientPush, "weight"), (PushHead, "mass")):
                try:
                    head = msgspec.msgpack.decode(meta, type=kind)
                except msgspec.DecodeError:
                    continue
                return msgspec.msgpack.encode(msgspec.structs.replace(head, **{name: 1e6}))
        return meta


async def trained(name: str, attack: str | None) -> tuple[float, list[SimNode]]:
    """Train; return how far honest nodes stay from the target at most, and those nodes."""
    config, route = CONFIGS[name]
    async with Crowd(Case(config, route), 0, seed=3) as crowd:
        for _ in range(NODES):
            crowd.add()
        crowd.swarm.introduce()
        liar = Liar(attack or "")
        lying: list[SimNode] = []
        for number, node in enumerate(crowd.nodes):
            noise = np.random.default_rng(number)
            node.learner.gradient = lambda x, noise=noise: (
                x - FAR / SIZE**0.5 + 0.3 * noise.standard_normal(SIZE).astype(np.float32)
            )
            node.learner.board.post_set(np.zeros(SIZE, np.float32), None, 10)
            if attack is not None:
                lies_of(node, crowd, route, liar, lying)
        await crowd.start()
        await asyncio.sleep(UNTIL_S)
        honest = [node for node in crowd.nodes if node not in lying]
        if attack is not None:
            assert len(lying) == 1
            assert liar.sent > 5
        target = np.full(SIZE, FAR / SIZE**0.5)
        far = max(float(np.linalg.norm(node.learner.now() - target)) for node in honest)
        return far, honest


def lies_of(node: SimNode, crowd: Crowd, route: str, liar: Liar, lying: list[SimNode]) -> None:
    """Have ``node`` lie if it is the last one, or of those who send parts to an owner the first."""

    def lies() -> bool:
        if not lying and (route == "reduce" or node is crowd.nodes[-1]):
            lying.append(node)
        return node in lying

    def tampered(sent: Sent) -> Sent:
        if sent.route != route or not sent.vector or not lies():
            return sent
        meta, vector = liar.lie(sent.meta, sent.vector)
        return sent._replace(meta=meta, vector=vector)

    async def answer(incoming: Incoming) -> Reply:
        reply = await node.strategy.answer(incoming)
        vector = join_views(reply.vector)
        if not vector or route not in BOTH_WAYS or not lies():
            return reply
        meta, told = liar.lie(reply.meta, bytes(vector))
        return Reply(meta, memoryview(told), on_end=reply.on_end)

    node.transport.tamper = tampered
    node.answer = answer


@pytest.mark.parametrize(
    ("name", "attack"),
    [
        pytest.param(
            name,
            attack,
            marks=[]
            if attack == "flip" and name in ("adpsgd", "server_sync", "param_average")
            else [pytest.mark.slow],
        )
        for attack in ATTACKS
        for name in CONFIGS
    ],
)
async def test_honest_nodes_learn_on(name: str, attack: str):
    far, honest = await trained(name, attack)
    assert far < 0.1 * FAR
    assert all(set(node.swarm.strikes) <= {f"{NODES - 1:032x}"} for node in honest)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
async def test_without_a_liar_clipping_costs_nothing(name: str):
    far, honest = await trained(name, None)
    assert far < 0.05 * FAR
    assert not any(node.swarm.strikes for node in honest)


@pytest.mark.parametrize(
    "name", ["adpsgd", *(pytest.param(one, marks=pytest.mark.slow) for one in ("dsgd", "server_sync"))]
)
async def test_without_clipping_one_liar_ruins_all(name: str, monkeypatch: pytest.MonkeyPatch):
    config, route = CONFIGS[name]
    monkeypatch.setitem(CONFIGS, name, (msgspec.structs.replace(config, mixing="mean"), route))
    far, _ = await trained(name, "x1000" if route in ("push", "reduce") else "flip")
    assert not far < 0.3 * FAR
