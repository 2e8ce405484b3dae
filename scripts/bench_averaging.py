"""Measure one averaging round of four processes: torch's gloo, ours exact, ours by gossip, and hivemind.

Four worker processes on loopback take turns at every method within one run, so that what else the
machine does falls on all alike. Per method and size: the median over rounds of the slowest worker's wall
time, its ratio to gloo's all_reduce and to ours exact, and the CPU time of all workers together. ``exact``
is the swarm's own all-reduce (`p2pdrl.strategies.allreduce.reduce_scatter`), ``gossip`` one pairwise exchange
of every worker.

    python scripts/bench_averaging.py
    python scripts/bench_averaging.py --sizes 100000 --rounds 200 --no-key

With ``--hivemind-python``, four peers of hivemind (`support/hivemind_worker.py`) take turns too. The
interpreter is one of an environment of its own, which p2pdrl does not share:

    python3 -m venv /tmp/hivemind_env
    /tmp/hivemind_env/bin/pip install hivemind==1.1.12 torch==2.13.0
    python scripts/bench_averaging.py --hivemind-python /tmp/hivemind_env/bin/python

``hivemind`` is the exact all-reduce of its `DecentralizedAverager` by all peers as one group. Matchmaking is
over before the clock starts: every peer has taken a step with ``require_trigger``, and the round begins when
all have found their group. Timed is, as with the others, what a caller waits for: from the trigger
(``allow_allreduce``) to the result of the step, with the vector averaged in place. ``hivemind+meet`` adds
the time from the call of ``step`` until every peer has its group. The CPU time is that of the worker, the
averager, the DHT and the daemon p2pd. Vectors are not compressed; libp2p always encrypts, whether our swarm
has a key or not. Every average is checked after its round, as hivemind reports success too when a part was
lost on the way. A round without a group, without a result in time or with a wrong average has failed: it
gives no time, and the last column counts it.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.hivemind_team import ROWS, HivemindTeam
from support.worker_team import Team, Worker, WorkerLostError

WORKER = Path(__file__).parent / "support" / "averaging_worker.py"
SIZES = (10_000_000, 1_700_000, 100_000)
METHODS = ("gloo", "exact/none", "exact/bf16", "gossip/none", "gossip/bf16")
WARM_UPS = 2


@dataclass
class MethodSamples:
    """What the rounds of one method took.

    Attributes:
        walls_s: wall seconds of the slowest worker, by round.
        cpus_s: CPU seconds of all workers together, by round.
        failed: rounds that gave neither.
    """

    walls_s: list[float] = field(default_factory=list)
    cpus_s: list[float] = field(default_factory=list)
    failed: int = 0

    def row(self) -> dict[str, Any]:
        """Return the median wall and mean CPU seconds, None when every round failed."""
        return {
            "wall_s": statistics.median(self.walls_s) if self.walls_s else None,
            "cpu_s": statistics.fmean(self.cpus_s) if self.cpus_s else None,
            "failed": self.failed,
            "rounds": len(self.walls_s) + self.failed,
        }


def team_of(ranks: int, folder: str, *, key: bool) -> Team:
    """Start the workers of our methods and of gloo."""
    words = [str(ranks), folder, "key" if key else "nokey"]
    return Team([Worker([sys.executable, str(WORKER), str(rank), *words]) for rank in range(ranks)])


def measure(
    team: Team, hivemind: HivemindTeam | None, size: int, rounds: int, methods: Sequence[str]
) -> dict[str, MethodSamples]:
    """Return what the rounds took, by row of the table."""
    by_method: dict[str, MethodSamples] = defaultdict(MethodSamples)
    for method in methods:
        answers = team.ask(do="prepare", method=method, size=size)
        team.ask(do="meet", method=method, addresses=[answer["address"] for answer in answers])
        team.ask(do="gathered", method=method)
    if hivemind is not None:
        hivemind.begin(size)
    for turn in range(rounds + WARM_UPS):
        times = {}
        for method in methods:
            answers = team.ask(do="round", method=method)
            team.ask(do="rest", method=method)
            times[method] = (
                max(answer["wall_s"] for answer in answers),
                sum(answer["cpu_s"] for answer in answers),
            )
        names = [*methods]
        if hivemind is not None:
            names += ROWS
            times |= hivemind.turn()
        for name in names if turn >= WARM_UPS else []:
            if name in times:
                by_method[name].walls_s.append(times[name][0])
                by_method[name].cpus_s.append(times[name][1])
            else:
                by_method[name].failed += 1
    team.ask(do="forget")
    return by_method


def ratio(rows: list[dict[str, Any]], row: dict[str, Any], method: str) -> str:
    """Return how many times as long as ``method`` of the same size and swarm a row took."""
    for other in rows:
        same = (other["size"], other["swarm"], other["method"]) == (row["size"], row["swarm"], method)
        if same and row["wall_s"] is not None:
            return f"{row['wall_s'] / other['wall_s']:7.2f}"
    return f"{'-':>7}"


def milliseconds(value_s: float | None) -> str:
    """Return nine characters."""
    return f"{'-':>9}" if value_s is None else f"{value_s * 1e3:9.2f}"


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    head = f"{'floats':>10} {'swarm':8} {'method':14} {'wall ms':>9} {'x gloo':>7} {'x exact':>7}"
    print(f"{head} {'CPU ms':>9} {'failed':>7}")
    for row in rows:
        print(
            f"{row['size']:>10} {row['swarm']:8} {row['method']:14} {milliseconds(row['wall_s'])} "
            f"{ratio(rows, row, 'gloo')} {ratio(rows, row, 'exact/none')} {milliseconds(row['cpu_s'])} "
            f"{str(row['failed']) + '/' + str(row['rounds']):>7}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=0, help="0 chooses by size")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--no-key", action="store_true", help="leave out the run with a swarm key")
    parser.add_argument("--hivemind-python", metavar="PATH", help="an interpreter with hivemind 1.1.x")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = []
    with ExitStack() as stack:
        teams = {}
        for name in ("keyless",) if arguments.no_key else ("keyless", "keyed"):
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            teams[name] = team_of(arguments.ranks, folder, key=name == "keyed")
            stack.callback(teams[name].close)
        hivemind = None
        if arguments.hivemind_python:
            hivemind = stack.enter_context(HivemindTeam(arguments.hivemind_python, arguments.ranks))
        for size in arguments.sizes:
            rounds = arguments.rounds or max(7, min(60, 40_000_000 // size))
            for name, team in teams.items():
                by_method = measure(team, hivemind, size, rounds, arguments.methods)
                rows += [
                    {"size": size, "swarm": name, "method": method, **samples.row()}
                    for method, samples in by_method.items()
                ]
    if arguments.json:
        print(json.dumps(rows))
    else:
        show(rows)


if __name__ == "__main__":
    try:
        main()
    except WorkerLostError as error:
        raise SystemExit(str(error)) from error
