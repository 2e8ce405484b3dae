"""The distributed systems beside each other: one task, one description of machines, one evaluation.

Each system is a preset with values of its own, on so many real nodes on loopback as the others, in the roles
that are its own (`SYSTEMS`; any other preset may be named, too, and does all on each node). What is the same
for all: the environment, the goal, how the swarm's policy is evaluated (so many episodes of sampled actions
every so many environment steps; learners of action values play without ε), and the pace: an environment step
costs a stated time, by sleeping, and a node makes one after the other, in however many processes. So a node
with one learner, with two, or with actors is given the same simulator, and the machine isn't the limit as
long as it is less than about half busy: `busy` says how busy all its processors were, whoever with.

A swarm is held until all its nodes are there. Then seconds begin. It has reached the goal once two
evaluations in a row, in the order of their environment steps, are at it; it is watched for `--after-s` more.
Of systems that don't get there in `--budget-s`, or within the steps that their preset ends after, the row
says so.

    goal_s, goal_steps   seconds, and environment steps of the whole swarm, until the goal
    bytes_per_node       sent by a node until then, mean over nodes: everything, membership too
    cpu_s                of all processes of all nodes, until then
    staleness            mean, in policy versions, of what was merged from other nodes
    unroll_staleness     the same of unrolls that came from other nodes
    worst_after          the least evaluation after the goal

Rows are added to OUT/runs.csv as they come, with commit and command; a system that is there isn't run again
with the same seed and task. All rows of a task are of one pace, goal and number of nodes. `--table-only`
reads them.

    python scripts/compare_systems.py --seeds 51 --out docs/results/systems
    python scripts/compare_systems.py --only a3c downpour --seeds 51 52 --out docs/results/systems
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from p2pdrl.config.loader import preset_names, resolve
from p2pdrl.config.strategy import HogwildConfig
from p2pdrl.errors import P2PDRLError
from p2pdrl.planner.forecast import STALENESS_BOUNDS
from support.local_swarm import LocalSwarm, Meter, processors_busy
from support.plots import COLOURS, pyplot, save
from support.rows import Rows, command_line, commit

__all__ = ["SYSTEMS", "System", "Yardstick"]

FIELDS = (
    *("system", "preset", "task", "seed", "nodes", "roles", "pace_ms", "goal", "budget_s", "seconds"),
    *("env_steps", "goal_s", "goal_steps", "bytes_per_node", "cpu_s", "staleness", "unroll_staleness"),
    *("best", "last", "worst_after", "busy", "commit", "command", "curve", "course"),
)
SAMPLE_S = 1.0
START_S = 300.0
POLL_S = 0.5
QUIET_POLLS = 4
ALL = "all"
"""A node that acts, learns and holds what there is to hold."""


@dataclass(frozen=True)
class System:
    """One system.

    Attributes:
        preset: its values.
        family: what it is drawn beside.
        roles: what the nodes do, those of the first nodes named; the last one counts for all others, too.
        sets: ``KEY=VALUE`` over the preset.
        alone: it is one node, whatever number the others are.
    """

    preset: str
    family: str = "other"
    roles: tuple[str, ...] = (ALL,)
    sets: tuple[str, ...] = ()
    alone: bool = False

    def role(self, number: int) -> str:
        """Return what a node does, by its number from 0."""
        return self.roles[min(number, len(self.roles) - 1)]

    def placement(self, nodes: int) -> str:
        """Return who does what, for people: ``1 learner + 2 actor``."""
        roles = [self.role(number) for number in range(nodes)]
        return " + ".join(f"{roles.count(role)} {role}" for role in dict.fromkeys(roles))


def _same(family: str, *presets: str) -> dict[str, System]:
    return {preset: System(preset, family) for preset in presets}


SYSTEMS: dict[str, System] = {
    "one node": System("local", "one node", alone=True),
    **_same("gossip", "adpsgd", "sgp", "gala", "dsgd", "gossip_gradients", "strom", "rlx_compose"),
    **_same("all-reduce", "grad_average", "ddp", "ddppo", "param_average", "federated"),
    **_same("parameter servers", "mapreduce_sync", "downpour", "async_nstep_q"),
    "impala": System("impala", "actors and learners", ("learner", "actor")),
    "apex_dqn": System("apex_dqn", "actors and learners", ("learner,replay", "actor")),
    "rapid": System("rapid", "actors and learners", ("learner", "actor")),
    **_same("within a node, or one model over nodes", "hogwild", "a3c", "amb_pp"),
}


@dataclass(frozen=True)
class Yardstick:
    """What is the same for all systems.

    Attributes:
        task: id of the environment.
        goal: evaluated return.
        nodes: of each system.
        pace_s: seconds of an environment step.
        budget_s: seconds that a system is given.
        after_s: seconds that it is watched after the goal.
        every: environment steps of the swarm between evaluations.
        episodes: of an evaluation.
    """

    task: str
    goal: float
    nodes: int
    pace_s: float
    budget_s: float
    after_s: float
    every: int
    episodes: int

    def measured(self, row: Mapping[str, str]) -> bool:
        """Tell whether a row is of these terms, or of another task."""
        if row["task"] != self.task:
            return True
        nodes = 1 if row["system"] in SYSTEMS and SYSTEMS[row["system"]].alone else self.nodes
        terms = (float(row["pace_ms"]), float(row["goal"]), int(row["nodes"]))
        return terms == (1000 * self.pace_s, self.goal, nodes)


@dataclass
class Course:
    """What was seen of one run.

    Attributes:
        curve: by node and environment steps, when an evaluation was first seen, and its mean return.
        samples: figures of `Meter`, with the swarm's environment steps.
    """

    curve: dict[tuple[str, int], tuple[float, float]] = field(default_factory=dict)
    samples: list[dict[str, Any]] = field(default_factory=list)

    def see(self, seconds: float, evaluations: Iterable[Mapping[str, Any]]) -> None:
        """Take in the evaluations that a node knows."""
        for one in evaluations:
            self.curve.setdefault((one["node"], one["env_steps"]), (seconds, one["mean"]))

    @property
    def points(self) -> list[tuple[float, int, float]]:
        """(seconds, environment steps, mean return) of each evaluation in the order of the steps."""
        return sorted(
            ((seconds, steps, mean) for (_, steps), (seconds, mean) in self.curve.items()),
            key=lambda point: (point[1], point[0]),
        )


def reached(points: Sequence[tuple[float, int, float]], goal: float) -> int | None:
    """Return the place of the second of the first two evaluations in a row that are at the goal."""
    for place in range(1, len(points)):
        if min(points[place - 1][2], points[place][2]) >= goal:
            return place
    return None


def summary(course: Course, goal: float, nodes: int) -> dict[str, Any]:
    """Return a row's figures of a course; those of a goal that wasn't reached are empty."""
    points, place = course.points, reached(course.points, goal)
    last = course.samples[-1]
    at_goal, after = last, []
    goal_s = goal_steps = ""
    if place is not None:
        seconds = max(points[place - 1][0], points[place][0])
        at_goal = next((one for one in course.samples if one["seconds"] >= seconds), last)
        goal_s, goal_steps = f"{seconds:.1f}", str(points[place][1])
        after = [mean for _, _, mean in points[place + 1 :]]
    return {
        "seconds": round(last["seconds"], 1),
        "env_steps": int(last["swarm_env_steps"]),
        "goal_s": goal_s,
        "goal_steps": goal_steps,
        "bytes_per_node": round(at_goal["bytes"] / nodes),
        "cpu_s": round(at_goal["cpu_s"], 1),
        "best": round(max((mean for _, _, mean in points), default=math.nan), 1),
        "last": round(points[-1][2], 1) if points else math.nan,
        "worst_after": round(min(after), 1) if after else "",
        "curve": json.dumps([(round(seconds, 1), steps, round(mean, 1)) for seconds, steps, mean in points]),
        "course": json.dumps(
            [
                (round(one["seconds"], 1), int(one["swarm_env_steps"]), int(one["bytes"] / nodes))
                for one in course.samples
            ]
        ),
    }


def command_of(system: System, seed: int, yard: Yardstick) -> list[str]:
    """The command line of every node.

    Raises:
        ConfigError: the preset doesn't go with the task.
    """
    sets = [
        *system.sets,
        f"task.env.id={yard.task}",
        f"task.seed={seed}",
        f"task.evaluation.every={yard.every}",
        f"task.evaluation.episodes={yard.episodes}",
        "task.evaluation.mode=sampled",
        "task.stop.mean_return=none",
    ]
    task = resolve(files=[system.preset], sets=sets).config.task
    learners = task.strategy.learners if isinstance(task.strategy, HogwildConfig) else 1
    # Processes sleep beside each other, each for all environments of its node.
    sets.append(f"node.learner.step_delay_s={yard.pace_s * task.env.num_envs * learners:g}")
    return ["--config", system.preset, *(f"--set={one}" for one in sets)]


def run(name: str, system: System, seed: int, yard: Yardstick) -> dict[str, Any]:
    """Train one swarm; return its row without commit and command."""
    nodes = 1 if system.alone else yard.nodes
    roles = [system.role(number) for number in range(nodes)]
    each = {number: ["--roles", role] for number, role in enumerate(roles) if role != ALL}
    with LocalSwarm(nodes, command_of(system, seed, yard), each) as swarm:
        begin(swarm)
        processors_busy()
        course, stale, end_s = Course(), Staleness(), yard.budget_s
        meter = Meter(swarm)
        while swarm.living:
            time.sleep(SAMPLE_S)
            look(swarm, meter, course, stale)
            passed_s = course.samples[-1]["seconds"]
            if end_s == yard.budget_s and reached(course.points, yard.goal) is not None:
                end_s = passed_s + yard.after_s
            if passed_s >= end_s:
                break
        busy = processors_busy()
    return {
        "system": name,
        "preset": system.preset,
        "task": yard.task,
        "seed": seed,
        "nodes": nodes,
        "roles": system.placement(nodes),
        "pace_ms": yard.pace_s * 1000,
        "goal": yard.goal,
        "budget_s": yard.budget_s,
        **summary(course, yard.goal, nodes),
        **stale.row(),
        "busy": round(busy, 2),
    }


def begin(swarm: LocalSwarm, timeout_s: float = START_S) -> None:
    """Hold the swarm from its first moment until all nodes are there; then let it go.

    Raises:
        SystemExit: they aren't in time.
    """
    quiet = 0

    def held() -> bool:
        nonlocal quiet
        time.sleep(POLL_S)
        statuses = [node.status() for node in swarm.living]
        for node, status in zip(swarm.living, statuses, strict=True):
            if status.get("state") == "training":
                node.client.post("/v1/pause?scope=swarm")
        # Actors tell of themselves with their first unroll; until then they are seen to load their libraries.
        quiet = 0 if any(node.children_compute() for node in swarm.living) else quiet + 1
        there = sum(waits(status, len(swarm.nodes)) for status in statuses)
        return there == len(swarm.nodes) and quiet >= QUIET_POLLS

    swarm.wait(held, timeout_s, "all nodes are there, with their processes, and wait")
    swarm.living[0].client.post("/v1/resume?scope=swarm")


def waits(status: Mapping[str, Any], nodes: int) -> bool:
    """Tell whether a node sees all others, and its learner, if it has one, has been held."""
    if status.get("state") != "paused" or status["members"]["alive"] < nodes:
        return False
    learner = status["learner"]
    return learner is None or (learner["pid"] is not None and learner["starting_s"] is None)


class Staleness:
    """Of what nodes merged, and of unrolls that came to them, as they last told."""

    def __init__(self) -> None:
        self._merged: dict[str, dict[str, int]] = {}
        self._unrolls: dict[str, tuple[float, float]] = {}

    def see(self, name: str, status: Mapping[str, Any], metrics: Iterable[str] = ()) -> None:
        """Take in what a node tells: its status and its metrics, whose counts are since its start."""
        for account in status.get("accounting", {}).values():
            self._merged[name] = dict(account["staleness"])
        figures = dict(line.rsplit(" ", 1) for line in metrics if "unroll_staleness_versions_" in line)
        total, count = (
            sum(float(value) for key, value in figures.items() if f"_{kind}" in key)
            for kind in ("sum", "count")
        )
        self._unrolls[name] = total, count

    def row(self) -> dict[str, Any]:
        """Return both means, empty where there was nothing."""
        bounds = {str(bound): bound for bound in STALENESS_BOUNDS}
        counts = [(bounds.get(key, 2 * STALENESS_BOUNDS[-1]), count)
                  for found in self._merged.values() for key, count in found.items()]  # fmt: skip
        merged = sum(count for _, count in counts)
        total, unrolls = (sum(column) for column in zip((0.0, 0.0), *self._unrolls.values(), strict=True))
        return {
            "staleness": round(sum(bound * count for bound, count in counts) / merged, 2) if merged else "",
            "unroll_staleness": round(total / unrolls, 2) if unrolls else "",
        }


def look(swarm: LocalSwarm, meter: Meter, course: Course, stale: Staleness) -> None:
    """Take one sample of all that is told."""
    sample = meter.sample()
    steps = course.samples[-1]["swarm_env_steps"] if course.samples else 0
    for node in swarm.living:
        try:
            status = node.client.status()
            steps = max(steps, status.get("swarm_env_steps") or 0)
            stale.see(
                node.name, status, (line.decode() for line in node.client.lines("/metrics", silence_s=5))
            )
            course.see(sample["seconds"], node.client.get("/v1/evaluations"))
        except P2PDRLError:
            continue  # it ends just now, or is busy
    course.samples.append(sample | {"swarm_env_steps": steps})


def table(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Markdown: a line for each system, its seeds together, the quickest first."""
    head = ("system", "nodes", "seeds", "seconds to goal", "steps to goal", "MB sent by a node", "CPU s",
            "staleness", "of unrolls", "worst after", "best", "busy")  # fmt: skip
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    ordered = sorted(
        by_system(rows).items(), key=lambda item: (_middle(item[1], "goal_s", math.inf), item[0])
    )
    for name, found in ordered:
        solved = [row for row in found if row["goal_s"]]
        share = "" if len(solved) == len(found) else f" ({len(solved)} of {len(found)})"
        longest = max(float(row["seconds"]) for row in found)
        seconds = _range(found, "goal_s") + share if solved else f"not in {longest:.0f} s"
        steps = _range(found, "goal_steps")
        if not solved:
            steps = f"not in {max(int(row['env_steps']) for row in found):,}"
        cells = (
            name,
            found[0]["roles"],
            ", ".join(sorted(row["seed"] for row in found)),
            seconds,
            steps,
            f"{_middle(found, 'bytes_per_node') / 1e6:.2f}",
            f"{_middle(found, 'cpu_s'):.0f}",
            _cell(found, "staleness", "{:.1f}"),
            _cell(found, "unroll_staleness", "{:.1f}"),
            _least(found, "worst_after"),
            _least(found, "best"),
            f"{_middle(found, 'busy'):.0%}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def by_system(rows: Iterable[Mapping[str, str]]) -> dict[str, list[Mapping[str, str]]]:
    """Rows of each system, in the order of `SYSTEMS`, others behind."""
    found: dict[str, list[Mapping[str, str]]] = {name: [] for name in SYSTEMS}
    for row in rows:
        found.setdefault(row["system"], []).append(row)
    return {name: some for name, some in found.items() if some}


def _numbers(rows: Iterable[Mapping[str, str]], key: str) -> list[float]:
    return [float(row[key]) for row in rows if row[key] not in ("", "nan")]


def _middle(rows: Iterable[Mapping[str, str]], key: str, otherwise: float = math.nan) -> float:
    return statistics.median(_numbers(rows, key) or [otherwise])


def _range(rows: Iterable[Mapping[str, str]], key: str) -> str:
    """The least and the greatest of those that there are."""
    found = sorted(_numbers(rows, key))
    if not found:
        return ""
    low, high = f"{found[0]:,.0f}", f"{found[-1]:,.0f}"
    return low if low == high else f"{low} to {high}"


def _cell(rows: Iterable[Mapping[str, str]], key: str, form: str) -> str:
    found = _numbers(rows, key)
    return form.format(statistics.median(found)) if found else "–"


def _least(rows: Iterable[Mapping[str, str]], key: str) -> str:
    found = _numbers(rows, key)
    return f"{min(found):.0f}" if found else "–"


def draw(rows: Sequence[Mapping[str, str]], path: Path) -> None:
    """Draw evaluations against seconds, steps of the swarm and bytes of a node: a line for each family."""
    plt = pyplot()
    systems = by_system(rows)
    families = list(dict.fromkeys(family_of(name) for name in systems))
    figure, axes = plt.subplots(
        len(families), 3, figsize=(13, 2.5 * len(families)), squeeze=False, sharey=True, sharex="col",
        layout="constrained",
    )  # fmt: skip
    for line, family in zip(axes, families, strict=True):
        names = [name for name in systems if family_of(name) == family]
        for name, colour in zip(names, COLOURS * len(names), strict=False):
            for number, row in enumerate(systems[name]):
                curve, course = json.loads(row["curve"]), json.loads(row["course"])
                label = None if number else name
                heights = [mean for _, _, mean in curve]
                sent = [_bytes_at(course, seconds) / 1e6 for seconds, _, _ in curve]
                for axis, values in zip(
                    line, ([s for s, _, _ in curve], [n / 1000 for _, n, _ in curve], sent), strict=True
                ):
                    axis.plot(values, heights, color=colour, label=label, linewidth=1.3, marker=".", ms=4)
        for axis in line:
            axis.axhline(float(rows[0]["goal"]), color="gray", linewidth=0.8, linestyle="--")
        line[0].set_title(family, loc="left", fontsize=10)
        line[0].set_ylabel("return of evaluation")
        line[2].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False)
        line[2].set_xscale("symlog", linthresh=0.1)
    for axis, label in zip(
        axes[-1], ("seconds", "1,000 steps of the swarm", "MB sent by a node"), strict=True
    ):
        axis.set_xlabel(label)
    save(figure, path)


