"""How fast learners are beside Stable-Baselines3 at equal hyperparameters: environment steps per second.

One process of each library per case, on one thread, with its environments inside. They take turns of so many
environment steps each, so that a machine with other work slows both alike; medians over the turns are
printed, per second of CPU time and of the clock, and the median of the ratios, ours to theirs. Networks,
batches, epochs, gradients per environment step and target rules are the same; off-policy learners make
their gradients in larger blocks here (8 for 8 steps rather than 1 for each), which is how our presets do it.
A number behind a case's name is that of its environments (8 else, 1 off-policy).

    pip install 'p2pdrl[bench]'
    python scripts/bench_libraries.py --cases ppo a2c dqn sac td3 ddpg
    python scripts/bench_libraries.py --cases pong --turns 5
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parents[1]
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


@dataclass(frozen=True)
class Case:
    """The same learner twice.

    Attributes:
        preset: ours.
        sets: ``KEY=VALUE`` over it.
        algorithm: class in ``stable_baselines3``, with ``options`` of its constructor.
        steps: environment steps of a turn.
        warm_up: environment steps before the first turn.
    """

    preset: str
    sets: tuple[str, ...]
    algorithm: str
    options: dict[str, Any] = field(default_factory=dict)
    n_envs: int = 1
    steps: int = 8_192
    warm_up: int = 2_048
    env_id: str = "CartPole-v1"
    policy: str = "MlpPolicy"


def _off_policy(name: str, *sets: str, **options: Any) -> Case:
    wide = "task.network.hidden=[256, 256]"
    equal = {"batch_size": 256, "learning_starts": 100, "train_freq": 1, "gradient_steps": 1, "tau": 0.005}
    return Case(
        name,
        (wide, "task.algorithm.batch_size=256", "task.algorithm.learning_starts=100", *sets),
        name.upper(),
        {**equal, "buffer_size": 100_000, "policy_kwargs": {"net_arch": [256, 256]}, **options},
        steps=400,
        warm_up=200,
        env_id="Pendulum-v1",
    )


def _ppo(n_envs: int, n_steps: int) -> Case:
    """Four passes over minibatches of 256."""
    minibatches = n_envs * n_steps // 256
    return Case(
        "ppo",
        (
            f"task.env.num_envs={n_envs}", "task.env.normalize_returns=false",
            f"task.algorithm.unroll_steps={n_steps}", f"task.algorithm.minibatches={minibatches}",
            "task.algorithm.epochs=4", "task.network.hidden=[64, 64]",
            "task.algorithm.normalize_over=minibatch",
        ),
        "PPO",
        {"n_steps": n_steps, "batch_size": 256, "n_epochs": 4},
        n_envs=n_envs,
    )  # fmt: skip


def _a2c(n_envs: int) -> Case:
    return Case(
        "a2c",
        (
            f"task.env.num_envs={n_envs}", "task.env.normalize_returns=false",
            "task.algorithm.unroll_steps=5", "task.algorithm.gae_lambda=1",
            "task.algorithm.optimizer=rmsprop", "task.network.hidden=[64, 64]",
        ),
        "A2C",
        {"n_steps": 5},
        n_envs=n_envs,
    )  # fmt: skip


CASES = {
    "ppo": _ppo(8, 128),
    "ppo-64": _ppo(64, 16),
    "a2c": _a2c(8),
    "a2c-64": _a2c(64),
    "dqn": Case(
        "dqn",
        (
            "task.network.hidden=[64, 64]", "task.algorithm.double=false", "task.algorithm.batch_size=32",
            "task.algorithm.n_step=1",
            "task.algorithm.unroll_steps=8", "task.algorithm.gradient_steps=16",
            "task.algorithm.target_tau=none", "task.algorithm.target_every=10000",
            "task.algorithm.learning_starts=1000", "task.algorithm.max_grad_norm=10",
        ),
        "DQN",
        {
            "batch_size": 32, "buffer_size": 100_000, "learning_starts": 1000, "train_freq": 4,
            "gradient_steps": 1, "target_update_interval": 10_000,
        },
        steps=4_096,
    ),
    "dqn-wide": Case(
        "dqn",
        (
            "task.network.hidden=[256, 256]", "task.algorithm.double=false", "task.algorithm.batch_size=64",
            "task.algorithm.n_step=1",
            "task.algorithm.unroll_steps=16", "task.algorithm.gradient_steps=64",
            "task.algorithm.target_tau=none", "task.algorithm.target_every=10",
            "task.algorithm.learning_starts=1000", "task.algorithm.max_grad_norm=10",
        ),
        "DQN",
        {
            "batch_size": 64, "buffer_size": 100_000, "learning_starts": 1000, "train_freq": 256,
            "gradient_steps": 128, "target_update_interval": 10, "policy_kwargs": {"net_arch": [256, 256]},
        },
        steps=2_048,
    ),
    "sac": _off_policy("sac"),
    "sac-small": _off_policy(
        "sac", "task.network.hidden=[64, 64]", policy_kwargs={"net_arch": [64, 64]}
    ),
    "td3": _off_policy("td3"),
    "ddpg": _off_policy("ddpg"),
    "pong": Case(
        "pong",
        ("task.env.num_envs=8", "task.algorithm.unroll_steps=128", "task.algorithm.minibatches=4",
         "task.algorithm.epochs=4"),
        "PPO",
        {"n_steps": 128, "batch_size": 256, "n_epochs": 4},
        n_envs=8,
        steps=1_024,
        warm_up=1_024,
        env_id="PongNoFrameskip-v4",
        policy="CnnPolicy",
    ),
}  # fmt: skip


class Turn(NamedTuple):
    """What one turn amounted to: environment steps per second."""

    per_cpu_s: float
    per_wall_s: float


class Process:
    """One library at work on a case, a turn at a time."""

    def __init__(self, library: str, name: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--learn", library, "--cases", name],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(HERE)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._line()

    def turn(self) -> Turn:
        """Let it learn for a turn."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        print(file=self._process.stdin, flush=True)
        return Turn(*json.loads(self._line()))

    def _line(self) -> str:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("bench_libraries.py: a learner ended; what it said is above")
        return line

    def close(self) -> None:
        """End it."""
        self._process.communicate()


