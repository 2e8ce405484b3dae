#!/usr/bin/env python3
"""Predict how a swarm will do under each strategy, and recommend one, before you start it.

    python scripts/plan_swarm.py --nodes 4 --update-s 0.1 --size 10000 --link lan
    python scripts/plan_swarm.py --nodes 8 --link 20,40,0.001 --slow 1x10 --kills-per-minute 1 --plot plan.png
    python scripts/plan_swarm.py --file swarm.toml --strategy sgp --strategy param_average:every_updates=32

A file has the keys of `p2pdrl.planner.description`: nodes, size, machines, links, update, pairs, churn and
costs. `speed-up` is the fastest machine's time to a solved task over the swarm's (`p2pdrl.planner.speedup`):
learners that average share out each update (`task.scaling`), as far as it can be divided. All other figures
are per node: updates per second of healthy machines, those of them made with others' newest work, bytes sent
per second with all overhead, the learner's share of time spent waiting, seconds until nodes that differ have
agreed to 1 %, rounds that were refused at once by a peer that was busy (nobody waits for those), and rounds
that came to nothing otherwise. With --real the strategies themselves run, in virtual time (up to 16 nodes, no
churn; a millisecond or two for each update); without it, models of them. A pipeline isn't predicted here but
by `p2pdrl pipeline plan`: it takes what the network's blocks cost, not only the swarm.
"""

from __future__ import annotations

import argparse
import sys
import tomllib
from pathlib import Path

import msgspec
from rich.console import Console
from rich.table import Table

from p2pdrl.config.strategy import GradAverageConfig, StrategyConfig
from p2pdrl.errors import P2PDRLError, UsageError
from p2pdrl.planner.advice import TRUSTS, advise, choose
from p2pdrl.planner.description import MAX_NODES, Churn, SwarmDescription
from p2pdrl.planner.emulate import emulate
from p2pdrl.planner.parsing import ALL_STRATEGIES, link_of, machines_of, strategy_of, swarm_of
from p2pdrl.planner.speedup import Speedup, divided, label_of, parts_of, speedup, time_to_solve
from support.plots import bars, check_path, lines, pyplot, save

BITS = ("speed-up", "upd/s", "fresh/s", "MB/s", "waits", "agreed", "rounds/s", "refused", "lost", "stale")


def described(arguments: argparse.Namespace) -> SwarmDescription:
    """The swarm that the options describe.

    Raises:
        UsageError: they don't describe one.
    """
    if arguments.file is not None:
        try:
            return swarm_of(tomllib.loads(arguments.file.read_text()))
        except (OSError, ValueError) as error:
            raise UsageError(f"{arguments.file}: {error}") from error
    document = {
        "nodes": arguments.nodes,
        "size": arguments.size,
        "churn": msgspec.to_builtins(
            Churn(kills_per_minute=arguments.kills_per_minute, joins_per_minute=arguments.joins_per_minute)
        ),
        "update": {
            "rows": arguments.rows,
            "parts": arguments.parts,
            "fixed": arguments.fixed,
            "critical_rows": arguments.critical_rows,
        },
        "links": [msgspec.to_builtins(link_of(arguments.link))],
        "machines": msgspec.to_builtins(
            machines_of(arguments.nodes, arguments.update_s, arguments.slow, arguments.jitter)
        ),
    }
    return swarm_of(document)


def row(prediction: Speedup) -> list[str]:
    """One strategy's figures as text."""
    one = prediction.forecast
    agreed = f"{one.consensus_s:.2f} s" if one.consensus_s is not None else f"{one.left:.0%} left"
    return [
        prediction.label,
        f"{prediction.speedup:.2f}",
        f"{one.healthy_updates_s:.2f}",
        f"{one.fresh_updates_s:.2f}",
        f"{one.wire_out_s / 1e6:.3f}",
        f"{one.waiting:.0%}",
        {"local": "never", "strom": "from first"}.get(one.strategy, agreed),
        f"{one.rounds_s:.2f}",
        f"{one.lost - one.failed:.1%}",
        f"{one.failed:.1%}",
        f"{one.staleness:.1f}",
    ]


def draw(predictions: list[Speedup], swarm: SwarmDescription, path: Path) -> None:
    """Draw speed-up, traffic, waiting and agreement."""
    plt = pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(11, 8))
    names, forecasts = [one.label for one in predictions], [one.forecast for one in predictions]
    sooner = {"time alone / time together": [one.speedup for one in predictions]}
    bars(axes[0][0], names, sooner, "the fastest machine's time to a solved task, over the swarm's")
    sent = {"sent": [one.wire_out_s / 1e6 for one in forecasts]}
    bars(axes[0][1], names, sent, "MB per second sent by a node, all overhead included")
    shares = {
        "learner waits": [100 * one.waiting for one in forecasts],
        "rounds lost": [100 * one.failed for one in forecasts],
    }
    bars(axes[1][0], names, shares, "per cent")
    curves = {
        prediction.label: [(max(s, 1e-3), p) for s, p in prediction.forecast.walk if p > 1e-3]
        for prediction in predictions
    }
    curves = {name: walk for name, walk in curves.items() if len(walk) > 1}
    if curves:
        lines(
            axes[1][1], curves, "consensus distance, learning rate zero", "seconds", "part", marker="", lw=1.2
        )
        axes[1][1].set_xscale("log")
        axes[1][1].set_yscale("log")
        axes[1][1].axhline(0.01, color="#888888", ls=":")
    slow = f", {len(swarm.stragglers)} slow" if swarm.stragglers else ""
    figure.suptitle(f"{swarm.nodes} nodes{slow}, {swarm.size:,} parameters")
    figure.tight_layout()
    save(figure, path)


