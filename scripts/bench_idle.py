"""What a node costs that only keeps in touch: processor time, bytes and descriptors of paused daemons.

Swarms of several sizes on loopback, everybody paused. Per node and second: processor time of the daemon
itself (under 1 % of a core is the aim), bodies of messages sent and received (flat in the number of
nodes is the aim), and open descriptors. Processor time counts, so that a busy machine does no harm.

    python scripts/bench_idle.py --nodes 4 12 24 --seconds 60
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import psutil

from support.local_swarm import LocalSwarm, Node

ARGUMENTS = ["--set=task.network.hidden=[8]", "--set=task.env.num_envs=1", "--set=node.checkpoint.every_s=0"]


def daemon_cpu_s(node: Node) -> float:
    """Processor time of the daemon without its children."""
    times = psutil.Process(node.process.pid).cpu_times()
    return times.user + times.system


def measure(nodes: int, settle_s: float, seconds: float, mode: str) -> dict[str, float]:
    """Run one swarm; return medians over its nodes."""
    arguments = [*ARGUMENTS, f"--set=task.strategy.name={mode}"]
    with LocalSwarm(nodes, arguments) as swarm:
        swarm.ready(60.0 + 20.0 * nodes)
        swarm.nodes[0].client.post("/v1/pause?scope=swarm")
        swarm.wait(
            lambda: all(node.status().get("state") == "paused" for node in swarm.living),
            60.0,
            "all are paused",
        )
        time.sleep(settle_s)
        status = {node.name: node.status() for node in swarm.nodes}
        began, cpu_s = time.monotonic(), {node.name: daemon_cpu_s(node) for node in swarm.nodes}
        time.sleep(seconds)
        took_s = time.monotonic() - began
        shares = [(daemon_cpu_s(node) - cpu_s[node.name]) / took_s for node in swarm.nodes]
        files = [psutil.Process(node.process.pid).num_fds() for node in swarm.nodes]
        rates: dict[str, list[float]] = {"bytes_out": [], "bytes_in": []}
        for node in swarm.nodes:
            now = node.status()
            for name, found in rates.items():
                found.append((now[name] - status[node.name][name]) / took_s)
    return {
        "nodes": nodes,
        "cpu_percent_of_a_core": 100 * statistics.median(shares),
        "bytes_per_s": statistics.median(map(sum, zip(*rates.values(), strict=True))),
        "descriptors": statistics.median(files),
        "most_descriptors": max(files),
    }


def main() -> None:
    """Read the arguments, measure, print one line of JSON for each size."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 12, 24])
    parser.add_argument("--settle-s", type=float, default=20.0, help="from the pause to the measurement")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the measurement")
    parser.add_argument("--mode", default="adpsgd", help="strategy that is in force while all are paused")
    given = parser.parse_args()
    for count in given.nodes:
        figures = measure(count, given.settle_s, given.seconds, given.mode)
        print(json.dumps({name: round(value, 2) for name, value in figures.items()}), flush=True)


if __name__ == "__main__":
    main()
