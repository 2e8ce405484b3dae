#!/usr/bin/env python3
"""Speed-up curves: how much faster m nodes work than one, measured on real nodes and predicted.

    python scripts/speedup.py --nodes 1 2 4 8 --plot speedup.png
    python scripts/speedup.py --predict-only --nodes 1 2 4 8 16 64 --link lan --size 1000000

    python scripts/speedup.py --nodes 1 2 --rows 2000 --size 100000

With ``--rows`` gradients are computed, of so many rows, one thread for each node: as many nodes as the
machine has cores, no more. Without, computation is simulated: each gradient takes ``--update-s``,
whatever the cores do, so that m nodes fit on one machine and what is left is what agreeing costs. The
speed-up of m nodes is their gradients per second, all together, over those of one node alone; the time
for a fixed number of gradients is its inverse. Of each second of a learner, ``compute`` goes to
gradients, ``wait`` to standing still for its strategy, the rest to the learner's own bookkeeping.
``rounds`` are seconds per second in which the daemon was in a round; while a learner doesn't wait, they
run beside it.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from check_planner import options as node_options
from p2pdrl.config.mode import protocol_of
from p2pdrl.config.strategy import LocalConfig
from p2pdrl.errors import P2PDRLError
from p2pdrl.planner.description import CallCosts, Machine, SwarmDescription
from p2pdrl.planner.forecast import Forecast
from p2pdrl.planner.parsing import link_of, strategy_of
from p2pdrl.planner.simulate import predict
from support.live_swarm import LiveSwarm, Measured
from support.plots import COLOURS, check_path, pyplot, save

STRATEGIES = ("grad_average", "param_average", "adpsgd", "server_async")
SETTLE_S = 2.5
LONGER = 4
"""How much longer one node alone is watched: updates are counted whole, and all is divided by its rate."""


class Point(msgspec.Struct, frozen=True):
    """One strategy on so many nodes.

    Attributes:
        strategy: as it was typed.
        nodes: m.
        rate: gradients per second, all nodes together.
        compute: share of a learner's time.
        wait: share of a learner's time.
        rounds: seconds of rounds per second and node.
        measured: or predicted.
    """

    strategy: str
    nodes: int
    rate: float
    compute: float
    wait: float
    rounds: float
    measured: bool


def real(name: str, nodes: int, found: Measured, update_s: float) -> Point:
    """A point from real nodes."""
    each = float(np.mean(found.updates_s))
    rounds = found.round_s * sum(found.outcomes.values()) / found.seconds / nodes
    return Point(name, nodes, each * nodes, each * update_s, found.waiting, rounds, measured=True)


def said(name: str, nodes: int, found: Forecast, update_s: float) -> Point:
    """A point from the planner."""
    each = found.updates_s
    rounds = found.round_s * found.rounds_s
    return Point(name, nodes, each * nodes, each * update_s, found.waiting, rounds, measured=False)


def what_nodes_run(arguments: argparse.Namespace) -> dict[str, Any]:
    """The nodes' options: gradients that take a time, or are of so many rows."""
    found = node_options(arguments, LocalConfig())
    if arguments.rows:
        rows = {"rows": arguments.rows, "batch_size": arguments.rows, "min_update_s": 0}
        found |= {f"task.algorithm.{name}": value for name, value in rows.items()}
        found["node.learner.threads"] = 1
    return found


def measured(arguments: argparse.Namespace) -> list[Point]:
    """Run one swarm of each size through all strategies; one node alone runs ``local``.

    Where gradients are computed, what one takes (``update_s``) is set to what it takes there.
    """
    points = []
    for nodes in arguments.nodes:
        with LiveSwarm(nodes, what_nodes_run(arguments)) as live:
            live.ready()
            time.sleep(SETTLE_S)
            if nodes == 1:
                found = live.measure("local", LONGER * arguments.seconds)
                if arguments.rows:
                    arguments.update_s = 1.0 / float(np.mean(found.updates_s)) - arguments.overhead_s
                points += [real(name, 1, found, arguments.update_s) for name in arguments.strategies]
                continue
            for name in arguments.strategies:
                strategy = strategy_of(name)
                live.set_mode(strategy)
                time.sleep(SETTLE_S)
                found = live.measure(protocol_of(strategy), arguments.seconds)
                points.append(real(name, nodes, found, arguments.update_s))
                print(f"measured {name} on {nodes} nodes, cores busy {found.cpu:.0%}", file=sys.stderr)
    return points


def predicted(arguments: argparse.Namespace) -> list[Point]:
    """The same in virtual time."""
    points = []
    machine = Machine(update_s=arguments.update_s + arguments.overhead_s, jitter=0.02)
    for nodes in arguments.nodes:
        swarm = SwarmDescription(
            nodes=nodes,
            size=arguments.size,
            machines=(machine,),
            links=(link_of(arguments.link),),
            costs=CallCosts() if arguments.call_s is None else CallCosts(call_s=arguments.call_s),
        )
        for name in arguments.strategies:
            strategy = LocalConfig() if nodes == 1 else strategy_of(name)
            found = predict(swarm, strategy, seconds=arguments.virtual_s)
            points.append(said(name, nodes, found, arguments.update_s))
    return points