def options() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--file", type=Path, help="TOML description; the options about the swarm don't count then"
    )
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--size", type=int, default=10_000, help="parameters")
    parser.add_argument("--update-s", type=float, default=0.1, help="seconds of one update")
    parser.add_argument("--rows", type=int, default=256, help="environment steps of a gradient")
    parser.add_argument(
        "--parts", type=int, default=16, help="learners that share out an update at most: unroll_steps / 8"
    )
    parser.add_argument(
        "--fixed", type=float, default=0.1, help="share of --update-s that each part takes, however small"
    )
    parser.add_argument(
        "--critical-rows",
        type=float,
        default=0.0,
        help="of a gradient (McCandlish 2018), see `p2pdrl status`; half of --rows by default",
    )
    parser.add_argument("--jitter", type=float, default=0.05, help="share by which updates differ")
    parser.add_argument("--link", default="lan", help="loopback, lan, wan or MBPS,DELAY_MS,LOSS")
    parser.add_argument(
        "--slow", action="append", default=[], metavar="COUNTxFACTOR", help="slow machines, as 1x10"
    )
    parser.add_argument("--kills-per-minute", type=float, default=0.0, help="in the whole swarm")
    parser.add_argument("--joins-per-minute", type=float, default=0.0, help="in the whole swarm")
    parser.add_argument("--trust", choices=TRUSTS, default="lan", help="whose machines they are")
    parser.add_argument(
        "--strategy",
        action="append",
        default=[],
        metavar="NAME[:KEY=VALUE,…]",
        help="a strategy or a preset, with options in place of its own; again for each; all by default",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        help="of virtual time; by default 60, longer for kills, shorter for many nodes",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--real", action="store_true", help="run the real strategies, not models of them")
    parser.add_argument("--plot", type=Path, help="draw to this .png, .svg or .pdf")
    parser.add_argument("--json", action="store_true")
    return parser


def solve(
    arguments: argparse.Namespace,
    swarm: SwarmDescription,
    strategy: StrategyConfig,
    *,
    real: bool | None = None,
) -> Speedup:
    """Predict one strategy, by a model of it or by itself."""
    if not (arguments.real if real is None else real):
        return time_to_solve(swarm, strategy, seconds=arguments.seconds, seed=arguments.seed)
    seconds = arguments.seconds or 60.0
    forecast = emulate(divided(swarm, strategy), strategy, seconds=seconds, seed=arguments.seed)
    return Speedup(
        label=label_of(strategy),
        speedup=speedup(swarm, strategy, forecast),
        parts=parts_of(swarm, strategy),
        forecast=forecast,
    )


def plan(arguments: argparse.Namespace) -> None:
    """Predict, print, draw.

    Raises:
        UsageError: the options describe no swarm.
    """
    if arguments.plot is not None:
        check_path(arguments.plot)
        pyplot()
    swarm = described(arguments)
    if arguments.seconds is not None and not 0 < arguments.seconds <= 1e5:
        raise UsageError("--seconds must be above 0, and at most 100000")
    strategies = [strategy_of(text) for text in arguments.strategy] or [
        *ALL_STRATEGIES,
        *(() if arguments.real else (GradAverageConfig(backend="torch"),)),
    ]
    predictions = [solve(arguments, swarm, one) for one in strategies]
    chosen, doubled = choose(swarm, predictions, arguments.trust), None
    if chosen is not None and 2 * swarm.nodes <= MAX_NODES:
        twice = msgspec.structs.replace(swarm, nodes=2 * swarm.nodes)
        doubled = solve(arguments, twice, strategies[predictions.index(chosen)], real=False)
    advice = advise(swarm, predictions, arguments.trust, doubled)
    if arguments.json:
        print(msgspec.json.encode({"swarm": swarm, "strategies": predictions, "advice": advice}).decode())
    else:
        table = Table(title=f"{swarm.nodes} nodes, {swarm.size:,} parameters; per node", title_justify="left")
        table.add_column("strategy", no_wrap=True)
        for name in BITS:
            table.add_column(name, justify="right")
        for one in predictions:
            table.add_row(*row(one))
        console = Console(width=None if sys.stdout.isatty() else 110)
        console.print(table)
        for sentence in advice:
            console.print(sentence, highlight=False)
    if arguments.plot is not None:
        draw(predictions, swarm, arguments.plot)


def main() -> None:
    """Run from the command line."""
    try:
        plan(options().parse_args())
    except P2PDRLError as error:
        print(f"plan_swarm: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
