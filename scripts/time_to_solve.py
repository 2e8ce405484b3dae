"""Time to a solved task against the number of nodes: what a further machine gains.

A swarm of N nodes trains a preset until its evaluated policy is at the goal twice in a row. By default it
trains in virtual time, in one process: trainers, strategies, evaluations are real, and how long something
takes is what is said here (`support.virtual_training`). So N machines need no N machines, and nothing is
disturbed by what else this one does. A gradient costs what it costs on this machine (`--gradient-ms`: what
is said), an environment step `--pace-ms`, a way over a link what `--link` says.

    seconds          until the second of those two evaluations, median and range over the seeds
    speed-up         the median of one node's seconds, of whatever setting is quickest alone, through that;
                     in brackets the interval that nine of ten such ratios are in when the seeds of both are
                     drawn anew from those that there are (percentile bootstrap)
    samples          environment steps of the whole swarm until then, and as a share of one node's
    gradients        of a node
    MB               sent by a node

With `--learners 1` one node learns and all act (IMPALA, Ape-X); else all learn. `learner busy` is the part of
its time that the learner computes, `staleness` how many versions old the policy was that acted.

What changes with N is the task's own business (`task.scaling`); what else differs between settings is said by
`--set`, and a name for a setting by `--name`. `--slow 1x10` has one of the nodes ten times slower; `--members
60:8 120:2` has four more nodes join a swarm of four after a minute, and six of eight killed after two.

    python scripts/time_to_solve.py lunarlander --goal 200
    python scripts/time_to_solve.py lunarlander --goal 200 --set task.scaling=none --name "as one alone"
    python scripts/time_to_solve.py lunarlander --goal 200 --nodes 4 --members 60:8 120:2 --name elastic
    python scripts/time_to_solve.py lunarlander --goal 200 --nodes 2 4 --name real --real

`--real` has nodes of processes and sockets on this machine instead, whose environments sleep; figures mean
something while the machine is less than about half busy (`busy`). With `--pace-ms 0` they do not sleep: that
is what the cores of this machine make of it, and policies are judged afterwards.

Rows are added to OUT/runs.csv as they come; what is there isn't run again. `--table-only` reads them.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

from p2pdrl.config.loader import resolve
from p2pdrl.config.mode import protocol_of
from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import ConfigError, P2PDRLError, UsageError
from p2pdrl.planner.description import LAN, LOOPBACK, WAN
from p2pdrl.planner.parsing import machines_of
from p2pdrl.rl.evaluate import evaluate
from p2pdrl.tensors.checkpoint import from_bytes
from p2pdrl.workers.child import keep_freed_memory
from p2pdrl.workers.evaluator import Players
from support.plots import COLOURS, pyplot, save
from support.rows import Rows, command_line, commit
from support.virtual_actors import VirtualActors
from support.virtual_training import Costs, Judged, VirtualTraining, measured_costs

__all__ = ["Setting", "run_virtual", "table"]

FIELDS = (
    *(
        "name",
        "kind",
        "preset",
        "strategy",
        "seed",
        "nodes",
        "goal",
        "pace_ms",
        "link",
        "scaling",
        "learners",
        "slow",
        "members",
    ),
    *("solved", "seconds", "samples", "node_steps", "gradients", "mb", "waited", "best", "wall_s", "busy"),
    *("learner_busy", "staleness"),
    *("gradient_ms", "row_us", "commit", "command", "curve"),
)
PICTURES_ACROSS = 3
ALIKE = ("kind", "strategy", "pace_ms", "link", "scaling", "learners", "slow", "members")
"""What rows of one name, task and number of nodes have in common."""
FEWEST_SEEDS, DRAWS = 3, 4000
"""Of an interval: of seeds that it takes, and how often they are drawn."""
LOOK_S = 0.25
"""How often a real swarm is asked how far it is."""
TELL_S = 10.0
"""How often a virtual swarm tells people of its evaluations at most."""
LINKS = {"loopback": LOOPBACK, "lan": LAN, "wan": WAN}


@dataclass(frozen=True)
class Setting:
    """One way to train a task on any number of nodes.

    Attributes:
        name: for people.
        preset: what is trained.
        sets: ``KEY=VALUE`` over it.
        goal: evaluated return.
        link: of `LINKS`.
        costs: of environment steps and gradients.
        slow: ``COUNTxFACTOR``: that many of the nodes are that many times slower.
        learners: how many of the nodes learn; 0 for all.
        members: (seconds, nodes): how many are alive from then on.
    """

    name: str
    preset: str
    sets: tuple[str, ...]
    goal: float
    link: str
    costs: Costs
    slow: tuple[str, ...] = ()
    members: tuple[tuple[float, int], ...] = ()
    learners: int = 0

    def sets_of(self, seed: int) -> list[str]:
        """What is set over the preset."""
        return [*self.sets, f"task.seed={seed}", "task.stop.mean_return=none"]

    def task(self, seed: int) -> TaskConfig:
        """What is trained.

        Raises:
            ConfigError: it can't be.
        """
        return resolve(files=[self.preset], sets=self.sets_of(seed)).config.task

    def factors(self, nodes: int) -> tuple[float, ...]:
        """How many times slower than the costs say each node is.

        Raises:
            UsageError: there are more slow nodes than nodes.
        """
        return tuple(machine.factor for machine in machines_of(nodes, 1.0, self.slow))

    async def plan(self, swarm: VirtualTraining) -> None:
        """Have nodes come, and kill others, as ``members`` says."""
        loop = asyncio.get_running_loop()
        for at_s, nodes in self.members:
            await asyncio.sleep(at_s - loop.time())
            while len(swarm.living) < nodes:
                await swarm.join()
            for number in swarm.living[nodes:]:
                await swarm.kill(number)

    def row(self, nodes: int, seed: int) -> dict[str, Any]:
        """What is known before it is run."""
        task = self.task(seed)
        return {
            "name": self.name,
            "preset": self.preset,
            "strategy": protocol_of(task.strategy),
            "seed": seed,
            "nodes": nodes,
            "goal": self.goal,
            "pace_ms": 1000 * self.costs.env_step_s,
            "link": self.link,
            "scaling": task.scaling,
            "learners": self.learners or nodes,
            "slow": " ".join(self.slow),
            "members": " ".join(f"{at_s:g}:{count}" for at_s, count in self.members),
            "gradient_ms": f"{1000 * self.costs.gradient_s:.3g}",
            "row_us": f"{1e6 * self.costs.row_s:.3g}",
        }


def run_virtual(setting: Setting, nodes: int, seed: int) -> dict[str, Any]:
    """Train one swarm in virtual time; return its row without commit and command."""
    import torch

    torch.set_num_threads(1)
    keep_freed_memory()
    began_s = time.perf_counter()
    found = (all_learn if not setting.learners else one_learns)(setting, nodes, seed)
    judged: Sequence[Judged] = found.pop("judged")
    last = judged[-1] if judged else Judged(0.0, 0, float("nan"))
    return (
        setting.row(nodes, seed)
        | found
        | {
            "kind": "virtual",
            "seconds": round(last.seconds, 1),
            "samples": last.env_steps,
            "best": round(max((one.value for one in judged), default=float("nan")), 1),
            "wall_s": round(time.perf_counter() - began_s, 1),
            "busy": "",
            "curve": curve(judged),
        }
    )


def teller(setting: Setting, nodes: int, seed: int) -> Callable[[Judged], None]:
    """Return what tells people of evaluations of a run that is in progress, once in `TELL_S`."""
    began_s = told_s = time.perf_counter()

    def tell(judged: Judged) -> None:
        nonlocal told_s
        if (now_s := time.perf_counter()) < told_s + TELL_S:
            return
        told_s = now_s
        print(
            f"{setting.name}, {nodes} nodes, seed {seed}: {judged.value:.1f} after {judged.seconds:.0f} s, "
            f"{judged.env_steps:,} steps ({now_s - began_s:.0f} s here)",
            file=sys.stderr,
            flush=True,
        )

    return tell


def one_learns(setting: Setting, nodes: int, seed: int) -> dict[str, Any]:
    """Train a swarm of one learner and many actors."""
    swarm = VirtualActors(
        setting.task(seed), nodes, setting.costs, LINKS[setting.link],
        seed=seed, factors=setting.factors(nodes), say=teller(setting, nodes, seed),
    )  # fmt: skip
    solved = swarm.run(setting.goal)
    swarm.close()
    return {
        "judged": swarm.judged,
        "solved": int(solved),
        "node_steps": round(swarm.env_steps / nodes),
        "gradients": swarm.gradients,
        "mb": round(swarm.bytes_out / nodes / 1e6, 2),
        "waited": "",
        "learner_busy": round(swarm.busy_s / swarm.seconds, 3),
        "staleness": round(statistics.mean(swarm.staleness), 1),
    }


def all_learn(setting: Setting, nodes: int, seed: int) -> dict[str, Any]:
    """Train a swarm whose nodes all learn."""
    swarm = VirtualTraining(
        setting.task(seed), nodes, setting.costs, LINKS[setting.link],
        seed=seed, factors=setting.factors(nodes), say=teller(setting, nodes, seed),
    )  # fmt: skip
    solved = swarm.run(setting.goal, plan=setting.plan)
    waited_s = statistics.mean(learner.waited_s for learner in swarm.learners)
    return {
        "judged": swarm.judged,
        "solved": int(solved),
        "node_steps": round(swarm.env_steps / nodes),
        "gradients": round(statistics.mean(learner.gradients for learner in swarm.learners)),
        "mb": round(swarm.bytes_per_node / 1e6, 2),
        "waited": round(waited_s / max(swarm.judged[-1].seconds if swarm.judged else 0.0, 1e-9), 3),
    }


class Judge:
    """Plays evaluations of a real swarm's policies, in the order in which they come, in a thread.

    Args:
        setting: whose goal counts.
        waits: play nothing before `finish`: where the swarm itself leaves no processor free.
    """

    def __init__(self, setting: Setting, *, waits: bool) -> None:
        import torch

        torch.set_num_threads(1)
        self._setting, self._waits = setting, waits
        self._players = Players("cpu", allow_import=False)
        self._thread = ThreadPoolExecutor(1)
        self._due: list[tuple[float, int, bytes]] = []
        self._playing: list[Future[Judged]] = []

    def take(self, seconds: float, env_steps: int, checkpoint: bytes) -> None:
        """Have a policy judged that the swarm had at that time."""
        if self._waits:
            self._due.append((seconds, env_steps, checkpoint))
        else:
            number = len(self._playing) + 1
            self._playing.append(self._thread.submit(self._play, seconds, env_steps, checkpoint, number))

    def _play(self, seconds: float, env_steps: int, checkpoint: bytes, number: int) -> Judged:
        played = self._players.of(from_bytes(checkpoint))
        asked = self._setting.task(0).evaluation
        return Judged(
            seconds,
            env_steps,
            evaluate(
                played.policy,
                played.task.env,
                asked.episodes,
                greedy=asked.mode == "greedy",
                seed=number,
                normalizer=played.normalizer,
            ).mean,
        )

    def finish(self) -> None:
        """Play what hasn't been, until the goal is reached."""
        self._waits = False
        for one in self._due:
            if self.solved:
                break
            self.take(*one)
            self._playing[-1].result()
        self._thread.shutdown()

    @property
    def judged(self) -> list[Judged]:
        """What has been judged, to the second in a row that is at the goal."""
        found: list[Judged] = []
        for one in self._playing:
            if not one.done() or (len(found) > 1 and self._reached(found)):
                break
            found.append(one.result())
        return found

    @property
    def solved(self) -> bool:
        """Whether two in a row were at the goal."""
        return self._reached(self.judged)

    def _reached(self, judged: Sequence[Judged]) -> bool:
        return len(judged) > 1 and min(one.value for one in judged[-2:]) >= self._setting.goal


