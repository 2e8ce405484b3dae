"""Every strategy on the same task with the same budget, in fair weather and foul.

Real nodes on loopback train CartPole. Their environments sleep at every step, so that the machine stays
under half busy and a slow node's idle processor is no gift to the others. Four kinds of weather:

    fair   nothing happens
    slow   the environments of one node are ten times slower
    cuts   every second the connections to each node are reset with a chance of 5 %
    kills  a node is killed -9 after each minute's first third, and started again 10 s later

In a pipeline every second node makes no steps of its own; whether the slow or killed one is such a node is
chance, for their ids say who is first.

Printed per strategy and weather: the mean return at the end, environment steps a second of the healthy
nodes relative to fair weather, how long learners stood still, processor time and bytes; `--plot` draws the
mean return against seconds, CPU seconds and bytes.

    python scripts/compare_strategies.py --budget-s 40 --plot strategies.png --json strategies.json
    python scripts/compare_strategies.py --read strategies.json --plot strategies.png
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from p2pdrl.config import mode
from p2pdrl.transport.protocol import Address
from support.local_swarm import LocalSwarm, Meter, processors_busy
from support.proxies import Proxies

PPO = {"task.algorithm.name": "ppo", "task.env.num_envs": "8"}
VARIANTS: dict[str, dict[str, str]] = {
    "server-sync": {"name": "server_sync"},
    "server-sync +1 backup": {"name": "server_sync", "backups": "1"},
    "server-async": {"name": "server_async"},
    "federated": {"name": "federated", "participation": "1.0"},
    "pipeline": {"name": "pipeline", "backend": "stream"},  # auto would refuse so small a policy
}
"""Strategies that take part with other options than the defaults, or under another name."""
STRATEGIES = {
    name: {"name": name}
    for name in mode.STRATEGIES
    if name not in {variant["name"] for variant in VARIANTS.values()}
} | VARIANTS
WEATHERS = ("fair", "slow", "cuts", "kills")
SLOW = 3
"""Number of the node that is slow, or killed."""
SAMPLE_S = 1.0


def arguments_of(strategy: str, pace_s: float) -> list[str]:
    """The command line of every node."""
    words = [f"--set={key}={value}" for key, value in PPO.items()]
    words += [f"--set=task.strategy.{key}={value}" for key, value in STRATEGIES[strategy].items()]
    return [*words, f"--set=node.learner.step_delay_s={pace_s}"]


def waited_s(swarm: LocalSwarm) -> float:
    """Seconds that learners stood still, all living nodes and strategies together."""
    total = 0.0
    for node in swarm.living:
        for account in node.status().get("accounting", {}).values():
            total += account["learner_wait_s"]
    return total


def run(strategy: str, weather: str, budget_s: float, nodes: int, pace_s: float) -> dict[str, Any]:
    """Train one swarm for ``budget_s``; return its course and its figures."""
    each: dict[int, list[str]] = {}
    if weather == "slow":
        each[SLOW] = [f"--set=node.learner.step_delay_s={10 * pace_s}"]
    with ExitStack() as stack:
        swarm = LocalSwarm(nodes, arguments_of(strategy, pace_s), each)
        proxies = None
        if weather == "cuts":
            proxies = stack.enter_context(Proxies([Address("127.0.0.1", port) for port in swarm.ports]))
            swarm.advertise(proxies.addresses)
        stack.enter_context(swarm)
        swarm.ready()
        if proxies is not None:
            proxies.cut_at_random(0.05)
        processors_busy()
        meter, course = Meter(swarm), []
        killed = False
        while (passed_s := time.monotonic() - meter.began_s) < budget_s:
            if weather == "kills":
                killed = storm(swarm, passed_s, killed)
            time.sleep(SAMPLE_S)
            course.append(meter.sample())
        busy = processors_busy()
        steps = meter.totals["env_steps"]
        healthy = [count for name, count in steps.items() if name != f"node-{SLOW + 1}"]
        return {
            "strategy": strategy,
            "weather": weather,
            "course": course,
            "mean_return": course[-1]["mean_return"],
            "healthy_steps_per_s": sum(healthy) / course[-1]["seconds"],
            "waited": waited_s(swarm) / (budget_s * len(swarm.living)),
            "cpu_s": course[-1]["cpu_s"],
            "bytes_per_node": course[-1]["bytes"] / nodes,
            "busy": busy,
        }


def storm(swarm: LocalSwarm, passed_s: float, killed: bool) -> bool:
    """Kill the one node in the first third of each minute, and bring it back; return whether it is dead."""
    second = passed_s % 60
    if not killed and 20 <= second < 30:
        swarm.kill(SLOW)
        return True
    if killed and second >= 30:
        swarm.restart(SLOW)
        return False
    return killed


def table(results: list[dict[str, Any]]) -> None:
    """Print what came out."""
    head = f"{'strategy':22} {'weather':7} {'return':>7} {'healthy steps/s':>16} {'to fair':>8}"
    print(f"{head} {'waiting':>8} {'CPU s':>7} {'MB/node':>8} {'busy':>5}")
    for row in results:
        fair = [r for r in results if r["strategy"] == row["strategy"] and r["weather"] == "fair"]
        ratio = row["healthy_steps_per_s"] / fair[0]["healthy_steps_per_s"] if fair else float("nan")
        value = row["mean_return"]
        print(
            f"{row['strategy']:22} {row['weather']:7} {'-' if value is None else f'{value:.0f}':>7} "
            f"{row['healthy_steps_per_s']:16.0f} {ratio:8.2f} {row['waited']:8.0%} {row['cpu_s']:7.1f} "
            f"{row['bytes_per_node'] / 1e6:8.2f} {row['busy']:5.0%}"
        )


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Draw the mean return against seconds, CPU seconds and bytes: one row of pictures per weather."""
    try:
        import matplotlib as mpl
    except ModuleNotFoundError:
        sys.exit("drawing needs matplotlib: pip install 'p2pdrl[plots]'")
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    styles = {
        name: {"label": name, "color": f"C{at % 10}", "linestyle": "-" if at < 10 else "--", "linewidth": 1.2}
        for at, name in enumerate(dict.fromkeys(row["strategy"] for row in results))
    }
    weathers = [weather for weather in WEATHERS if any(row["weather"] == weather for row in results)]
    columns = (
        ("seconds", "seconds", 1.0),
        ("cpu_s", "CPU seconds, all nodes", 1.0),
        ("bytes", "MB sent", 1e6),
    )
    figure, axes = plt.subplots(len(weathers), 3, figsize=(15, 4 * len(weathers)), squeeze=False, sharey=True)
    for line, weather in zip(axes, weathers, strict=True):
        for axis, (key, label, unit) in zip(line, columns, strict=True):
            for row in results:
                if row["weather"] == weather:
                    points = [p for p in row["course"] if p["mean_return"] is not None]
                    axis.plot(
                        [p[key] / unit for p in points],
                        [p["mean_return"] for p in points],
                        **styles[row["strategy"]],
                    )
            axis.set_xlabel(label)
            axis.set_title(weather)
            axis.grid(alpha=0.3)
        line[0].set_ylabel("mean return of 100 episodes")
        line[2].set_xscale("symlog", linthresh=0.1)
    axes[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    """Run, print, draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=list(STRATEGIES))
    parser.add_argument("--weathers", nargs="+", default=list(WEATHERS), choices=WEATHERS)
    parser.add_argument("--budget-s", type=float, default=40.0)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument(
        "--pace-s", type=float, default=0.008, help="seconds that a step of the environments sleeps"
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--plot", type=Path, help="draw to this file (.png, .svg)")
    parser.add_argument(
        "--read", type=Path, nargs="+", help="run nothing: print and draw these files of --json"
    )
    arguments = parser.parse_args()
    results = [row for path in arguments.read or () for row in json.loads(path.read_text())]
    if not results:
        results = measure(arguments)
    table(results)
    if arguments.plot is not None:
        draw(results, arguments.plot)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run every strategy in every weather."""
    results: list[dict[str, Any]] = []
    for strategy in arguments.strategies:
        for weather in arguments.weathers:
            print(f"{strategy}, {weather} …", file=sys.stderr, flush=True)
            results.append(run(strategy, weather, arguments.budget_s, arguments.nodes, arguments.pace_s))
            if arguments.json is not None:
                arguments.json.write_text(json.dumps(results))
    return results


if __name__ == "__main__":
    main()
