"""Trains presets over several seeds and writes what they reach: rows, a table and learning curves.

Each run is one learner in one process with one thread, for the case's budget of environment steps. At every
twentieth of it (`--points`) the policy plays `--curve-episodes` episodes; at the end the last one plays
`--episodes`. Returns are raw and undiscounted; actions are sampled or greedy as the preset's
``task.evaluation.mode`` says, or all sampled, of either library, with `--sampled`. Beside it runs
Stable-Baselines3 with RL Baselines3 Zoo's values, same budget and same evaluation (its zoo evaluates
deterministic actions, sampled ones on Atari; so do we for it), from the same states where environments draw
numbers at their resets only, where it is installed:
pip install 'p2pdrl[bench]'.

Printed per case and library: the interquartile mean over seeds (arXiv 2108.13264: the mean of the middle half
of the runs) with a 95 % interval by bootstrap, the worst seed, and what it took: CPU seconds of the whole
run, and ("at goal") environment steps and CPU seconds up to the third point in a row of the curve that is at
the goal, medians over the seeds, which count as never where there are no such three.

Rows are added to OUT/runs.csv as they come, with commit and command; what is there already isn't run again,
so a suite may take several days. `--table-only` reads them.

    python scripts/reproduce.py --suite small --seeds 5 --out results/small
    python scripts/reproduce.py --suite small --only cartpole-ppo --sampled --points 40 --out results/sampled
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from support.rows import Rows, command_line, commit
from support.suites import SUITES, Case, Zoo

if TYPE_CHECKING:
    from p2pdrl.config.task import TaskConfig

BOOTSTRAPS = 10_000
FIELDS = (
    *("case", "library", "seed", "steps", "mean", "std", "worst_episode", "best", "cpu_s", "wall_s"),
    *("commit", "command", "curve"),
)


@dataclass(frozen=True)
class Run:
    """What one run is asked for."""

    case: str
    library: str
    seed: int
    episodes: int
    curve_episodes: int
    points: int
    sampled: bool


class Judge:
    """Collects a run's learning curve: (environment steps, mean return)."""

    def __init__(self, steps: int, play: Callable[[int], np.ndarray], run: Run) -> None:
        self._every = max(1, steps // run.points)
        self._play = play
        self._episodes = run.curve_episodes
        self._next = self._every
        self.curve: list[tuple[int, float]] = []
        self.cpu_s = 0.0
        self.wall_s = 0.0
        """Spent here, and to be taken off the run's."""

    def look(self, steps: int) -> None:
        """Play if it is time."""
        if steps < self._next:
            return
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        self.curve.append((steps, float(self._play(self._episodes).mean())))
        self._next = (steps // self._every + 1) * self._every
        self.cpu_s += time.process_time() - cpu_s
        self.wall_s += time.perf_counter() - wall_s


def train_ours(case: Case, run: Run) -> tuple[Judge, int, np.ndarray, float, float]:
    """Train a preset; return the judge, steps made, final returns, CPU and wall seconds."""
    import msgspec

    from p2pdrl.rl.evaluate import evaluate
    from p2pdrl.rl.registry import build_trainer

    task = msgspec.structs.replace(_task(case), seed=run.seed)
    trainer = build_trainer(task, run.seed, "cpu")
    greedy = task.evaluation.mode == "greedy" and not run.sampled
    alone = case.zoo is not None and not case.zoo.atari
    judged = msgspec.structs.replace(task.env, num_envs=1) if alone else task.env

    def play(episodes: int) -> np.ndarray:
        found = evaluate(
            trainer.policy,
            judged,
            episodes,
            greedy=greedy,
            seed=_judged_seed(run),
            normalizer=trainer.observation_normalizer,
        )
        return np.array(found.returns)

    judge = Judge(case.steps, play, run)
    cpu_s, wall_s, steps = time.process_time(), time.perf_counter(), 0
    while steps < case.steps:
        trainer.set_progress(steps / case.steps, steps)
        steps += trainer.step().env_steps
        trainer.policy_version += 1
        judge.look(steps)
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    returns = play(run.episodes)
    trainer.close()
    return judge, steps, returns, cpu_s - judge.cpu_s, wall_s - judge.wall_s


def train_theirs(case: Case, run: Run) -> tuple[Judge, int, np.ndarray, float, float]:
    """Train Stable-Baselines3 with the zoo's values; return the same."""
    import gymnasium
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecFrameStack, VecNormalize, sync_envs_normalization

    zoo = _zoo(case)
    env_id = _task(case).env.id
    if zoo.atari:
        gymnasium.register_envs(importlib.import_module("ale_py"))
        env = VecFrameStack(make_atari_env(env_id, zoo.n_envs, seed=run.seed), 4)
        whole_games = {"clip_reward": False, "terminal_on_life_loss": False}
        judged = make_atari_env(env_id, 1, seed=_judged_seed(run), wrapper_kwargs=whole_games)
        held_out = VecFrameStack(judged, 4)
    else:
        env = make_vec_env(env_id, zoo.n_envs, seed=run.seed)
        held_out = make_vec_env(env_id, 1)
    options = {name: _made(value, env.action_space.shape) for name, value in zoo.options.items()}
    if zoo.normalize:
        gamma = zoo.options.get("gamma", 0.99)
        env = VecNormalize(env, gamma=gamma)
        held_out = VecNormalize(held_out, training=False, norm_reward=False)
    model = getattr(stable_baselines3, zoo.algorithm)(
        "CnnPolicy" if zoo.atari else "MlpPolicy", env, seed=run.seed, device="cpu", **options
    )

    greedy = not (zoo.atari or run.sampled)
    # the seed that ours gives to the only environment of its evaluation: both play from the same states
    first = np.random.SeedSequence(_judged_seed(run)).generate_state(2)[0]
    starts = int(np.random.SeedSequence(int(first)).generate_state(1)[0])

    def play(episodes: int) -> np.ndarray:
        if zoo.normalize:
            sync_envs_normalization(env, held_out)
        held_out.seed(starts)
        returns, _ = evaluate_policy(
            model, held_out, episodes, deterministic=greedy, return_episode_rewards=True, warn=False
        )
        return np.array(returns)

    judge = Judge(case.steps, play, run)

    class Look(BaseCallback):
        def _on_step(self) -> bool:
            judge.look(self.num_timesteps)
            return True

    cpu_s, wall_s = time.process_time(), time.perf_counter()
    model.learn(case.steps, callback=Look())
    cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
    return judge, model.num_timesteps, play(run.episodes), cpu_s - judge.cpu_s, wall_s - judge.wall_s


def _judged_seed(run: Run) -> int:
    return run.seed + 1_000_000


def _zoo(case: Case) -> Zoo:
    if case.zoo is None:
        raise ValueError(f"the zoo has no values for {case.preset}")
    return case.zoo


def _task(case: Case) -> TaskConfig:
    from p2pdrl.config.loader import resolve

    sets = (*case.sets, f"task.stop.env_steps={case.steps}")
    return resolve(files=[case.preset], sets=sets).config.task


def _made(value: object, action_shape: tuple[int, ...]) -> object:
    """``lin_X`` as a function of the progress that remains, ``normal_X`` as noise; anything else as it is."""
    if isinstance(value, str) and value.startswith("lin_"):
        first = float(value.removeprefix("lin_"))
        return lambda remaining: remaining * first
    if isinstance(value, str) and value.startswith("normal_"):
        from stable_baselines3.common.noise import NormalActionNoise

        deviation = float(value.removeprefix("normal_"))
        return NormalActionNoise(np.zeros(action_shape), np.full(action_shape, deviation))
    return value


def train(run: Run, case: Case, command: str, at_commit: str) -> dict[str, Any]:
    """Do one run; return its row."""
    import torch

    torch.set_num_threads(1)
    trainer = train_ours if run.library == "ours" else train_theirs
    judge, steps, returns, cpu_s, wall_s = trainer(case, run)
    return {
        "case": run.case,
        "library": run.library,
        "seed": run.seed,
        "steps": steps,
        "mean": round(float(returns.mean()), 4),
        "std": round(float(returns.std()), 4),
        "worst_episode": round(float(returns.min()), 4),
        "best": round(max((mean for _, mean in judge.curve), default=math.nan), 4),
        "cpu_s": round(cpu_s, 2),
        "wall_s": round(wall_s, 2),
        "commit": at_commit,
        "command": command,
        "curve": json.dumps([(at, round(mean, 3)) for at, mean in judge.curve]),
    }


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of what is left when a quarter of the N scores, rounded down, goes at either end."""
    ordered = np.sort(scores)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interval(scores: np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap of the interquartile mean over runs."""
    rng = np.random.default_rng(0)
    drawn = rng.choice(scores, (BOOTSTRAPS, len(scores)))
    low, high = np.percentile([interquartile_mean(one) for one in drawn], [2.5, 97.5])
    return float(low), float(high)


def table(suite: dict[str, Case], rows: list[dict[str, str]]) -> list[str]:
    """Markdown: one line per case and library."""
    lines = [
        "| case | library | seeds | steps | IQM of return (95 %) | worst | goal | CPU s | at goal (CPU s) |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, case in suite.items():
        for library in ("ours", "sb3"):
            found = [row for row in rows if (row["case"], row["library"]) == (name, library)]
            if not found:
                continue
            scores = np.array([float(row["mean"]) for row in found])
            low, high = interval(scores)
            goal = f"{case.goal:g}" + ("" if case.worst is None else f", worst {case.worst:g}")
            cpu_s = np.median([float(row["cpu_s"]) for row in found])
            reached = np.median([steps_to_goal(row, case.goal) for row in found])
            cpu_s_to_goal = np.median([_cpu_s_until(row, steps_to_goal(row, case.goal)) for row in found])
            after = f"{reached:,.0f} ({cpu_s_to_goal:.1f})" if math.isfinite(reached) else "never"
            lines.append(
                f"| {name} | {library} | {len(found)} | {case.steps:,} | {interquartile_mean(scores):.1f} "
                f"({low:.1f} to {high:.1f}) | {scores.min():.1f} | {goal} | {cpu_s:.0f} | {after} |"
            )
    return lines


def steps_to_goal(row: dict[str, str], goal: float) -> float:
    """Return environment steps until three points of the curve in a row are at the goal; infinity if none."""
    curve = json.loads(row["curve"])
    for three in zip(curve, curve[1:], curve[2:], strict=False):
        if all(mean >= goal for _, mean in three):
            return float(three[-1][0])
    return math.inf


def _cpu_s_until(row: dict[str, str], steps: float) -> float:
    return float(row["cpu_s"]) * steps / float(row["steps"])


def draw(suite: dict[str, Case], rows: list[dict[str, str]], path: Path) -> None:
    """Learning curves: the interquartile mean over seeds, and the range between the extreme seeds."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import EngFormatter, MaxNLocator

    names = [name for name in suite if any(row["case"] == name for row in rows)]
    columns = min(4, len(names))
    height = math.ceil(len(names) / columns)
    figure, axes = plt.subplots(
        height, columns, figsize=(4 * columns, 3 * height), squeeze=False, layout="constrained"
    )
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    for axis, name in zip(axes.flat, names, strict=False):
        for library, colour in (("ours", "tab:blue"), ("sb3", "tab:orange")):
            curves = [
                json.loads(row["curve"]) for row in rows if (row["case"], row["library"]) == (name, library)
            ]
            points = min(map(len, curves), default=0)
            if not points:
                continue
            steps = np.mean([[at for at, _ in curve[:points]] for curve in curves], axis=0)
            means = np.array([[mean for _, mean in curve[:points]] for curve in curves])
            middle = [interquartile_mean(column) for column in means.T]
            axis.plot(
                steps, middle, color=colour, label="p2pdrl" if library == "ours" else "SB3, zoo's values"
            )
            axis.fill_between(steps, means.min(0), means.max(0), color=colour, alpha=0.15, linewidth=0)
        axis.axhline(suite[name].goal, color="gray", linewidth=0.8, linestyle="--")
        axis.set_title(name, fontsize=10)
        axis.set_xlabel("environment steps", fontsize=8)
        axis.tick_params(labelsize=8)
        axis.xaxis.set_major_locator(MaxNLocator(5))
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.flat[0].legend(fontsize=8)
    axes.flat[0].set_ylabel("return of evaluation", fontsize=8)
    figure.savefig(path, dpi=110)


def wanted(arguments: argparse.Namespace, rows: list[dict[str, str]]) -> Iterator[Run]:
    """The runs that aren't there yet."""
    done = {(row["case"], row["library"], int(row["seed"])) for row in rows}
    libraries = ("ours", "sb3") if arguments.library == "both" else (arguments.library,)
    if "sb3" in libraries and importlib.util.find_spec("stable_baselines3") is None:
        print("stable_baselines3 isn't installed, so there is no comparison: pip install 'p2pdrl[bench]'")
        libraries = tuple(library for library in libraries if library != "sb3")
    for seed in range(arguments.first_seed, arguments.first_seed + arguments.seeds):
        for name, case in SUITES[arguments.suite].items():
            if arguments.only and name not in arguments.only:
                continue
            if case.extra and importlib.util.find_spec(case.extra) is None:
                print(f"{name} is left out: it wants {case.extra}")
                continue
            for library in libraries:
                if (name, library, seed) not in done and (library == "ours" or case.zoo is not None):
                    yield Run(
                        name,
                        library,
                        seed,
                        arguments.episodes,
                        arguments.curve_episodes,
                        arguments.points,
                        arguments.sampled,
                    )


def main() -> int:
    """Run what is missing; print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--suite", choices=sorted(SUITES), default="small")
    parser.add_argument("--only", nargs="*", metavar="CASE", help="cases of the suite")
    parser.add_argument("--library", choices=("ours", "sb3", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=5, help="how many")
    parser.add_argument("--first-seed", type=int, default=1001)
    parser.add_argument("--episodes", type=int, default=50, help="of the evaluation at the end")
    parser.add_argument("--curve-episodes", type=int, default=10, help="of each point of the curve")
    parser.add_argument("--points", type=int, default=20, help="of the curve")
    parser.add_argument("--sampled", action="store_true", help="actions are sampled in all evaluations")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--out", type=Path, default=Path("results"))
    parser.add_argument("--table-only", action="store_true")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    suite, file = SUITES[arguments.suite], Rows(arguments.out / "runs.csv", FIELDS)
    if unknown := set(arguments.only or ()) - set(suite):
        parser.error(f"no such case: {', '.join(sorted(unknown))}; there are {', '.join(suite)}")
    runs = [] if arguments.table_only else list(wanted(arguments, file.read()))
    command, at_commit = command_line(), commit()
    began_s = time.monotonic()
    with ProcessPoolExecutor(arguments.jobs, mp_context=get_context("spawn"), max_tasks_per_child=1) as pool:
        waiting = {pool.submit(train, run, suite[run.case], command, at_commit): run for run in runs}
        for number, done in enumerate(as_completed(waiting), 1):
            run, row = waiting[done], done.result()
            file.add(row)
            print(
                f"{number}/{len(runs)} after {time.monotonic() - began_s:.0f} s: {run.case} {run.library} "
                f"seed {run.seed}: {row['mean']:.1f} ± {row['std']:.1f}, best on the way {row['best']:.1f}, "
                f"{row['cpu_s']:.0f} CPU s",
                file=sys.stderr,
                flush=True,
            )
    rows = file.read()
    lines = table(suite, rows)
    print("\n".join(lines))
    (arguments.out / "table.md").write_text("\n".join(lines) + "\n")
    if rows and importlib.util.find_spec("matplotlib") is not None:
        draw(suite, rows, arguments.out / "curves.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
