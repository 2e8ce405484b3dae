"""Environment steps a second by the number of actor processes of one node, or of nodes that only act.

Each environment sleeps at every step, so a learner that steps eight of them one after the other waits for
eight sleeps; actors wait side by side. Real nodes on loopback, one swarm after the other; steps are counted
over some seconds once all actors work. Printed are the medians of the repeats, each against the first number,
and the processor seconds of all processes in a second.

Of one node, which learns by PPO; `--inference` has the inference process act for its actors, and `--pictures`
the Nature CNN look at stacks of 84 x 84 pictures:

    python scripts/bench_actors.py --counts 0 1 2 4 --step-ms 2 --seconds 20 --repeats 3
    python scripts/bench_actors.py --counts 1 2 4 8 --step-ms 0 --inference local batched --pictures

Of one node that learns, and others that act for it, by IMPALA or by Ape-X with shards of the replay:

    python scripts/bench_actors.py --nodes 1 2 4 --step-ms 5 --algorithm impala
    python scripts/bench_actors.py --nodes 1 2 4 --step-ms 5 --algorithm apex_dqn --replays 2
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import NamedTuple

from support.local_swarm import LocalSwarm, Node

POLE, PICTURES = "support.slow_env:SlowCartPole-v0", "support.slow_env:SlowPictures-v0"
START_S = 240.0
NODE_IS_UP_S = 60.0


class Rates(NamedTuple):
    """What was measured.

    Args:
        steps: environment steps of all nodes in a second.
        updates: of the learner.
        cpu: processor seconds of all processes in a second.
    """

    steps: float
    updates: float
    cpu: float


def common(options: argparse.Namespace) -> list[str]:
    """Return what all nodes are told."""
    settings = [
        *own(options),
        f"task.env.id={environment(options)}",
        f"task.env.kwargs.step_s={options.step_ms / 1000}",
        f"task.env.num_envs={options.environments}",
        "task.strategy.name=local",
        "task.stop.env_steps=1000000000",
        "task.evaluation.every=0",
        *options.sets,
    ]
    return [word for setting in settings for word in ("--set", setting)]


def environment(options: argparse.Namespace) -> str:
    """Return the id of what is acted in."""
    return PICTURES if options.pictures else POLE


def own(options: argparse.Namespace) -> list[str]:
    """Return what nodes are told that get the task from others."""
    return [f"node.actors.ahead={options.ahead}", f'node.imports=["{environment(options)}"]']


def measured(swarm: LocalSwarm, seconds: float) -> Rates:
    """Count over so many seconds."""
    time.sleep(2.0)
    before = swarm.snapshot()
    time.sleep(seconds)
    done = swarm.snapshot() - before
    return Rates(
        done.steps_per_s, sum(done.updates.values()) / done.seconds, sum(done.cpu_s.values()) / done.seconds
    )


def one_node(count: int, inference: str, options: argparse.Namespace) -> Rates:
    """Run a node with so many actors."""
    settings = [f"node.actors.count={count}", "task.algorithm.unroll_steps=32"]
    if count:
        settings += [
            f"node.actors.inference={inference}",
            f"node.inference.batch_wait_s={options.wait_ms / 1000}",
        ]
    arguments = [*common(options), *(word for setting in settings for word in ("--set", setting))]
    with LocalSwarm(1, arguments) as swarm:
        (node,) = swarm.nodes
        swarm.wait(lambda: works(node, count), START_S, f"{count} actors work")
        return measured(swarm, options.seconds)


def works(node: Node, count: int) -> bool:
    """Tell whether all actors act, and the learner has made some updates."""
    status = node.status()
    acting = sum(row["running"] for row in status.get("actors") or [])
    return acting == count and status.get("updates", 0) >= 2 + count


def several_nodes(count: int, inference: str, options: argparse.Namespace) -> Rates:
    """Run a learner, the shards of a replay if there are any, and so many nodes that act."""
    replays = options.replays if options.algorithm.startswith("apex") else 0
    learner = "learner" if replays or options.algorithm == "impala" else "learner,replay"
    acts = ["--roles", "actor", "--actors", str(options.actors)]
    acts += ["--set", f"node.actors.inference={inference}"]
    each = {0: ["--config", options.algorithm, "--roles", learner, *common(options)]}
    told = [word for setting in own(options) for word in ("--set", setting)]
    each |= {number: ["--roles", "replay", *told] for number in range(1, 1 + replays)}
    each |= {number: [*acts, *told] for number in range(1 + replays, 1 + replays + count)}
    remote = ["--set", f"node.learner.remote_actors={options.remote or options.actors * count}"]
    for number in range(1 + replays):
        each[number] = [*each[number], *remote]
    with LocalSwarm(1 + replays + count, [], each) as swarm:
        actors = swarm.nodes[1 + replays :]
        swarm.wait(lambda: all(sends(node, options.actors) for node in actors), START_S, "all nodes act")
        swarm.wait(lambda: swarm.nodes[0].status().get("updates", 0) > 5, START_S, "the learner learns")
        return measured(swarm, options.seconds)


def sends(node: Node, actors: int) -> bool:
    """Tell whether all actors of a node act, and unrolls of theirs have gone out."""
    status = node.status()
    acting = sum(row["running"] for row in status.get("actors") or [])
    sent = (status.get("experience") or {}).get("sent") or {}
    return acting == actors and sent.get("sent", 0) > 3 * actors


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--counts", type=int, nargs="+", default=[0, 1, 2, 4], help="numbers of actors")
    parser.add_argument("--nodes", type=int, nargs="+", help="numbers of nodes that only act, instead")
    parser.add_argument("--algorithm", default="impala", help="with --nodes: a preset, impala or apex_dqn")
    parser.add_argument("--actors", type=int, default=2, help="with --nodes: of each node")
    parser.add_argument(
        "--replays", type=int, default=2, help="with --nodes: shards; 0 has the learner hold it"
    )
    parser.add_argument(
        "--remote", type=int, default=0, help="node.learner.remote_actors; 0 is what is needed"
    )
    parser.add_argument("--step-ms", type=float, default=2.0, help="that each environment sleeps at a step")
    parser.add_argument("--environments", type=int, default=8, help="of the learner, or of each acting node")
    parser.add_argument("--pictures", action="store_true", help="84 x 84 x 4 and the Nature CNN, no CartPole")
    parser.add_argument("--inference", nargs="+", choices=["local", "batched"], default=["local"])
    parser.add_argument("--wait-ms", type=float, default=2.0, help="node.inference.batch_wait_s")
    parser.add_argument("--ahead", type=int, default=0, help="node.actors.ahead")
    parser.add_argument("--set", dest="sets", action="append", default=[], help="KEY=VALUE for all nodes")
    parser.add_argument("--seconds", type=float, default=20.0, help="of each measurement")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join(
        part for part in (str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")) if part
    )
    what = "nodes" if options.nodes else "actors"
    cases = list(itertools.product(options.nodes or options.counts, options.inference))
    runs: dict[tuple[int, str], list[Rates]] = {case: [] for case in cases}
    for repeat in range(options.repeats):
        for count, inference in cases:
            found = (
                several_nodes(count, inference, options)
                if options.nodes
                else one_node(count, inference, options)
            )
            runs[count, inference].append(found)
            print(
                f"repeat {repeat + 1}: {count} {what}, {inference}: {found.steps:.0f} steps/s, "
                f"{found.updates:.1f} updates/s, {found.cpu:.2f} CPU s/s, load {os.getloadavg()[0]:.1f}",
                file=sys.stderr,
            )
    medians = {
        case: Rates(*(statistics.median(column) for column in zip(*found, strict=True)))
        for case, found in runs.items()
    }
    if options.json:
        print(json.dumps({f"{count} {inference}": found for (count, inference), found in runs.items()}))
        return 0
    base = medians[cases[0]].steps
    for (count, inference), found in medians.items():
        print(
            f"{count} {what}, {inference:8} {found.steps:8.0f} steps/s {found.steps / base:6.2f} ×"
            f" {found.steps / max(found.cpu, 1e-9):8.0f} steps/CPU s {found.updates:7.1f} updates/s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
