"""What one exchange a second costs a training swarm: environment steps per second of processor time.

A swarm of real nodes on loopback is switched to and fro between training alone (``local``) and gossip
(``adpsgd``), so that both are measured on the same processes, interleaved. Each node begins an exchange
every ``--every-s`` seconds and answers as many: with 2 it takes part in one a second.

Printed are the medians over windows of environment steps per CPU second, their ratio (at least 0.95 is the
aim) and the exchanges a second that each node took part in; then, after a minute of gossip without a switch,
the greater of the daemons' 99th percentiles of loop lag over that minute (at most 60 ms is the aim). All
that for CartPole's usual network and for one of ten million parameters.

    python scripts/bench_gossip.py --windows 6 --window-s 10
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from support.local_swarm import LocalSwarm

NETWORKS = {"64x64": "[64, 64]", "10M": "[2230, 2230]"}
LAG_WINDOW_S = 62.0
"""A little more than the time over which a daemon takes its percentile."""


def measure(  # noqa: PLR0917 - a bench has so many knobs
    network: str, nodes: int, windows: int, window_s: float, pace: float, every_s: float
) -> dict[str, float]:
    """Run one swarm; return its medians."""
    arguments = [f"--set=task.network.hidden={NETWORKS[network]}", "--set=task.strategy.name=local"]
    arguments += [f"--set=node.learner.step_delay_s={pace}"]
    if network == "10M":  # an update of PPO's sixteen steps would take longer than a window
        arguments += ["--set=task.algorithm.name=a2c", "--set=task.algorithm.unroll_steps=32"]
    ways: dict[str, dict[str, float]] = {"local": {}, "gossip": {"every_updates": 0, "every_s": every_s}}
    rates: dict[str, list[float]] = {way: [] for way in ways}
    exchanges = []
    with LocalSwarm(nodes, arguments) as swarm:
        swarm.ready()
        for _ in range(windows):
            for way, options in ways.items():
                swarm.mode(way, **options)
                time.sleep(1.0)
                before, met = swarm.snapshot(), done(swarm)
                time.sleep(window_s)
                window = swarm.snapshot() - before
                rates[way].append(window.steps_per_cpu_s)
                if way == "gossip":
                    exchanges.append(2 * (done(swarm) - met) / window.seconds / nodes)
        time.sleep(LAG_WINDOW_S)
        lag_s = max(node.status()["loop_lag_s"] for node in swarm.living)
    local, gossip = (statistics.median(rates[way]) for way in ways)
    return {
        "steps_per_cpu_s_local": local,
        "steps_per_cpu_s_gossip": gossip,
        "ratio": statistics.median(g / a for a, g in zip(rates["local"], rates["gossip"], strict=True)),
        "exchanges_per_s": statistics.median(exchanges),
        "loop_lag_p99_s": lag_s,
    }


def done(swarm: LocalSwarm) -> int:
    """Exchanges that nodes began and that went well, all nodes together."""
    return sum(node.status().get("exchanges", {}).get("ok", 0) for node in swarm.living)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), choices=list(NETWORKS))
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--window-s", type=float, default=8.0)
    parser.add_argument(
        "--pace", type=float, default=0.0, help="seconds that a step of the environments sleeps"
    )
    parser.add_argument("--every-s", type=float, default=2.0, help="seconds between a node's own exchanges")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = {}
    for network in arguments.networks:
        rows[network] = measure(
            network,
            arguments.nodes,
            arguments.windows,
            arguments.window_s,
            arguments.pace,
            arguments.every_s,
        )
        if not arguments.json:
            row = rows[network]
            print(
                f"{network:6} {row['steps_per_cpu_s_local']:10.0f} steps/CPU s local "
                f"{row['steps_per_cpu_s_gossip']:10.0f} gossip  ratio {row['ratio']:.3f}  "
                f"{row['exchanges_per_s']:.2f} exchanges/s each  "
                f"loop lag p99 {row['loop_lag_p99_s'] * 1e3:.0f} ms"
            )
    if arguments.json:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
