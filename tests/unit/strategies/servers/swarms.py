"""Swarms with parameter servers for the tests beside this one: grown, and looked at."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

import msgspec
import numpy as np

from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.strategies.servers.messages import Pull, Pulled
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

SIZE = 10
COMMON = {"compression": "none", "servers": 2, "optimizer": "sgd", "deadline_s": 2.0}
"""Options, but for the learning rate."""


async def grow(
    sim: SimSwarm, count: int, options: StrategyConfig, *, period_s: float = 0.05, **learner: object
) -> list[SimNode]:
    """Start ``count`` nodes, and give them a second to find their servers."""
    rng = np.random.default_rng(5)
    for _ in range(count):
        sim.add(options, rng.normal(size=SIZE), period_s=period_s, **learner)
    sim.introduce()
    for node in sim.nodes:
        await node.start()
    await asyncio.sleep(1.0)
    return sim.nodes


def servers_of(nodes: list[SimNode]) -> tuple[list[SimNode], list[SimNode]]:
    """The serving nodes, in the order of the shards, and the others."""
    names = next(n.strategy.facts["servers"] for n in nodes if "servers" in n.strategy.facts).split(", ")
    by_id = {node.id: node for node in nodes}
    return [by_id[name] for name in names], [node for node in nodes if node.id not in names]


class Held(NamedTuple):
    """What a server says that it holds, to whoever pulls it.

    Attributes:
        vectors: numbers for each entry: the parameter, and the optimizer's state.
    """

    span: tuple[int, int]
    version: int
    parameters: np.ndarray
    scalars: dict[str, float]
    vectors: float


async def pulled(server: SimNode, asker: SimNode) -> Held:
    """Pull the shard that a node serves, with its optimizer's state."""
    first, last = map(int, str(server.strategy.facts["shard"]).split(" to "))
    came: list[bytearray] = []

    def room(_: bytes, nbytes: int) -> memoryview:
        came.append(bytearray(nbytes))
        return memoryview(came[-1])

    answer = await asker.transport.call(
        server.address,
        server.id,
        "shard",
        msgspec.msgpack.encode(Pull(server.group.view.key, first, last + 1, 0, state=True)),
        into=room,
        deadline_s=3.0,
    )
    head = msgspec.msgpack.decode(answer.meta, type=Pulled)
    parameters = np.frombuffer(came[-1], np.float32)[: last + 1 - first]
    vectors = len(came[-1]) / parameters.nbytes
    return Held((first, last), head.version, parameters, head.scalars, vectors)


async def progress(nodes: list[SimNode], seconds: float) -> list[int]:
    """Updates of each learner within ``seconds``."""
    before = [node.learner.updates for node in nodes]
    await asyncio.sleep(seconds)
    return [node.learner.updates - then for node, then in zip(nodes, before, strict=True)]
