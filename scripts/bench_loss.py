"""How rounds go on when messages get lost: swarms in one process, on virtual time.

Four nodes on an in-memory network descend a bowl each: a way takes 10 to 30 ms, a learner's update 50 ms. A
share of all messages, answers too, is lost (``--fault loss``: nobody hears of it), or the connection breaks
under it (``--fault breaks``: the caller hears of it at once). Printed for each strategy and share: updates a
second of the median node, the same as a share of those without loss, the slowest node's; the 99th percentile
and the longest of the times without an update; how often a group had other members than before.

    python scripts/bench_loss.py --seeds 3 --seconds 60
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import statistics
from typing import NamedTuple

import numpy as np

from p2pdrl.config.strategy import (
    DsgdConfig,
    FederatedConfig,
    GradAverageConfig,
    ParamAverageConfig,
    ServerAsyncConfig,
    ServerSyncConfig,
    StrategyConfig,
)
from p2pdrl.testing.memory_transport import MemoryNetwork
from p2pdrl.testing.virtual_swarm import SimNode, SimSwarm
from p2pdrl.testing.virtual_time import VirtualTimeLoop

STRATEGIES: dict[str, StrategyConfig] = {
    "grad_average": GradAverageConfig(),
    "param_average": ParamAverageConfig(every_updates=4),
    "federated": FederatedConfig(every_updates=4),
    "server_sync": ServerSyncConfig(optimizer="sgd"),
    "server_sync_2": ServerSyncConfig(optimizer="sgd", servers=2),
    "server_async": ServerAsyncConfig(optimizer="sgd"),
    "dsgd": DsgdConfig(),
    "dsgd_gradients": DsgdConfig(exchanges="gradients"),
}
SIZE, WARM_S = 24, 5.0


class Seen(NamedTuple):
    """One swarm's run.

    Args:
        rates: updates a second of each node.
        gaps_s: times between two updates of a node, all nodes'.
        regrouped: groups with other members than before, counted at each node.
    """

    rates: list[float]
    gaps_s: list[float]
    regrouped: int


def add(swarm: SimSwarm, config: StrategyConfig, rng: np.random.Generator) -> SimNode:
    """One more node, with a bowl of its own."""
    target, start = (rng.standard_normal(SIZE).astype(np.float32) for _ in range(2))
    return swarm.add(config, start, gradient=lambda x: x - target, period_s=0.05)


def groups(swarm: SimSwarm) -> int:
    """How often people were told of a group with other members."""
    return sum(kind == "group" for node in swarm.nodes for kind, _ in node.swarm.told)


async def watch(config: StrategyConfig, fault: str, share: float, seed: int, options: Options) -> Seen:
    """Run one swarm."""
    loop, rng = asyncio.get_running_loop(), np.random.default_rng(seed)
    network = MemoryNetwork(random.Random(seed), delay_s=(0.01, 0.03))
    swarm = SimSwarm(network)
    for _ in range(options.nodes):
        add(swarm, config, rng)
    swarm.introduce()
    times_s: list[list[float]] = []
    for node in swarm.nodes:
        await node.start()
        mine: list[float] = []
        times_s.append(mine)
        node.learner.on_update = _noting(node, mine, loop)
    await asyncio.sleep(WARM_S)
    setattr(network, fault, share)
    before, began_s = groups(swarm), loop.time()
    await asyncio.sleep(options.seconds)
    setattr(network, fault, 0.0)
    regrouped, ended_s = groups(swarm) - before, loop.time()
    await swarm.close()
    inside = [[began_s, *(at for at in mine if at > began_s), ended_s] for mine in times_s]
    rates = [(len(mine) - 2) / options.seconds for mine in inside]
    return Seen(rates, [b - a for mine in inside for a, b in itertools.pairwise(mine)], regrouped)


def _noting(node: SimNode, times_s: list[float], loop: asyncio.AbstractEventLoop):  # type: ignore[no-untyped-def]
    told = node.learner.on_update

    def updated(updates: int) -> None:
        times_s.append(loop.time())
        told(updates)

    return updated


def run(config: StrategyConfig, fault: str, share: float, seed: int, options: Options) -> Seen:
    """The same on a loop of its own, whose time passes as soon as nothing is to be done."""
    loop = VirtualTimeLoop(waits=True)
    try:
        return loop.run_until_complete(watch(config, fault, share, seed, options))
    finally:
        loop.close()


class Options(argparse.Namespace):
    """What the command line says."""

    seeds: int
    seconds: float
    nodes: int
    fault: str
    only: list[str]
    shares: list[float]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=40.0, help="of virtual time, for each run")
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--fault", choices=["loss", "breaks"], default="loss")
    parser.add_argument("--only", nargs="*", choices=list(STRATEGIES), default=list(STRATEGIES))
    parser.add_argument("--shares", nargs="*", type=float, default=[0.0, 0.02, 0.05, 0.1])
    options = parser.parse_args(namespace=Options())
    print(f"{'strategy':16}{options.fault:>7}   upd/s  share  slowest   p99 s   max s  groups")
    for name in options.only:
        whole = 0.0
        for share in options.shares:
            runs = [
                run(STRATEGIES[name], options.fault, share, seed, options) for seed in range(options.seeds)
            ]
            rate = statistics.median(rate for seen in runs for rate in seen.rates)
            whole = whole or rate
            slowest = min(rate for seen in runs for rate in seen.rates)
            gaps_s = np.sort(np.concatenate([seen.gaps_s for seen in runs]))
            regrouped = sum(seen.regrouped for seen in runs)
            tail = f"{np.quantile(gaps_s, 0.99):8.2f}{gaps_s[-1]:8.2f}{regrouped:8}"
            relative = rate / whole if whole else float("nan")
            print(f"{name:16}{share:7.2f}{rate:8.2f}{relative:7.2f}{slowest:9.2f}{tail}", flush=True)


if __name__ == "__main__":
    main()