def run_real(setting: Setting, nodes: int, seed: int, budget_s: float) -> dict[str, Any]:
    """The same with nodes on loopback whose environments sleep.

    Their policies are fetched as evaluations fall due, and judged here: nodes judge by themselves only as
    often as that takes little of their time.
    """
    from compare_systems import begin
    from support.local_swarm import LocalSwarm, Meter, processors_busy

    began_s = time.perf_counter()
    task = setting.task(seed)
    sets = [
        *setting.sets_of(seed),
        f"node.learner.step_delay_s={setting.costs.env_step_s * task.env.num_envs:g}",
        "task.evaluation.every=0",
    ]
    command = ["--config", setting.preset, *(f"--set={one}" for one in sets)]
    judge = Judge(setting, waits=setting.costs.env_step_s == 0.0)
    seconds, due, points, sent = 0.0, 0, 0, 0.0
    with LocalSwarm(nodes, command) as swarm:
        begin(swarm)
        processors_busy()
        meter = Meter(swarm)
        while swarm.living and not judge.solved and seconds < budget_s:
            time.sleep(LOOK_S)
            steps = max((int(node.status().get("swarm_env_steps") or 0) for node in swarm.living), default=0)
            seconds = time.monotonic() - meter.began_s
            if steps < due + task.evaluation.every:
                continue
            due = steps // task.evaluation.every * task.evaluation.every
            policy = io.BytesIO()
            try:
                swarm.living[points % len(swarm.living)].client.download("/v1/checkpoint", policy)
            except (P2PDRLError, IndexError):
                continue  # it ends just now
            judge.take(seconds, steps, policy.getvalue())
            points, sent = points + 1, meter.sample()["bytes"]
        busy = processors_busy()
    judge.finish()
    judged = judge.judged
    last = judged[-1] if judged else Judged(seconds, 0, float("nan"))
    return setting.row(nodes, seed) | {
        "kind": "real",
        "solved": int(judge.solved),
        "seconds": round(last.seconds, 1),
        "samples": last.env_steps,
        "node_steps": round(last.env_steps / nodes),
        "gradients": "",
        "mb": round(sent / nodes / 1e6, 2),
        "waited": "",
        "best": round(max((one.value for one in judged), default=float("nan")), 1),
        "wall_s": round(time.perf_counter() - began_s, 1),
        "busy": round(busy, 2),
        "curve": curve(judged),
    }