def family_of(name: str) -> str:
    """Return what a system is drawn beside."""
    return SYSTEMS[name].family if name in SYSTEMS else "other"


def _bytes_at(course: Sequence[tuple[float, int, int]], seconds: float) -> float:
    return next((sent for at, _, sent in course if at >= seconds), course[-1][2] if course else 0.0)


def chosen(names: Sequence[str] | None) -> dict[str, System]:
    """Return the systems that are asked for: of `SYSTEMS`, or any preset.

    Raises:
        ValueError: there is neither.
    """
    presets = set(preset_names())
    if not names:
        return {name: system for name, system in SYSTEMS.items() if system.preset in presets}
    if unknown := [name for name in names if name not in SYSTEMS and name not in presets]:
        raise ValueError(
            f"neither a system nor a preset: {', '.join(unknown)}; there are {', '.join(SYSTEMS)}"
        )
    return {name: SYSTEMS.get(name, System(name)) for name in names}


def main() -> int:
    """Run what is missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="systems, or other presets")
    parser.add_argument("--leave-out", nargs="+", metavar="NAME", default=[], help="systems that aren't run")
    parser.add_argument("--seeds", type=int, nargs="+", default=[51])
    parser.add_argument("--task", default="CartPole-v1", help="id of the environment")
    parser.add_argument("--goal", type=float, default=475.0, help="evaluated return")
    parser.add_argument("--nodes", type=int, default=3)
    parser.add_argument("--pace-ms", type=float, default=2.0, help="of one environment step")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--after-s", type=float, default=20.0, help="watched after the goal")
    parser.add_argument("--every", type=int, default=10_000, help="steps between evaluations")
    parser.add_argument("--episodes", type=int, default=20, help="of an evaluation")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table-only", action="store_true")
    arguments = parser.parse_args()
    try:
        systems = chosen(arguments.only)
    except ValueError as error:
        parser.error(str(error))
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = Rows(arguments.out / "runs.csv", FIELDS)
    yard = Yardstick(
        arguments.task, arguments.goal, arguments.nodes, arguments.pace_ms / 1000, arguments.budget_s,
        arguments.after_s, arguments.every, arguments.episodes,
    )  # fmt: skip
    failed: list[str] = []
    if not (arguments.table_only or all(map(yard.measured, file.read()))):
        parser.error(f"{arguments.out} has rows of another pace, goal or number of nodes; take another --out")
    if not arguments.table_only:
        systems = {name: system for name, system in systems.items() if name not in arguments.leave_out}
        failed = measure(file, systems, arguments.seeds, yard)
    rows = [row for row in file.read() if row["task"] == yard.task]
    lines = table(rows)
    print("\n".join(lines))
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")
    if rows and importlib.util.find_spec("matplotlib") is not None:
        draw(rows, arguments.out / "curves.png")
    if failed:
        print(f"not run, as their nodes didn't come up: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def measure(file: Rows, systems: Mapping[str, System], seeds: Sequence[int], yard: Yardstick) -> list[str]:
    """Run each system that isn't in the file yet with each seed; return those that didn't come up."""
    failed = []
    command, at_commit = command_line(), commit()
    done = {(row["system"], row["task"], row["seed"]) for row in file.read()}
    for seed in seeds:
        for name, system in systems.items():
            if (name, yard.task, str(seed)) in done:
                continue
            try:
                row = run(name, system, seed, yard)
            except SystemExit as error:  # the swarm has said why; the others may do better
                print(f"{name}, seed {seed}: {error}", file=sys.stderr, flush=True)
                failed.append(name)
                continue
            file.add(row | {"commit": at_commit, "command": command})
            said = f"goal after {row['goal_s']} s" if row["goal_s"] else f"not in {row['seconds']:.0f} s"
            print(
                f"{name}, seed {seed}: {said}, best {row['best']}, {row['env_steps']:,} steps, "
                f"busy {row['busy']:.0%}",
                file=sys.stderr,
                flush=True,
            )
    return failed


if __name__ == "__main__":
    sys.exit(main())
