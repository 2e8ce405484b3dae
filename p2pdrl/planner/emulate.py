"""The real strategies of a small swarm in virtual time: nothing of the protocol is modelled.

Each node is a `SimNode`: the strategy as `registry` builds it, over a transport in memory, with a learner
whose updates take what its machine needs. Calls take what the description's links and processors need, and
vectors have at most `MOST_ENTRIES` entries, whose bytes count for the description's size in proportion.

An update costs about a millisecond of real time, so that `simulate` predicts large swarms with models; tests
hold those models against this.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import msgspec
import numpy as np

from p2pdrl.config.strategy import GalaConfig, PipelineConfig, SgpConfig, StrategyConfig, StromConfig
from p2pdrl.errors import UsageError
from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.forecast import ENTRIES, Forecast, Replicas, Statistics, forecast_of
from p2pdrl.planner.network import Network, Processors
from p2pdrl.strategies.protocol import RoundReport
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm
from p2pdrl.testing.virtual_time import run_in_virtual_time

__all__ = ["MOST_NODES", "emulate"]

MOST_NODES = 16
START_S = 3.0
"""Views are agreed on, bases taken and servers filled by then."""
MOST_ENTRIES = 1 << 14
"""Their bytes count for those of a longer vector; small enough that no thread is needed, for which nobody can
wait in virtual time."""
NEUTRAL = ("answered", "known", "unchanged", "stale", "ok", "empty")
"""Outcomes that are neither a round of this node nor a loss."""
LEARNING_RATE = 0.1


class LinkedNetwork(MemoryNetwork):
    """A network in memory whose messages take what links and processors take.

    Args:
        network: when a message arrives.
        cpu: when a daemon's work is done.
        scale: bytes that one byte of a vector stands for.
        head_bytes: of a message beside its vector.
    """

    def __init__(self, network: Network, cpu: Processors, *, scale: float, head_bytes: float) -> None:
        super().__init__()
        self._links, self._cpu, self._scale, self._head_bytes = network, cpu, scale, head_bytes

    async def travel(self, source: str, target: str, vector_nbytes: int = 0) -> bool:
        """Wait as long as sender, links and receiver take; tell whether the message arrives."""
        loop, nbytes = asyncio.get_running_loop(), self._scale * vector_nbytes
        one, other = int(source, 16), int(target, 16)
        ready_s = self._cpu.work(one, loop.time(), calls=0.5, nbytes=nbytes)
        arrived_s = self._links.send(one, other, nbytes, self._head_bytes, ready_s).arrived_s
        await asyncio.sleep(arrived_s - loop.time())
        done_s = self._cpu.work(other, loop.time(), calls=0.5, nbytes=nbytes)
        await asyncio.sleep(done_s - loop.time())
        return not self.severed(source, target)


class EmulatedSwarm:
    """Real strategies, and what is counted of them.

    Args:
        swarm: at most `MOST_NODES` nodes, without churn.
        strategy: what it runs.
        seed: of everything random.
    """

    def __init__(self, swarm: SwarmDescription, strategy: StrategyConfig, seed: int) -> None:
        self._swarm, self._strategy, self._rng = swarm, strategy, random.Random(seed)
        self._size = min(swarm.size, MOST_ENTRIES)
        self._learners = max(1, strategy.learner_mode.learners)
        self._done = "pushed" if isinstance(strategy, SgpConfig | GalaConfig | StromConfig) else "ok"
        self.statistics = Statistics(swarm.nodes)
        self.replicas = Replicas(swarm.nodes, swarm.nodes, seed)
        self._heard = bytearray(swarm.nodes)
        self._fresh = bytearray(swarm.nodes)

    async def run(self, seconds: float) -> Forecast:
        """Start all nodes at once, and count for so many seconds of the loop's time, from `START_S` on."""
        swarm, loop = self._swarm, asyncio.get_running_loop()
        network = LinkedNetwork(
            Network(swarm, swarm.nodes, self.statistics, self._rng),
            Processors(swarm.costs, swarm.nodes),
            scale=swarm.size / self._size,
            head_bytes=swarm.costs.call_bytes / 2.0,
        )
        nodes = SimSwarm(network)
        for number in range(swarm.nodes):
            self._add(nodes, number)
        nodes.introduce()
        if isinstance(self._strategy, StromConfig):  # whose nodes begin equal
            self.replicas.alike(list(range(swarm.nodes)), self.replicas.x_NE[0].copy(), 0.0)
        try:
            for number, node in enumerate(nodes.nodes):
                await node.start(train=False)
                self._count(number, node)
                node.train()
            await asyncio.sleep(START_S - loop.time())
            self.statistics.reset()
            waited_s = [node.learner.waited_s for node in nodes.nodes]
            await asyncio.sleep(seconds)
            for number, node in enumerate(nodes.nodes):
                self.statistics.waited_s[number] = node.learner.waited_s - waited_s[number]
                self.statistics.lived_s[number] = seconds
            return forecast_of(swarm, self._strategy, self.statistics, self.replicas, seconds)
        finally:
            await nodes.close()

    def _add(self, nodes: SimSwarm, number: int) -> None:
        start = np.zeros(self._size, np.float32)
        if not isinstance(self._strategy, StromConfig):
            start[:ENTRIES] = self.replicas.x_NE[number, : self._size]
        node = nodes.add(
            self._strategy,
            start,
            gradient=self._gradient,
            learning_rate=LEARNING_RATE,
            period_s=self._periods(number).__next__,
            request_s=self._swarm.costs.post_s,
            absorbs_first=True,
        )
        node.rng.seed(self._rng.random())

    def _periods(self, node: int) -> Iterator[float]:
        """Seconds of each update; a node begins somewhere within its first one."""
        machine, part = self._swarm.machine(node), self._rng.random()
        while True:
            jitter = 1.0 + machine.jitter * (2.0 * self._rng.random() - 1.0)
            yield part * machine.update_s * machine.factor / self._learners * jitter
            part = 1.0

    def _gradient(self, x: Float32Array) -> Float32Array:
        """Zero, so that mixing alone moves vectors; under Strom, τ in as many entries as are to be named."""
        gradient = np.zeros_like(x)
        if isinstance(self._strategy, StromConfig):
            named = self._rng.sample(range(x.size), max(1, round(self._swarm.moved * x.size)))
            gradient[named] = 1.001 * self._strategy.tau / LEARNING_RATE
        return gradient

    def _count(self, number: int, node: SimNode) -> None:
        """Count a node's updates and rounds, as they are told to the node."""
        statistics = self.statistics
        tell_node, tell_swarm = node.learner.on_update, node.swarm.round

        def updated(updates: int) -> None:
            statistics.updates[number] += updates
            statistics.fresh[number] += self._fresh[number]
            self._fresh[number], self._heard[number] = self._heard[number], False
            tell_node(updates)

        def ended(report: RoundReport) -> None:
            others = any(one.peer != node.id or report.served for one in report.merged)
            self._heard[number] |= others and self._swarm.nodes > 1
            for staleness in report.staleness(node.id):
                statistics.merged(max(0, staleness))
            if others and not self.replicas.settled:
                self.replicas.x_NE[number] = node.learner.now()[:ENTRIES]
                if report.outcome == "ok":
                    self.replicas.changed(asyncio.get_running_loop().time())
            if report.outcome == self._done:
                statistics.round(number, report.outcome, report.seconds)
            elif report.outcome not in NEUTRAL:
                statistics.loss(number, report.outcome)
            says = node.swarm.says
            if says is not None:
                version = node.learner.board.policy_version
                node.swarm.says = msgspec.structs.replace(says, policy_version=version)
            tell_swarm(report)

        node.learner.on_update = updated
        node.swarm.round = ended  # type: ignore[method-assign]


def emulate(
    swarm: SwarmDescription, strategy: StrategyConfig, *, seconds: float = 60.0, seed: int = 0
) -> Forecast:
    """Run a small swarm's real strategies; figures are of so many virtual seconds once they have started.

    Raises:
        UsageError: the swarm is too large, or nodes come and go, or the strategy is a pipeline.
    """
    churn = swarm.churn
    if swarm.nodes > MOST_NODES or churn.kills_per_minute or churn.joins_per_minute:
        raise UsageError(f"real strategies can be run for at most {MOST_NODES} nodes, without churn")
    if isinstance(strategy, PipelineConfig):
        raise UsageError("a pipeline's speed isn't told by a swarm's description: see `p2pdrl pipeline plan`")
    return run_in_virtual_time(EmulatedSwarm(swarm, strategy, seed).run(seconds))
