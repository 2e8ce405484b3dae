"""How many gradients a second nodes push to parameter servers, beside the same learners without a server.

A swarm of real nodes on loopback is switched to and fro between training alone (``local``) and asynchronous
servers (``server-async``) whose workers wait for each answer (``ahead = 0``) or run one push ahead, so that
all are measured on the same processes, interleaved. Every gradient is pushed, and the parameters are fetched
with it.

Printed are medians over windows, per node: gradients a second; processor time of the daemon and of the
learner for one gradient, of which the learner's own without a server is the reference; the mean time from a
push to its answer as the daemon saw it. Learners and daemons share the machine: what is there with fewer
processors than processes is bound by the sum of the processor times.

    python scripts/bench_servers.py --windows 5 --window-s 5
    python scripts/bench_servers.py --preset async_double_q --nodes 1
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import psutil

from p2pdrl.config.loader import resolve
from p2pdrl.errors import ConfigError
from support.local_swarm import LocalSwarm, Node

WAYS: dict[str, tuple[str, dict[str, object]]] = {
    "local": ("local", {}),
    "ahead=0": ("server-async", {"ahead": 0}),
    "ahead=1": ("server-async", {"ahead": 1}),
}
SETTLE_S = 2.0


def cpu_s(node: Node) -> tuple[float, float]:
    """Processor time of the daemon, and of its children."""
    daemon = psutil.Process(node.process.pid)
    own = daemon.cpu_times()
    children = [child.cpu_times() for child in daemon.children(recursive=True)]
    return own.user + own.system, sum(times.user + times.system for times in children)


def looked_at(swarm: LocalSwarm) -> list[tuple[float, ...]]:
    """Seconds now, updates, pushes, seconds in pushes, and both processor times, of each node."""
    rows = []
    for node in swarm.nodes:
        status = node.status()
        account = status.get("accounting", {}).get("server_async", {})
        pushes = sum(account.get("rounds", {}).values())
        rows.append((time.monotonic(), status["updates"], pushes, account.get("round_s", 0.0), *cpu_s(node)))
    return rows


def window(swarm: LocalSwarm, seconds: float, gradients: int, *, served: bool) -> dict[str, float]:
    """Measure for a while; means over the nodes."""
    before = looked_at(swarm)
    time.sleep(seconds)
    found: dict[str, list[float]] = {}
    for then, now in zip(before, looked_at(swarm), strict=True):
        took_s, updates, pushes, rounds_s, daemon_s, learner_s = (
            b - a for a, b in zip(then, now, strict=True)
        )
        made = max(1.0, pushes if served else gradients * updates)
        row = {
            "gradients_per_s": made / took_s,
            "daemon_cpu_ms": 1e3 * daemon_s / made,
            "learner_cpu_ms": 1e3 * learner_s / made,
            "push_ms": 1e3 * rounds_s / made,
        }
        for key, value in row.items():
            found.setdefault(key, []).append(value)
    return {key: statistics.fmean(values) for key, values in found.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--preset", default="async_q", help="whose task is trained")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="another option of the task"
    )
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    # no evaluations, no end, and pushes from the first update on
    sets = [
        "task.stop.env_steps=1000000000",
        "task.stop.mean_return=1e9",
        "task.evaluation.every=1000000000",
        *given.set,
    ]
    try:
        task = resolve(files=[given.preset], sets=sets).config.task
    except ConfigError as error:
        parser.error(str(error))
    gradients = int(getattr(task.algorithm, "gradient_steps", 1))
    arguments = [
        "--config",
        given.preset,
        *(f"--set={one}" for one in sets),
        "--set=node.checkpoint.every_s=0",
    ]
    rows: dict[str, dict[str, list[float]]] = {way: {} for way in WAYS}
    loads = []
    with LocalSwarm(given.nodes, arguments) as swarm:
        swarm.ready(300.0)
        for _ in range(given.windows):
            for way, (mode, options) in WAYS.items():
                servers = {} if mode == "local" else {"servers": given.servers}
                swarm.mode(mode, **options, **servers)
                time.sleep(SETTLE_S)
                for key, value in window(swarm, given.window_s, gradients, served=mode != "local").items():
                    rows[way].setdefault(key, []).append(value)
                loads.append(os.getloadavg()[0])
    medians = {
        way: {key: statistics.median(values) for key, values in found.items()} for way, found in rows.items()
    }
    if given.json:
        print(json.dumps(medians | {"load": statistics.median(loads)}))
        return
    print(f"{given.preset}, {given.nodes} nodes; load average {statistics.median(loads):.1f}")
    for way, row in medians.items():
        print(
            f"{way:8} {row['gradients_per_s']:7.1f} gradients/s and node  "
            f"daemon {row['daemon_cpu_ms']:6.2f}  learner {row['learner_cpu_ms']:6.2f} CPU ms each  "
            f"push {row['push_ms']:6.1f} ms"
        )


if __name__ == "__main__":
    main()
