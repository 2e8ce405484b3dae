#!/usr/bin/env python3
"""Compare what the planner predicts with what real nodes do: the same swarm, both ways, figure by figure.

    python scripts/check_planner.py --nodes 4 8
    python scripts/check_planner.py --nodes 4 --strategies adpsgd dsgd --seconds 8

For each number of nodes, real `p2pdrl node` processes run on loopback with learners whose updates take
``--update-s``; they are switched from strategy to strategy, and each is watched for ``--seconds``. Then, for
``--consensus``, they start from independent vectors with learning rate zero, and their vectors are read
until they agree to 1 %. Seconds per call are measured first, on the pairwise exchanges of the first swarm,
and given to the planner; everything else comes from the description alone.

A ratio is measured / predicted. Run it on a machine that has little else to do: the last column of a
strategy's block tells how busy all cores were.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from typing import Any

import msgspec
import numpy as np
from live_swarm import LiveSwarm, Measured
from rich.console import Console
from rich.table import Table

from p2pdrl.config.mode import changed_options, protocol_of
from p2pdrl.config.strategy import AdpsgdConfig, StrategyConfig
from p2pdrl.errors import P2PDRLError
from p2pdrl.planner.description import LOOPBACK, Costs, Machine, SwarmDescription
from p2pdrl.planner.forecast import Forecast
from p2pdrl.planner.replicas import AGREED
from p2pdrl.planner.simulate import predict
from p2pdrl.planner.texts import strategy_of

STRATEGIES = ("adpsgd", "sgp", "dsgd", "grad_average", "param_average", "server_sync", "server_async")
GATHER = {
    "adpsgd": "adpsgd:every_updates=0,every_s=1,compression=none",
    "sgp": "sgp:every_updates=0,every_s=1,compression=none",
    "dsgd": "dsgd:every_updates=4,compression=none",
}
"""What is watched coming together, slowly enough to look at."""
SETTLE_S = 3.0
TRIES = 20
"""Seeds over which predicted exchanges to consensus are averaged."""


def described(nodes: int, arguments: argparse.Namespace, costs: Costs) -> SwarmDescription:
    """The swarm that is run."""
    machine = Machine(update_s=arguments.update_s + arguments.overhead_s, jitter=0.02)
    return SwarmDescription(
        nodes=nodes, size=arguments.size, machines=(machine,), links=(LOOPBACK,), costs=costs
    )


def options(arguments: argparse.Namespace, strategy: StrategyConfig) -> dict[str, Any]:
    """The nodes' options."""
    return {
        "task.algorithm.name": "regression",
        "task.algorithm.features": arguments.size,
        "task.algorithm.rows": 64,
        "task.algorithm.batch_size": 1,
        "task.algorithm.learning_rate": 0,
        "task.algorithm.evaluate_every": 1_000_000,
        "task.algorithm.min_update_s": arguments.update_s,
        "task.strategy.name": protocol_of(strategy),
        **{f"task.strategy.{key}": value for key, value in changed_options(strategy).items()},
        "node.checkpoint.every_s": 0,
    }


def calibrated(measured: Measured, swarm: SwarmDescription) -> Costs:
    """Costs with which an exchange takes as long as it was measured to: the call's share is fitted.

    An exchange has two calls' worth of work in it (half, one, half), one after the other.
    """
    predicted = predict(swarm, AdpsgdConfig(), seconds=20).round_s
    call_s = max(1e-4, swarm.costs.call_s + (measured.round_s - predicted) / 2.0)
    return msgspec.structs.replace(swarm.costs, call_s=call_s)


def watched(
    nodes: int, arguments: argparse.Namespace, costs: Costs | None
) -> tuple[list[tuple[Measured, Forecast]], Costs]:
    """Run one swarm through all strategies."""
    pairs = []
    with LiveSwarm(nodes, options(arguments, AdpsgdConfig())) as live:
        live.ready()
        if costs is None:
            time.sleep(SETTLE_S)
            one = live.measure("adpsgd", arguments.seconds)
            costs = calibrated(one, described(nodes, arguments, Costs()))
        swarm = described(nodes, arguments, costs)
        for name in arguments.strategies:
            strategy = strategy_of(name)
            live.set_mode(strategy)
            time.sleep(SETTLE_S)
            measured = live.measure(protocol_of(strategy), arguments.seconds)
            pairs.append((measured, predict(swarm, strategy, seconds=60)))
            show(nodes, measured, pairs[-1][1])
    return pairs, costs


def ratio(measured: float, predicted: float) -> str:
    """Measured over predicted."""
    return f"{measured / predicted:.2f}" if predicted else "-"


