#!/usr/bin/env python3
"""Compare what the planner predicts with what real nodes do: the same swarm, both ways, figure by figure.

    python scripts/check_planner.py
    python scripts/check_planner.py --nodes 8 --strategies --consensus sgp
    python scripts/check_planner.py --nodes 4 --strategies adpsgd dsgd --consensus --json

Claimed to be within 30 % of what is measured, while cores are less than half busy: rounds per second of a
node, its payload per second, and exchanges until nodes that differ agree to 1 %. Real `p2pdrl node` processes
run on loopback. An update takes ``--update-s``, with more than 4 nodes longer in proportion, so that what is
measured is the swarm and not the machine.

Rounds and bytes: one swarm is switched from strategy to strategy, and watched for ``--seconds`` under each.
All strategies take part but ``local``, which exchanges nothing. Two things that depend on machine and task
are measured and given to the planner: seconds per call (from the pairwise exchanges of the first swarm), and
the share of entries that strom's messages name.

Exchanges to 1 %: of strategies that mix bit by bit. Others average exactly, or begin equal. Nodes start from
independent vectors and train alone, with learning rate zero; once all are there the strategy is put in force,
and their vectors are read until they agree. (Nodes that begin while others still start would push among
themselves, and lose their turn to refusals.) Counted is what changed a vector: exchanges, merged pushes,
rounds of a node. The order of meetings is random, so one run tells little: there are ``--repeats`` at least,
and as many as bring the standard error to `ERROR` of the mean, by how much predicted runs differ.

± is the standard error of what was measured: of exchanges to 1 % by the spread of predicted runs or of the
real ones, whichever is more; of the others by how both halves of the time watched differ.

Not claimed, and shown with ``--all`` only, is everything else. Seconds of a round above all: on cores that
nodes, learners and this script share, a round of 10 ms takes as long as the scheduler lets it wait, which no
description tells. Rounds per second hardly depend on it while updates take much longer.

It takes about 13 minutes. Ends with 0 when all ratios (measured / predicted) are within 30 %, with 1 when one
isn't, with 2 on bad options, with 3 when nodes don't start or don't follow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from statistics import fmean, median, stdev
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from p2pdrl.config.mode import changed_options, protocol_of
from p2pdrl.config.strategy import AdpsgdConfig, HogwildConfig, LocalConfig, StrategyConfig, StromConfig
from p2pdrl.errors import P2PDRLError, UsageError
from p2pdrl.planner.description import LOOPBACK, CallCosts, Machine, SwarmDescription
from p2pdrl.planner.forecast import Forecast
from p2pdrl.planner.parsing import strategy_of
from p2pdrl.planner.simulate import predict
from support.agreeing_nodes import gather, started
from support.live_swarm import LiveSwarm, Measured

STRATEGIES = (
    *("adpsgd", "sgp", "gala", "dsgd", "strom:tau=2e-6"),
    *("grad_average", "param_average:every_updates=2", "federated:every_updates=2"),
    *("server_sync", "server_async", "hogwild"),
)
GATHER = {
    "adpsgd": "adpsgd:every_updates=0,every_s=1,compression=none",
    "sgp": "sgp:every_updates=0,every_s=1,compression=none",
    "gala": "gala:every_updates=0,every_s=1,partners=exponential,compression=none",
    "dsgd": "dsgd:every_updates=2,compression=none",
}
"""What is watched coming together, slowly enough to look at."""
CLAIM = 0.3
"""A ratio further from 1 is outside."""
MOST_BUSY = 0.5
LEARNING_RATE = 1e-6
"""So that strom has something to tell."""
ERROR = 0.12
"""Standard error, as a share, of measured exchanges to consensus."""
MOST_REPEATS = 10
SETTLE_S = 2.0
HELPERS_S = 90.0
TRIES = 100
"""Seeds over which predicted exchanges to consensus are averaged."""


@dataclass(frozen=True)
class Row:
    """One figure, both ways; ``error`` is the standard error of what was measured."""

    nodes: int
    strategy: str
    figure: str
    measured: float | None
    error: float
    predicted: float | None
    busy: float
    claimed: bool = True

    @property
    def ratio(self) -> float | None:
        """Measured over predicted."""
        return self.measured / self.predicted if self.measured is not None and self.predicted else None

    @property
    def verdict(self) -> str:
        """Whether the claim holds."""
        if not self.claimed:
            return "not claimed"
        return "ok" if self.ratio is not None and abs(self.ratio - 1.0) <= CLAIM else "outside"


def tell(text: str) -> None:
    """Show progress."""
    print(text, file=sys.stderr, flush=True)


def paced(nodes: int, arguments: argparse.Namespace) -> argparse.Namespace:
    """The options for so many nodes."""
    longer_s = arguments.update_s * max(1.0, nodes / 4)
    return argparse.Namespace(**(vars(arguments) | {"update_s": longer_s}))


def described(nodes: int, arguments: argparse.Namespace, costs: CallCosts) -> SwarmDescription:
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


def calibrated(live: LiveSwarm, swarm: SwarmDescription) -> CallCosts:
    """Costs with which an exchange takes as long as most do here: the call's share is fitted.

    An exchange has two calls' worth of work in it (half, one, half), one after the other.
    """
    rounds = [one for node in live.nodes for one in live.get("/v1/rounds", node)]
    took_s = [one["seconds"] for one in rounds if one["outcome"] == "ok"]
    if not took_s:
        raise SystemExit("no exchange went well")
    predicted_s = predict(swarm, AdpsgdConfig(), seconds=20).round_s
    call_s = max(1e-4, swarm.costs.call_s + (median(took_s) - predicted_s) / 2.0)
    return msgspec.structs.replace(swarm.costs, call_s=call_s)


def told(live: LiveSwarm) -> tuple[float, float]:
    """Strom messages so far, and entries in them, over all nodes."""
    facts = [live.get("/v1/mode", node)["facts"] for node in live.nodes]
    messages = [one.get("messages", 0) for one in facts]
    return sum(messages), sum(
        m * one.get("entries_per_message", 0) for m, one in zip(messages, facts, strict=True)
    )


def settle(live: LiveSwarm, strategy: StrategyConfig, arguments: argparse.Namespace) -> None:
    """Let a strategy get under way; Hogwild's helpers are processes that have to start first."""
    time.sleep(SETTLE_S)
    until_s = time.monotonic() + HELPERS_S
    while isinstance(strategy, HogwildConfig) and time.monotonic() < until_s:
        if min(live.measure(protocol_of(strategy), 2.0).updates_s) > 1.2 / arguments.update_s:
            return


