r"""How fast a learner is: environment steps and gradient steps per second, preset by preset.

One process per preset, checkout and variant trains it, on one thread, with its environments inside. Those of
the same preset take turns of some updates each, so that a machine with other work slows all of them alike;
medians over the turns are printed, by CPU time and by the clock, and the ratio to the reference: above 1, the
row is faster. The reference is the checkout of ``--against``, by CPU time, or else the first variant, by the
clock (on a GPU the processor waits, which costs it nothing). A variant is a list of ``key=value``,
``node.learner.device`` and ``node.learner.compile`` among them. Updates before the first gradient, while a
replay memory fills up, don't count; nor do the first two, in which ``torch.compile`` does its work.

    python scripts/bench_learner.py --presets cartpole dqn
    python scripts/bench_learner.py --presets pong --against ../main --turns 9 --set task.env.num_envs=4
    python scripts/bench_learner.py --presets pong --variant node.learner.device=cpu \
        --variant node.learner.device=cuda task.gradients.precision=bf16
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parents[1]
PRESETS = ("cartpole", "dqn")
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
MOST_WARMING = 10_000
"""Updates after which a preset that never makes a gradient step is given up."""


class Turn(NamedTuple):
    """What one turn amounted to: counts, and seconds of CPU time and by the clock."""

    env_steps: float
    gradient_steps: float
    cpu_s: float
    wall_s: float

    @property
    def per_cpu_s(self) -> float:
        """Environment steps per second of CPU time."""
        return self.env_steps / self.cpu_s

    @property
    def per_s(self) -> float:
        """Environment steps per second by the clock."""
        return self.env_steps / self.wall_s


class Learner:
    """A process that trains a preset with a checkout's package, a turn at a time.

    Args:
        checkout: root of it.
        preset: name or path.
        sets: ``key=value`` over the preset.
    """

    def __init__(self, checkout: Path, preset: str, sets: Sequence[str]) -> None:
        paths = [str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), "--learn", preset, "--set", *sets],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": os.pathsep.join(paths)},
            cwd=checkout,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        found = Path(self._answer()["package"]).resolve()
        if not found.is_relative_to(checkout):
            self.close()
            raise SystemExit(f"bench_learner.py: Python imports p2pdrl from {found}, not from {checkout}")

    def turn(self, updates: int) -> Turn:
        """Make some updates."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        print(updates, file=self._process.stdin, flush=True)
        return Turn(**self._answer())

    def _answer(self) -> Any:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("bench_learner.py: a learner ended; what it said is above")
        return json.loads(line)

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def learn(preset: str, sets: Sequence[str]) -> None:
    """Be a learner's process: for each number on stdin make so many updates, and say how fast they were."""
    import torch

    import p2pdrl
    from p2pdrl.config.loader import resolve
    from p2pdrl.rl.engines import EngineOptions
    from p2pdrl.rl.registry import build_trainer

    torch.set_num_threads(1)
    with contextlib.suppress(ImportError):  # as a node's learner does, in checkouts that have it
        from p2pdrl.workers.child import keep_freed_memory

        keep_freed_memory()
    config = resolve(files=[preset], sets=["node.learner.device=cpu", *sets]).config
    engine = EngineOptions(compiled=config.node.learner.compile)
    trainer = build_trainer(config.task, 1, config.node.learner.device, engine=engine)
    with contextlib.closing(trainer):
        for _ in range(MOST_WARMING):
            if trainer.step().metrics["gradient_steps"] > 0:
                break
        trainer.step()
        trainer.step()
        print(json.dumps({"package": str(Path(p2pdrl.__path__[0]))}), flush=True)
        for line in sys.stdin:
            env_steps, gradient_steps = 0, 0.0
            cpu_s, wall_s = time.process_time(), time.perf_counter()
            for _ in range(int(line)):
                stats = trainer.step()
                env_steps += stats.env_steps
                gradient_steps += stats.metrics["gradient_steps"]
            turn = Turn(env_steps, gradient_steps, time.process_time() - cpu_s, time.perf_counter() - wall_s)
            print(json.dumps(turn._asdict()), flush=True)


def measure(
    preset: str,
    contenders: Sequence[tuple[Path, Sequence[str]]],
    sets: Sequence[str],
    *,
    by_cpu: bool,
    updates: int,
    turns: int,
) -> list[dict[str, Any]]:
    """Return a row of the table for each checkout and variant.

    Args:
        by_cpu: ratios are to the last contender by CPU time, not to the first by the clock.
    """
    with contextlib.ExitStack() as stack:
        learners = [
            stack.enter_context(contextlib.closing(Learner(path, preset, [*sets, *variant])))
            for path, variant in contenders
        ]
        taken = [[learner.turn(updates) for learner in learners] for _ in range(turns)]
    rows = []
    for number, (path, variant) in enumerate(contenders):
        mine = [turn[number] for turn in taken]
        if by_cpu:
            ratios = [turn[number].per_cpu_s / turn[-1].per_cpu_s for turn in taken]
        else:
            ratios = [turn[number].per_s / turn[0].per_s for turn in taken]
        rows.append(
            {
                "preset": preset,
                "checkout": str(path),
                "variant": " ".join(variant),
                "env_steps_per_cpu_s": statistics.median(turn.per_cpu_s for turn in mine),
                "gradient_steps_per_cpu_s": statistics.median(
                    turn.gradient_steps / turn.cpu_s for turn in mine
                ),
                "env_steps_per_s": statistics.median(turn.per_s for turn in mine),
                "gradient_steps_per_s": statistics.median(turn.gradient_steps / turn.wall_s for turn in mine),
                "ratio": statistics.median(ratios),
            }
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--presets", nargs="+", default=PRESETS, metavar="NAME", help="or paths of TOML files"
    )
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--against", type=Path, metavar="PATH", help="another checkout")
    others.add_argument(
        "--variant", nargs="+", action="append", metavar="KEY=VALUE", help="of one contender; give several"
    )
    parser.add_argument("--updates", type=int, default=5, help="of a turn (default: 5)")
    parser.add_argument("--turns", type=int, default=7, help="of each process (default: 7)")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="over every preset")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of the table")
    parser.add_argument("--learn", metavar="NAME", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.learn is not None:
        learn(options.learn, options.set)
        return
    if options.against is not None:
        contenders = [(HERE, []), (options.against.resolve(), [])]
    else:
        contenders = [(HERE, variant) for variant in options.variant or [[]]]
    rows: list[dict[str, Any]] = []
    for preset in options.presets:
        rows += measure(
            preset,
            contenders,
            options.set,
            by_cpu=options.against is not None,
            updates=options.updates,
            turns=options.turns,
        )
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    print(f"{'':14} {'per CPU second':^25} {'per second':^25}")
    print(
        f"{'preset':14} {'env steps':>12} {'gradients':>12} {'env steps':>12} {'gradients':>12} {'ratio':>6}"
    )
    for row in rows:
        print(
            f"{row['preset']:14} {row['env_steps_per_cpu_s']:12.0f} {row['gradient_steps_per_cpu_s']:12.1f} "
            f"{row['env_steps_per_s']:12.0f} {row['gradient_steps_per_s']:12.1f} {row['ratio']:6.3f}  "
            f"{row['variant'] or row['checkout']}"
        )


if __name__ == "__main__":
    main()
