"""Measure one averaging round of four processes: torch's gloo, ours exact, ours by gossip.

Four worker processes on loopback take turns at every method within one run, so that what else the
machine does falls on all alike. Per method and size: the median over rounds of the slowest worker's wall
time, the ratio to gloo's all_reduce, and the CPU time of all workers together. ``exact`` is the swarm's
own all-reduce (`p2pdrl.strategies.averaging.allreduce`), ``gossip`` one pairwise exchange of every worker.

    python scripts/bench_averaging.py
    python scripts/bench_averaging.py --sizes 100000 --rounds 200 --no-key
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, TextIO, cast

WORKER = Path(__file__).with_name("averaging_worker.py")
SIZES = (10_000_000, 1_700_000, 100_000)
METHODS = ("gloo", "exact/none", "exact/bf16", "gossip/none", "gossip/bf16")


class Worker:
    """One process, spoken to in lines of JSON."""

    def __init__(self, rank: int, ranks: int, folder: str, key: bool) -> None:
        command = [sys.executable, str(WORKER), str(rank), str(ranks), folder, "key" if key else "nokey"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._to, self._from = cast("TextIO", self._process.stdin), cast("TextIO", self._process.stdout)

    def say(self, **words: object) -> None:
        """Send one line."""
        self._to.write(json.dumps(words) + "\n")
        self._to.flush()

    def hear(self) -> dict[str, Any]:
        """Read one line."""
        line = self._from.readline()
        if not line:
            raise SystemExit(f"worker {self._process.pid} ended early")
        heard: dict[str, Any] = json.loads(line)
        return heard

    def end(self) -> None:
        """End it."""
        self._to.close()
        self._process.wait(20)


class Team:
    """All workers together."""

    def __init__(self, ranks: int, *, key: bool) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.workers = [Worker(rank, ranks, self._folder.name, key) for rank in range(ranks)]

    def ask(self, **words: object) -> list[dict[str, Any]]:
        """Say the same to all; return the answers."""
        for worker in self.workers:
            worker.say(**words)
        return [worker.hear() for worker in self.workers]

    def close(self) -> None:
        """End all."""
        for worker in self.workers:
            worker.end()
        self._folder.cleanup()


def measure(team: Team, size: int, rounds: int, methods: list[str]) -> dict[str, tuple[float, float]]:
    """Return (median wall seconds of the slowest worker, mean CPU seconds of all) by method."""
    walls: dict[str, list[float]] = defaultdict(list)
    cpus: dict[str, list[float]] = defaultdict(list)
    for method in methods:
        answers = team.ask(do="prepare", method=method, size=size)
        team.ask(do="meet", method=method, addresses=[answer["address"] for answer in answers])
        team.ask(do="gathered", method=method)
    for turn in range(rounds + 2):
        for method in methods:
            answers = team.ask(do="round", method=method)
            team.ask(do="rest", method=method)
            if turn >= 2:
                walls[method].append(max(answer["wall_s"] for answer in answers))
                cpus[method].append(sum(answer["cpu_s"] for answer in answers))
    team.ask(do="forget")
    return {name: (statistics.median(walls[name]), statistics.fmean(cpus[name])) for name in methods}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two rows are of the same size and swarm."""
    return bool(one["size"] == other["size"] and one["swarm"] == other["swarm"])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=list(SIZES))
    parser.add_argument("--rounds", type=int, default=0, help="0 chooses by size")
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--no-key", action="store_true", help="leave out the run with a swarm key")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    teams = {"keyless": Team(arguments.ranks, key=False)}
    if not arguments.no_key:
        teams["keyed"] = Team(arguments.ranks, key=True)
    rows = []
    for size in arguments.sizes:
        rounds = arguments.rounds or max(7, min(60, 40_000_000 // size))
        for name, team in teams.items():
            for method, (wall_s, cpu_s) in measure(team, size, rounds, arguments.methods).items():
                rows.append({"size": size, "swarm": name, "method": method, "wall_s": wall_s, "cpu_s": cpu_s})
    for team in teams.values():
        team.close()
    if arguments.json:
        print(json.dumps(rows))
        return
    print(f"{'floats':>10} {'swarm':8} {'method':12} {'wall ms':>9} {'x gloo':>7} {'CPU ms':>9}")
    for row in rows:
        gloo = [r["wall_s"] for r in rows if r["method"] == "gloo" and same(r, row)]
        ratio = f"{row['wall_s'] / gloo[0]:7.2f}" if gloo else "      -"
        print(
            f"{row['size']:>10} {row['swarm']:8} {row['method']:12} {row['wall_s'] * 1e3:9.2f} {ratio} "
            f"{row['cpu_s'] * 1e3:9.2f}"
        )


if __name__ == "__main__":
    main()