def watched(
    nodes: int, arguments: argparse.Namespace, costs: CallCosts | None
) -> tuple[list[Row], CallCosts]:
    """Run one swarm through all strategies."""
    rows: list[Row] = []
    learning = {"task.algorithm.learning_rate": LEARNING_RATE}
    with LiveSwarm(nodes, options(arguments, AdpsgdConfig()) | learning) as live:
        started(live)
        if costs is None:
            time.sleep(SETTLE_S + arguments.seconds / 2)
            costs = calibrated(live, described(nodes, arguments, CallCosts()))
        swarm = described(nodes, arguments, costs)
        for name in arguments.strategies:
            strategy = strategy_of(name)
            live.set_mode(strategy)
            settle(live, strategy, arguments)
            before = told(live)
            one, two = (live.measure(protocol_of(strategy), arguments.seconds / 2) for _ in range(2))
            if isinstance(strategy, StromConfig):
                messages, entries = (now - then for now, then in zip(told(live), before, strict=True))
                moved = min(1.0, max(entries, 1.0) / max(messages, 1.0) / arguments.size)
                swarm = msgspec.structs.replace(swarm, moved=moved)
            rows += figures((one, two), predict(swarm, strategy, seconds=60), nodes)
            tell(f"{nodes} nodes, {name}: {one.outcomes}, then {two.outcomes}")
    return rows, costs


def figures(both: tuple[Measured, Measured], said: Forecast, nodes: int) -> list[Row]:
    """One strategy's rows."""
    payload = (said.bytes_out_s + said.bytes_in_s) / 2
    if said.strategy.startswith("server"):
        payload /= 2  # nodes book what their workers send and get, and not what they serve
    pairs = (
        ("rounds/s", [one.rounds_s for one in both], said.rounds_s),
        ("payload, bytes/s", [one.bytes_s for one in both], payload),
        ("updates/s", [fmean(one.updates_s) for one in both], said.updates_s),
        ("all bodies, bytes/s", [one.body_s for one in both], said.wire_out_s),
        ("seconds of a round", [one.round_s for one in both], said.round_s),
        ("learner waits, share", [one.waiting for one in both], said.waiting),
        ("staleness, versions", [one.staleness for one in both], said.staleness),
    )
    busy = max(one.cpu for one in both)
    return [
        Row(nodes, said.strategy, name, fmean(real), abs(real[0] - real[1]) / 2, one, busy, place < 2)
        for place, (name, real, one) in enumerate(pairs)
    ]