def ours(case: Case) -> Callable[[int], int]:
    """Return what learns for some environment steps and tells how many it made."""
    from p2pdrl.config.loader import resolve
    from p2pdrl.rl.registry import build_trainer

    sets = [*case.sets, f"task.env.id={case.env_id}"]
    trainer = build_trainer(resolve(files=[case.preset], sets=sets).config.task, 1, "cpu")

    def learn(steps: int) -> int:
        made = 0
        while made < steps:
            made += trainer.step().env_steps
        return made

    return learn


def theirs(case: Case) -> Callable[[int], int]:
    """Return the same of Stable-Baselines3."""
    import gymnasium
    import stable_baselines3
    from stable_baselines3.common.env_util import make_atari_env, make_vec_env
    from stable_baselines3.common.vec_env import VecFrameStack

    if case.policy == "CnnPolicy":
        gymnasium.register_envs(importlib.import_module("ale_py"))
        env = VecFrameStack(make_atari_env(case.env_id, case.n_envs, seed=1), 4)
    else:
        env = make_vec_env(case.env_id, case.n_envs, seed=1)
    model = getattr(stable_baselines3, case.algorithm)(case.policy, env, device="cpu", seed=1, **case.options)

    def learn(steps: int) -> int:
        before = model.num_timesteps
        model.learn(steps, reset_num_timesteps=False)
        return int(model.num_timesteps - before)

    return learn


def serve(library: str, case: Case) -> None:
    """Be a library's process: for each line on stdin a turn."""
    import torch

    torch.set_num_threads(1)
    learn = (ours if library == "ours" else theirs)(case)
    learn(case.warm_up)
    print(flush=True)
    for _ in sys.stdin:
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        made = learn(case.steps)
        print(
            json.dumps([made / (time.process_time() - cpu_s), made / (time.perf_counter() - wall_s)]),
            flush=True,
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--cases", nargs="+", choices=CASES, default=[name for name in CASES if name != "pong"]
    )
    parser.add_argument("--turns", type=int, default=7, help="of each process (default: 7)")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--learn", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.learn is not None:
        serve(options.learn, CASES[options.cases[0]])
        return
    rows = []
    for name in options.cases:
        with ExitStack() as stack:
            both = [stack.enter_context(closing(Process(library, name))) for library in ("ours", "theirs")]
            turns = [[process.turn() for process in both] for _ in range(options.turns)]
        row: dict[str, Any] = {"case": name}
        for unit in Turn._fields:
            pairs = [[getattr(turn, unit) for turn in pair] for pair in turns]
            row[unit] = [statistics.median(column) for column in zip(*pairs, strict=True)]
            row[f"ratio_{unit}"] = statistics.median(mine / other for mine, other in pairs)
        rows.append(row)
        if not options.json:
            (mine, other), ratio = row["per_cpu_s"], row["ratio_per_cpu_s"]
            if len(rows) == 1:
                print("steps per CPU second, ratio of them, ratio of steps per second of the clock")
                print(f"{'case':10} {'p2pdrl':>9} {'SB3':>9} {'ratio':>6} {'of clock':>9}")
            clock = row["ratio_per_wall_s"]
            print(f"{name:10} {mine:9.0f} {other:9.0f} {ratio:6.2f} {clock:9.2f}", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))


if __name__ == "__main__":
    main()
