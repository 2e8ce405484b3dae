"""Environment steps a second of one node by the number of its actor processes, where environments are slow.

Each environment sleeps at every step, so a learner that steps eight of them one after the other waits for
eight sleeps; actors wait side by side. Real nodes train CartPole by PPO on loopback, one after the other;
steps are counted over some seconds once all actors work. Printed: the median of the repeats, and each against
the first number of actors.

    python scripts/bench_actors.py --counts 0 1 2 4 --step-ms 2 --seconds 20 --repeats 3
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from support.local_swarm import LocalSwarm, Node

ENVIRONMENT = "support.slow_env:SlowCartPole-v0"
START_S = 120.0


def measure(count: int, options: argparse.Namespace) -> float:
    """Run a node with so many actors; return its environment steps a second."""
    settings = [
        f"node.actors.count={count}",
        f"node.actors.ahead={options.ahead}",
        "node.allow_import=true",
        f"task.env.id={ENVIRONMENT}",
        f"task.env.kwargs.step_s={options.step_ms / 1000}",
        f"task.env.num_envs={options.environments}",
        "task.algorithm.unroll_steps=32",
        "task.strategy.name=local",
    ]
    arguments = [word for setting in settings for word in ("--set", setting)]
    with LocalSwarm(1, arguments) as swarm:
        (node,) = swarm.nodes
        swarm.wait(lambda: works(node, count), START_S, f"{count} actors work")
        before, began_s = node.status()["env_steps"], time.monotonic()
        time.sleep(options.seconds)
        return float((node.status()["env_steps"] - before) / (time.monotonic() - began_s))


def works(node: Node, count: int) -> bool:
    """Tell whether all actors act, and the learner has made some updates."""
    status = node.status()
    acting = sum(row["running"] for row in status.get("actors") or [])
    return acting == count and status.get("updates", 0) >= 2 + count


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 1, 2, 4], help="numbers of actors")
    parser.add_argument("--step-ms", type=float, default=2.0, help="that each environment sleeps at a step")
    parser.add_argument("--environments", type=int, default=8, help="of the learner, all together")
    parser.add_argument("--ahead", type=int, default=0, help="node.actors.ahead")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")) if part
    )
    runs: dict[int, list[float]] = {count: [] for count in options.counts}
    for repeat in range(options.repeats):
        for count in options.counts:
            runs[count].append(measure(count, options))
            print(f"repeat {repeat + 1}: {count} actors: {runs[count][-1]:.0f} steps/s", file=sys.stderr)
    medians = {count: statistics.median(rates) for count, rates in runs.items()}
    if options.json:
        print(json.dumps({"medians": medians, "runs": runs}))
        return 0
    base = medians[options.counts[0]]
    for count, rate in medians.items():
        print(f"{count} actors: {rate:8.0f} steps/s   {rate / base:5.2f} ×")
    return 0


if __name__ == "__main__":
    sys.exit(main())