def curve(judged: Sequence[Judged]) -> str:
    """JSON of (seconds, environment steps, mean return)."""
    return json.dumps([(round(one.seconds, 1), one.env_steps, round(one.value, 1)) for one in judged])


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Markdown: a line for each setting and number of nodes, its seeds together."""
    head = ("setting", "nodes", "seeds solved", "seconds", "speed-up", "samples", "of one node's",
            "gradients", "MB", "waited", "learner busy", "staleness", "best of the unsolved")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    groups = grouped(rows)
    for (preset, goal), settings in groups.items():
        alone, alone_rows = single(settings), single_rows(settings)
        lines.append(f"| **{preset} to {goal}** {'| ' * (len(head) - 1)}|")
        for name, by_nodes in settings.items():
            for nodes, found in sorted(by_nodes.items()):
                solved = [row for row in found if row["solved"] == "1"]
                unsolved = [float(row["best"]) for row in found if row["solved"] != "1" and row["best"]]
                middle_s, samples = middle(found, "seconds"), middle(found, "samples")
                cells = (
                    name,
                    str(nodes),
                    f"{len(solved)} of {len(found)}",
                    spread(found, "seconds"),
                    ""
                    if alone is None or middle_s is None
                    else f"{alone[0] / middle_s:.2f}{bracketed(interval(alone_rows, found))}",
                    spread(found, "samples"),
                    "" if alone is None or samples is None else f"{samples / alone[1]:.2f}",
                    spread(found, "gradients"),
                    spread(found, "mb", "{:.1f}"),
                    spread(found, "waited", "{:.0%}"),
                    spread(found, "learner_busy", "{:.0%}"),
                    spread(found, "staleness", "{:.1f}"),
                    ", ".join(f"{best:.0f}" for best in sorted(unsolved)),
                )
                lines.append(f"| {' | '.join(cells)} |")
    return lines


def grouped(
    rows: Sequence[Mapping[str, str]],
) -> dict[tuple[str, str], dict[str, dict[int, list[Mapping[str, str]]]]]:
    """Rows by preset and goal, setting, and number of nodes; those without pace apart from others."""
    groups: dict[tuple[str, str], dict[str, dict[int, list[Mapping[str, str]]]]] = {}
    for row in rows:
        preset = row["preset"] if float(row.get("pace_ms") or 1.0) else f"{row['preset']}, not paced,"
        setting = groups.setdefault((preset, row["goal"]), {}).setdefault(row["name"], {})
        setting.setdefault(int(row["nodes"]), []).append(row)
    return groups


def single_rows(
    settings: Mapping[str, Mapping[int, Sequence[Mapping[str, str]]]],
) -> Sequence[Mapping[str, str]]:
    """Rows of one node, of the setting that is quickest alone; none where none is solved."""
    found = [by_nodes[1] for by_nodes in settings.values() if 1 in by_nodes]
    whole = [(seconds, rows) for rows in found if (seconds := middle(rows, "seconds")) is not None]
    return min(whole, key=lambda one: one[0], default=(0.0, []))[1]


def single(settings: Mapping[str, Mapping[int, Sequence[Mapping[str, str]]]]) -> tuple[float, float] | None:
    """Median seconds and samples of one node, of the setting that is quickest alone; None without one."""
    rows = single_rows(settings)
    seconds, samples = (middle(rows, "seconds"), middle(rows, "samples")) if rows else (None, None)
    return None if seconds is None or samples is None else (seconds, samples)


def interval(
    alone: Sequence[Mapping[str, str]], rows: Sequence[Mapping[str, str]]
) -> tuple[float, float] | None:
    """Where nine of ten ratios of medians are, seeds drawn with replacement; None with few or the same seeds.

    Args:
        alone: of one node; its seconds are divided by those of ``rows``.
    """
    if rows is alone or min(len(alone), len(rows)) < FEWEST_SEEDS:
        return None
    random = np.random.default_rng(0)
    over, under = (
        np.median(random.choice(np.array(seconds), (DRAWS, len(seconds))), axis=1)
        for seconds in map(seconds_of, (alone, rows))
    )
    with np.errstate(invalid="ignore"):
        ratios = over / under
    ratios = ratios[~np.isnan(ratios)]  # neither ends
    low, high = np.quantile(ratios, [0.05, 0.95], method="inverted_cdf")
    return float(low), float(high)


def bracketed(found: tuple[float, float] | None) -> str:
    """An interval behind its figure."""
    return "" if found is None else f" ({found[0]:.2f} to {found[1]:.2f})"


def seconds_of(rows: Sequence[Mapping[str, str]]) -> list[float]:
    """Seconds to the goal; infinite where it wasn't reached."""
    return [float(row["seconds"]) if row["solved"] == "1" else float("inf") for row in rows]


