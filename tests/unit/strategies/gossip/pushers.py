"""Nodes that push, for the tests beside this one: started, kept quiet, pushed from by hand."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import msgspec
import numpy as np

from p2pdrl.config.strategy import SgpConfig
from p2pdrl.strategies.gossip.push import PushAnswer, PushHead
from p2pdrl.strategies.registry import build
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm

D = 24
LONG = 600_000
"""Elements of vectors that are worked on in threads."""


class Pushers:
    """Learners that stand still; every so often their strategies hear of an update, and so push.

    Args:
        nodes: whose.
        every_s: time between two updates.
    """

    def __init__(self, nodes: list[SimNode], every_s: float = 0.1) -> None:
        self._nodes, self._every_s = nodes, every_s
        self._task = asyncio.create_task(self._run(), name="pushers")

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while True:
            for node in self._nodes:
                node.strategy.updated(1)
            await asyncio.sleep(self._every_s)


async def start(swarm: SimSwarm, **options) -> None:
    for node in swarm.living:
        await node.start(**options)


def silence(node: SimNode) -> None:
    """Let a node that isn't started yet never begin a push by itself."""
    node.strategy = build(node.config, replace(node.context(), start_at_members=1000))


async def quiet(swarm: SimSwarm) -> list[SimNode]:
    """Nobody pushes by itself, and learners stand still."""
    for node in swarm.nodes:
        silence(node)
    await start(swarm, train=False)
    return swarm.nodes


async def push(sender: SimNode, target: SimNode, number: int = 1, vector=None, **changes) -> PushAnswer:
    """Push by hand."""
    head_of = {key: changes.pop(key) for key in ("mass", "wire", "content") if key in changes}
    summary = msgspec.structs.replace(sender.swarm.says, **changes)
    head = PushHead("boot", number, **({"wire": "float32", "summary": summary, "mass": 0.5} | head_of))
    vector = sender.learner.now() if vector is None else vector
    answer = await sender.transport.call(
        target.address,
        target.id,
        "push",
        msgspec.msgpack.encode(head),
        vector=vector.data.cast("B"),
        deadline_s=1.0,
        lane="bulk",
    )
    return msgspec.msgpack.decode(answer.meta, type=PushAnswer)


def sgp(**options) -> SgpConfig:
    """SGP that pushes after each update."""
    return SgpConfig(**({"compression": "none", "every_updates": 1, "min_interval_s": 0.05} | options))


def totals(nodes: list[SimNode]) -> tuple[float, np.ndarray]:
    """Σw with what is under way, and Σw·z without."""
    weight = sum(node.strategy.weight + node.strategy.under_way for node in nodes)
    stands = sum(node.strategy.weight * node.learner.now().astype(np.float64) for node in nodes)
    return weight, stands


def vectors(nodes: list[SimNode]) -> np.ndarray:
    return np.array([node.learner.now() for node in nodes], np.float64)


def spread(nodes: list[SimNode]) -> float:
    """sqrt(mean over nodes of ‖x_i − x̄‖²)."""
    xs = vectors(nodes)
    return float(np.sqrt(np.square(xs - xs.mean(axis=0)).sum(axis=1).mean()))


async def settle(swarm: SimSwarm, *pushers: Pushers) -> None:
    """Begin nothing new, and wait until everybody knows what became of its pushes."""
    for one in pushers:
        await one.stop()
    for node in swarm.nodes:
        await node.pause()
    for _ in range(400):
        await asyncio.sleep(0.1)
        if not any(node.strategy.under_way for node in swarm.living):
            return
    raise AssertionError("something is under way for ever")