def alone(points: list[Point], point: Point) -> float:
    """Gradients per second of one node; of the planner's where one wasn't measured."""
    same = [one for one in points if one.nodes == 1 and one.strategy == point.strategy]
    kind = [one for one in same if one.measured == point.measured] or same
    return kind[0].rate if kind else point.rate / point.nodes


def show(points: list[Point], work: int) -> None:
    """Print the table."""
    table = Table(title=f"time for {work} gradients, and speed-up", title_justify="left")
    for name in ("strategy", "m", "", "seconds", "speed-up", "compute", "wait", "rounds"):
        table.add_column(name, justify="left" if name in ("strategy", "") else "right")
    for one in sorted(points, key=lambda one: (one.strategy, one.nodes, not one.measured)):
        table.add_row(
            one.strategy,
            str(one.nodes),
            "measured" if one.measured else "predicted",
            f"{work / one.rate:.1f}" if one.rate else "-",
            f"{one.rate / alone(points, one):.2f}",
            f"{one.compute:.1%}",
            f"{one.wait:.1%}",
            f"{one.rounds:.1%}",
        )
    Console(width=None if sys.stdout.isatty() else 100).print(table)


def draw(points: list[Point], path: Path) -> None:
    """Draw curves, and where a learner's time goes at the greatest m."""
    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.8))
    names = list(dict.fromkeys(one.strategy for one in points))
    for colour, name in zip(COLOURS * 3, names, strict=False):
        for kind, line in ((True, "-o"), (False, "--s")):
            curve = [one for one in points if one.strategy == name and one.measured is kind]
            label = f"{name}, {'measured' if kind else 'predicted'}"
            rates = [one.rate / alone(points, one) for one in curve]
            if curve:
                left.plot([one.nodes for one in curve], rates, line, color=colour, label=label, ms=4)
    most = max(one.nodes for one in points)
    left.plot([1, most], [1, most], ":", color="#888888", label="m times")
    left.set_xlabel("m nodes")
    left.set_ylabel("speed-up")
    left.set_title("gradients per second, over one node's")
    left.legend(fontsize=7)
    bars = [one for one in points if one.nodes == most]
    labels = [f"{one.strategy}\n{'measured' if one.measured else 'predicted'}" for one in bars]
    compute = np.array([100 * one.compute for one in bars])
    wait = np.array([100 * one.wait for one in bars])
    rest = np.maximum(0.0, 100 - compute - wait)
    bottom = np.zeros(len(bars))
    for values, label, colour in zip(
        (compute, wait, rest), ("compute", "wait", "other"), COLOURS, strict=False
    ):
        right.barh(labels, values, left=bottom, label=label, color=colour)
        bottom += values
    right.set_title(f"per cent of a learner's time, m = {most}")
    right.legend(fontsize=8)
    right.invert_yaxis()
    figure.tight_layout()
    save(figure, path)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), help="NAME[:KEY=VALUE,…]")
    parser.add_argument("--size", type=int, default=10_000, help="parameters")
    parser.add_argument("--update-s", type=float, default=0.25, help="of a gradient that isn't computed")
    parser.add_argument("--rows", type=int, default=0, help="of gradients, which are computed then")
    parser.add_argument("--overhead-s", type=float, default=0.001, help="of an update beside --update-s")
    parser.add_argument(
        "--link", default="loopback", help="of the prediction: loopback, lan, wan or MBPS,DELAY_MS,LOSS"
    )
    parser.add_argument("--call-s", type=float, help="seconds per call, of the prediction")
    parser.add_argument("--seconds", type=float, default=6.0, help="watched per strategy and size")
    parser.add_argument("--virtual-s", type=float, default=60.0, help="simulated")
    parser.add_argument("--work", type=int, default=1000, help="gradients of the table's times")
    parser.add_argument("--predict-only", action="store_true", help="start no nodes")
    parser.add_argument("--plot", type=Path, help="draw to this .png, .svg or .pdf")
    arguments = parser.parse_args()
    if arguments.plot is not None:
        check_path(arguments.plot)
        pyplot()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if arguments.rows and (arguments.predict_only or min(arguments.nodes) != 1):
        parser.error("--rows wants one node measured alone first: --nodes 1 …")
    if arguments.rows and (too_many := [nodes for nodes in arguments.nodes if nodes > cores]):
        print(f"speedup: {too_many} nodes on {cores} cores would share them: left out", file=sys.stderr)
    try:
        points = []
        if not arguments.predict_only:
            all_nodes = arguments.nodes
            if arguments.rows:
                arguments.nodes = sorted(nodes for nodes in all_nodes if nodes <= cores)
            points = measured(arguments)
            arguments.nodes = all_nodes
        points += predicted(arguments)
    except P2PDRLError as error:
        sys.exit(f"speedup: {error}")
    show(points, arguments.work)
    if arguments.plot is not None:
        draw(points, arguments.plot)


if __name__ == "__main__":
    main()