def show(nodes: int, measured: Measured, predicted: Forecast) -> None:
    """Print one strategy's figures."""
    table = Table(title=f"{predicted.strategy}, {nodes} nodes; per node", title_justify="left")
    for name in ("figure", "measured", "predicted", "ratio"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    payload = (predicted.bytes_out_s + predicted.bytes_in_s) / 2
    if predicted.strategy.startswith("server"):
        payload /= 2  # nodes book what their workers send and get, and not what they serve
    rows = (
        ("rounds/s", measured.rounds_s, predicted.rounds_s),
        ("updates/s", float(np.mean(measured.updates_s)), predicted.updates_s),
        ("payload, bytes/s", measured.bytes_s, payload),
        ("all bodies, bytes/s", measured.body_s, predicted.wire_out_s),
        ("seconds of a round", measured.round_s, predicted.round_s),
        ("learner waits, share", measured.waiting, predicted.waiting),
        ("staleness, versions", measured.staleness, predicted.staleness),
    )
    for name, real, said in rows:
        table.add_row(name, f"{real:.4g}", f"{said:.4g}", ratio(real, said))
    console = Console(width=None if sys.stdout.isatty() else 100)
    console.print(table)
    print(f"cores busy {measured.cpu:.0%}; {measured.outcomes}", flush=True)


def gathered(nodes: int, name: str, arguments: argparse.Namespace, costs: Costs) -> dict[str, Any]:
    """Watch nodes come together from independent vectors; predict the same."""
    strategy, seeds = strategy_of(GATHER[name]), [1000 * nodes + place for place in range(nodes)]
    common = options(arguments, strategy) | {
        "node.debug.perturb_start": 1.0,
        "node.debug.start_at_members": nodes,
    }
    starts = [np.random.default_rng(seed).normal(0, 1.0, arguments.size) for seed in seeds]
    first = spread(np.array(starts))
    own = {place: {"node.seed": seed} for place, seed in enumerate(seeds)}
    walk = [(0.0, 1.0)]
    with LiveSwarm(nodes, common, own) as live:
        live.ready()
        until_s = time.monotonic() + 40
        while walk[-1][1] > AGREED and time.monotonic() < until_s:
            time.sleep(0.1)
            before = exchanges(live)
            part = spread(live.vectors()) / first
            walk.append(((before + exchanges(live)) / 2, part))
        outcomes = [status.get("exchanges", {}) for status in live.statuses()]
    swarm = described(nodes, arguments, costs)
    said = [predict(swarm, strategy, seconds=60, seed=seed).consensus_exchanges for seed in range(TRIES)]
    reached = sorted(one for one in said if one is not None)
    measured = crossing(walk)
    return {
        "strategy": name,
        "nodes": nodes,
        "measured": measured,
        "outcomes": outcomes,
        "predicted": float(np.mean(reached)) if reached else None,
        "least": reached[TRIES // 10] if len(reached) == TRIES else None,
        "most": reached[-1 - TRIES // 10] if len(reached) == TRIES else None,
    }


def exchanges(live: LiveSwarm) -> int:
    """Exchanges, pushes or rounds that ended well, over all nodes."""
    counts = [status.get("exchanges", {}) for status in live.statuses()]
    return sum(count.get("ok", 0) if "pushed" not in count else count["pushed"] for count in counts)


def spread(vectors: np.ndarray) -> float:
    """The consensus distance."""
    return float(np.sqrt(((vectors - vectors.mean(0)) ** 2).sum(1).mean()))


def crossing(walk: list[tuple[float, float]]) -> float | None:
    """Exchanges at which the part fell to `AGREED`, on a line between two looks in its logarithm."""
    for (one, high), (other, low) in itertools.pairwise(walk):
        if low <= AGREED:
            share = math.log(high / AGREED) / math.log(high / max(low, 1e-12))
            return one + share * (other - one)
    return None


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), help="NAME[:KEY=VALUE,…]")
    parser.add_argument("--consensus", nargs="*", default=list(GATHER), choices=list(GATHER))
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--update-s", type=float, default=0.25)
    parser.add_argument("--overhead-s", type=float, default=0.001, help="of an update beside --update-s")
    parser.add_argument("--seconds", type=float, default=8.0, help="watched per strategy")
    parser.add_argument("--call-s", type=float, help="seconds per call; measured when left out")
    parser.add_argument("--json", help="file for all figures")
    arguments = parser.parse_args()
    costs = None if arguments.call_s is None else Costs(call_s=arguments.call_s)
    figures: dict[str, Any] = {"throughput": [], "consensus": []}
    try:
        for nodes in arguments.nodes:
            if arguments.strategies:
                pairs, costs = watched(nodes, arguments, costs)
                print(f"seconds per call: {costs.call_s:.4f}", flush=True)
                for measured, said in pairs:
                    plain = msgspec.structs.replace(said, walk=())
                    figures["throughput"].append({"nodes": nodes, "measured": measured, "predicted": plain})
        for nodes in arguments.nodes:
            for name in arguments.consensus:
                found = gathered(nodes, name, arguments, costs or Costs())
                figures["consensus"].append(found)
                said, real = found["predicted"], found["measured"]
                both = ratio(real, said) if real is not None and said else "-"
                span = f"{found['least']} to {found['most']}"
                print(f"exchanges to 1 %, {name}, {nodes} nodes: measured {real}, predicted {said} ({span})")
                print(f"ratio {both}; how exchanges ended, by node: {found['outcomes']}", flush=True)
    except P2PDRLError as error:
        sys.exit(f"check_planner: {error}")
    if arguments.json:
        with open(arguments.json, "w", encoding="utf-8") as file:  # noqa: PTH123
            json.dump(msgspec.to_builtins(figures), file, indent=1)


if __name__ == "__main__":
    main()