def middle(rows: Sequence[Mapping[str, str]], key: str) -> float | None:
    """The median, in which seeds that weren't solved count as infinite; None where it is one of those."""
    value = statistics.median(float(row[key]) if row["solved"] == "1" else float("inf") for row in rows)
    return None if value == float("inf") else value


def spread(rows: Sequence[Mapping[str, str]], key: str, form: str = "{:,.0f}") -> str:
    """Median and range of what the solved seeds have."""
    values = [float(row[key]) for row in rows if row["solved"] == "1" and row.get(key, "") != ""]
    if not values:
        return ""
    low, mid, high = (form.format(value) for value in (min(values), statistics.median(values), max(values)))
    return mid if low == high else f"{mid} ({low} to {high})"


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw speed-up against nodes, a picture for each task: medians, and their `interval`.

    Settings of one number of nodes, or solved with one alone, are in the table only.
    """

    def is_curve(by_nodes: Mapping[int, Sequence[Mapping[str, str]]]) -> bool:
        return sum(middle(found, "seconds") is not None for found in by_nodes.values()) > 1

    groups = {
        task: settings
        for task, settings in grouped([row for row in rows if float(row["pace_ms"])]).items()
        if single(settings) is not None and any(map(is_curve, settings.values()))
    }
    if not groups:
        return
    plt = pyplot()
    across = min(len(groups), PICTURES_ACROSS)
    down = -(-len(groups) // across)
    figure, axes = plt.subplots(
        down, across, figsize=(5.2 * across, 4.2 * down), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(groups) :]:
        axis.remove()
    for axis, ((preset, goal), settings) in zip(axes.flat, groups.items(), strict=False):
        alone, alone_rows = single(settings), single_rows(settings)
        if alone is None:
            continue
        most = max(nodes for by_nodes in settings.values() for nodes in by_nodes)
        axis.plot([1, most], [1, most], color="gray", linestyle="--", linewidth=1, label="ideal")
        several = [(name, found) for name, found in settings.items() if len(found) > 1]
        for (name, by_nodes), colour in zip(several, COLOURS * len(several), strict=False):
            points = []
            for nodes, found in sorted(by_nodes.items()):
                if (mid := middle(found, "seconds")) is not None:
                    ratio = alone[0] / mid
                    points.append((nodes, ratio, *(interval(alone_rows, found) or (ratio, ratio))))
            heights = [point[1] for point in points]
            below = [point[1] - point[2] for point in points]
            above = [point[3] - point[1] for point in points]
            axis.errorbar(
                [point[0] for point in points], heights, yerr=[below, above], label=name, color=colour,
                marker="o", markersize=4, capsize=3, linewidth=1.3,
            )  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_yscale("log", base=2)
        ticks = [2**power for power in range(most.bit_length())]
        for one in (axis.xaxis, axis.yaxis):
            one.set_ticks(ticks, [str(tick) for tick in ticks])
        axis.set_xlabel("nodes")
        axis.set_ylabel("times as fast as one node")
        axis.set_title(f"{preset} to {goal}")
        axis.legend(fontsize=7, loc="lower right")
    save(figure, path)


def sentence(rows: Sequence[Mapping[str, str]], arguments: argparse.Namespace) -> str:
    """Say what several nodes gain over the quickest single one, by rows that were measured before."""
    rows = [
        row
        for row in rows
        if row["preset"] == arguments.preset
        and float(row["goal"]) == arguments.goal
        and row["kind"] != "real"
    ]
    settings = grouped(rows).get((arguments.preset, f"{arguments.goal}"), {})
    alone = single(settings)
    together = [
        (seconds, len(by_nodes[arguments.tell]))
        for by_nodes in settings.values()
        if arguments.tell in by_nodes and (seconds := middle(by_nodes[arguments.tell], "seconds")) is not None
    ]
    if alone is None or not together:
        return f"{arguments.out}/runs.csv doesn't say what {arguments.tell} nodes bring."
    (seconds, seeds), pace = min(together), float(rows[0]["pace_ms"])
    source = f"(virtual swarms, median of {seeds} seeds, from {arguments.out}; not measured just now)"
    return (
        f"Machines whose environment takes {pace:g} ms a step solve {arguments.preset} in {seconds:.0f} s "
        f"with {arguments.tell} nodes, in {alone[0]:.0f} s with one: {alone[0] / seconds:.1f} times as fast "
        f"{source}."
    )


def moment(text: str) -> tuple[float, int]:
    """Read ``SECONDS:NODES``."""
    seconds, _, nodes = text.partition(":")
    return float(seconds), int(nodes)


def main() -> int:
    """Run what is missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("preset", nargs="?", help="what is trained")
    parser.add_argument("--goal", type=float, help="evaluated return")
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--seeds", type=int, nargs="+", default=[51, 52, 53, 54, 55])
    parser.add_argument("--set", dest="sets", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--name", help="of this setting (default: its strategy, and what is --set)")
    parser.add_argument(
        "--slow", action="append", default=[], metavar="COUNTxFACTOR", help="slow nodes, as 1x10"
    )
    parser.add_argument("--members", type=moment, nargs="+", default=[], metavar="SECONDS:NODES",
                        help="how many nodes are alive from then on")  # fmt: skip
    parser.add_argument("--learners", type=int, choices=(0, 1), default=0,
                        help="how many nodes learn; all act (0: all learn)")  # fmt: skip
    parser.add_argument("--pace-ms", type=float, default=2.0, help="of one environment step")
    parser.add_argument("--gradient-ms", type=float, nargs=2, metavar=("EACH", "PER_1000_ROWS"),
                        help="what a gradient costs; measured here otherwise")  # fmt: skip
    parser.add_argument("--link", choices=LINKS, default="lan")
    parser.add_argument("--real", action="store_true", help="processes and sockets in real time")
    parser.add_argument("--budget-s", type=float, default=900.0, help="of a real run")
    parser.add_argument("--jobs", type=int, default=1, help="virtual swarms at once")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table-only", action="store_true")
    parser.add_argument(
        "--tell", type=int, metavar="NODES", help="only say what those bring, by OUT/runs.csv"
    )
    arguments = parser.parse_args()
    if not arguments.table_only and (arguments.preset is None or arguments.goal is None):
        parser.error("say which preset, and --goal")
    if arguments.real and (arguments.slow or arguments.members or arguments.learners):
        parser.error("--slow, --members and --learners are about virtual swarms")
    if arguments.learners and arguments.members:
        parser.error("--members is about swarms whose nodes all learn")
    if arguments.tell is not None:
        print(sentence(Rows(arguments.out / "runs.csv", FIELDS).read(), arguments))
        return 0
    if not arguments.table_only:
        try:
            task = task_of(arguments)
        except ConfigError as error:
            parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = Rows(arguments.out / "runs.csv", FIELDS)
    if not arguments.table_only:
        setting = setting_of(arguments, task)
        try:
            missing = due(setting, file.read(), arguments)
        except UsageError as error:
            parser.error(str(error))
        measure(file, setting, missing, arguments)
    rows = file.read()
    lines = table(rows)
    print("\n".join(lines))
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")
    if rows and importlib.util.find_spec("matplotlib") is not None:
        draw(rows, arguments.out / "speedup.png")
    return 0


def task_of(arguments: argparse.Namespace) -> TaskConfig:
    """What is trained.

    Raises:
        ConfigError: it can't be, or its policy is never evaluated.
    """
    task = resolve(files=[arguments.preset], sets=arguments.sets).config.task
    if not task.evaluated:
        raise ConfigError("its policy is never evaluated: --set task.evaluation.every=STEPS")
    return task


def setting_of(arguments: argparse.Namespace, task: TaskConfig) -> Setting:
    """What is asked for; gradients are measured here unless it is said what they cost."""
    costs = measured_costs(task) if arguments.gradient_ms is None else Costs(
        gradient_s=arguments.gradient_ms[0] / 1000, row_s=arguments.gradient_ms[1] / 1e6
    )  # fmt: skip
    strategy = "one learner" if arguments.learners else protocol_of(task.strategy)
    return Setting(
        arguments.name or " ".join((strategy, *arguments.sets)), arguments.preset, tuple(arguments.sets),
        arguments.goal, arguments.link, replace(costs, env_step_s=arguments.pace_ms / 1000),
        tuple(arguments.slow), tuple(arguments.members), arguments.learners,
    )  # fmt: skip


def due(
    setting: Setting, rows: Sequence[Mapping[str, str]], arguments: argparse.Namespace
) -> list[tuple[int, int]]:
    """Return which numbers of nodes and seeds aren't among the rows yet.

    Raises:
        UsageError: rows of this name were made in another way, or there are more slow nodes than nodes.
    """
    found = []
    setting.factors(min(arguments.nodes))
    for seed in arguments.seeds:
        for nodes in arguments.nodes:
            wanted = setting.row(nodes, seed) | {"kind": "real" if arguments.real else "virtual"}
            same = [
                row
                for row in rows
                if (row["name"], row["preset"], float(row["goal"]), row["nodes"])
                == (setting.name, setting.preset, setting.goal, str(nodes))
            ]
            for row, key in product(same, ALIKE):
                there, here = row[key] or "nothing", str(wanted[key]) or "nothing"
                if there != here:
                    raise UsageError(
                        f"{setting.name!r} is in {arguments.out}/runs.csv with {nodes} nodes already, where "
                        f"{key} is {there} instead of {here}: say another --name or --out"
                    )
            if not any(row["seed"] == str(seed) for row in same):
                found.append((nodes, seed))
    return found


def measure(
    file: Rows, setting: Setting, due: Sequence[tuple[int, int]], arguments: argparse.Namespace
) -> None:
    """Run numbers of nodes and seeds, and add their rows to the file."""
    told = {"commit": commit(), "command": command_line()}
    began_s = time.perf_counter()

    def done(number: int, row: dict[str, Any]) -> None:
        file.add(row | told)
        outcome = "solved" if row["solved"] else f"not solved (best {row['best']})"
        print(
            f"{number}/{len(due)} after {time.perf_counter() - began_s:.0f} s: {setting.name}, "
            f"{row['nodes']} nodes, seed {row['seed']}: {outcome} after {row['seconds']} s, "
            f"{row['samples']:,} steps",
            file=sys.stderr,
            flush=True,
        )

    if arguments.real:
        for number, (nodes, seed) in enumerate(due, 1):
            done(number, run_real(setting, nodes, seed, arguments.budget_s))
        return
    if not due:
        return
    with ProcessPoolExecutor(arguments.jobs, get_context("spawn")) as pool:
        waiting = [pool.submit(run_virtual, setting, nodes, seed) for nodes, seed in due]
        for number, future in enumerate(as_completed(waiting), 1):
            done(number, future.result())


if __name__ == "__main__":
    sys.exit(main())