def gathered(
    nodes: int, name: str, arguments: argparse.Namespace, costs: CallCosts
) -> tuple[Row, dict[str, Any]]:
    """Predict how nodes come together, then watch them do it as often as that wants."""
    swarm, strategy = described(nodes, arguments, costs), strategy_of(GATHER[name])
    said = [predict(swarm, strategy, seconds=60, seed=seed) for seed in range(TRIES)]
    reached = [one.consensus_exchanges for one in said if one.consensus_exchanges is not None]
    mean, deviation = fmean(reached), stdev(reached)
    wanted = math.ceil((deviation / mean / ERROR) ** 2)
    repeats = min(max(arguments.repeats, wanted), max(arguments.repeats, MOST_REPEATS))
    most_s = 20.0 + 3.0 * max(one.consensus_s or 0.0 for one in said)
    alone = options(arguments, LocalConfig())
    runs = [gather(nodes, alone, strategy, 1000 * (nodes + 100 * run), most_s) for run in range(repeats)]
    found = [one for one, _ in runs]
    good = [one for one in found if one is not None]
    measured = fmean(good) if len(good) == repeats else None
    if len(good) > 1:
        deviation = max(deviation, stdev(good))
    error, busy = deviation / math.sqrt(repeats), max(one for _, one in runs)
    tell(f"{nodes} nodes, {name}: exchanges to 1 % {found}, predicted {mean:.1f}, deviation {deviation:.1f}")
    row = Row(nodes, name, "exchanges to 1 %", measured, error, mean, busy)
    return row, {
        "nodes": nodes,
        "strategy": name,
        "runs": found,
        "deviation": deviation,
        "predicted": reached,
    }


def show(rows: list[Row]) -> None:
    """Print the table."""
    table = Table(title="measured and predicted, per node", title_justify="left")
    for name in ("nodes", "strategy", "figure", "measured", "±", "predicted", "ratio", ""):
        table.add_column(name, justify="left" if name in {"strategy", "figure", ""} else "right")
    for row in rows:
        measured, predicted, ratio = (
            "-" if one is None else f"{one:.{digits}}"
            for one, digits in ((row.measured, "4g"), (row.predicted, "4g"), (row.ratio, "2f"))
        )
        table.add_row(
            *(str(row.nodes), row.strategy, row.figure, measured, f"{row.error:.2g}"),
            *(predicted, ratio, row.verdict),
        )
    Console(width=None if sys.stdout.isatty() else 110).print(table)
    busy = max(row.busy for row in rows)
    print(f"cores busy {fmean(row.busy for row in rows):.0%} on average, at most {busy:.0%}")
    if busy > MOST_BUSY:
        print(f"that is more than {MOST_BUSY:.0%} at times: nothing is claimed of such rows")


def check(arguments: argparse.Namespace) -> int:
    """Measure, predict, print what there is; return how to end."""
    costs = None if arguments.call_s is None else CallCosts(call_s=arguments.call_s)
    rows: list[Row] = []
    runs: list[dict[str, Any]] = []
    error = ""
    try:
        for nodes in arguments.nodes if arguments.strategies else ():
            found, costs = watched(nodes, paced(nodes, arguments), costs)
            rows += found
        for nodes, name in itertools.product(arguments.nodes, arguments.consensus):
            row, details = gathered(nodes, name, paced(nodes, arguments), costs or CallCosts())
            rows.append(row)
            runs.append(details)
    except (P2PDRLError, SystemExit) as ended:  # `LocalSwarm` ends scripts when nodes don't follow
        error = str(ended) or "ended"
    if arguments.json:
        plain = [asdict(row) | {"ratio": row.ratio, "verdict": row.verdict} for row in rows]
        call_s = (costs or CallCosts()).call_s
        print(json.dumps({"call_s": call_s, "rows": plain, "consensus": runs, "error": error}, indent=1))
    elif rows:
        show([row for row in rows if row.claimed or arguments.all])
    if error:
        tell(f"check_planner: {error}")
        return 3
    return int(any(row.verdict == "outside" for row in rows))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--strategies", nargs="*", default=list(STRATEGIES), help="NAME[:KEY=VALUE,…]")
    parser.add_argument("--consensus", nargs="*", default=list(GATHER), choices=list(GATHER))
    parser.add_argument("--repeats", type=int, default=2, help="runs to 1 %% of each strategy, at least")
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--update-s", type=float, default=0.25, help="with 4 nodes or fewer")
    parser.add_argument("--overhead-s", type=float, default=0.001, help="of an update beside --update-s")
    parser.add_argument("--seconds", type=float, default=8.0, help="watched per strategy")
    parser.add_argument("--call-s", type=float, help="seconds per call; measured when left out")
    parser.add_argument("--all", action="store_true", help="show what isn't claimed, too")
    parser.add_argument("--json", action="store_true", help="print all figures instead of the table")
    arguments = parser.parse_args()
    try:
        for text in arguments.strategies:
            strategy_of(text)
    except UsageError as error:
        parser.error(str(error))
    sys.exit(check(arguments))


if __name__ == "__main__":
    main()
