"""Measure the replay memory: cycles of appending rows, drawing a sample and updating its priorities.

Each cycle appends 64 rows (8 steps of 8 streams), draws 256 rows and gives them new priorities,
once the memory is full. Beside it, in the same run and in turns, a naive memory of the usual kind: a list of
transitions with both observations (both stacks of frames), returns of n steps made when they come, priorities
in one array whose sum is taken at each draw. Printed are medians over rounds of cycles a second by CPU and by
wall time, the CPU time of each part when it is repeated alone, and bytes per row. The naive memory of frames
is kept smaller, as all of it wouldn't fit; its bytes per row don't depend on that.

    python scripts/bench_replay.py
    python scripts/bench_replay.py --kinds frames --n-step 1
    python scripts/bench_replay.py --capacity 1000000 --kinds vectors --profile
"""

from __future__ import annotations

import argparse
import cProfile
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from p2pdrl.replay.memory import ReplayLayout, ReplayMemory, ReplaySample

Array = npt.NDArray[Any]

STREAMS, STEPS, BATCH, DISCOUNT = 8, 8, 256, 0.99
ALPHA, BETA, EPSILON = 0.6, 0.4, 1e-6
P_END = 1 / 200
KINDS = {"vectors": ((8,), "float32", 1), "frames": ((84, 84), "uint8", 4)}


class Unrolls:
    """A few unrolls, made beforehand, that are handed out in turn.

    Row T of one isn't row 0 of the next: each is changed to it when it is handed out, as the collector does.
    """

    def __init__(self, kind: str, seed: int) -> None:
        shape, dtype, _ = KINDS[kind]
        rng = np.random.default_rng(seed)
        size = (STEPS + 1, STREAMS, *shape)
        self._obs = [(rng.random(size) * 255).astype(dtype) for _ in range(16)]
        self._actions = rng.integers(4, size=(16, STEPS, STREAMS))
        self._rewards = rng.normal(size=(16, STEPS, STREAMS)).astype(np.float32)
        self._ends = rng.random((16, STEPS, STREAMS)) < P_END
        self._valid = np.ones(STREAMS, np.bool_)
        self._at = 0

    def next(self) -> dict[str, Array]:
        """Return the next unroll."""
        before, at = self._at % 16, (self._at + 1) % 16
        self._at += 1
        self._obs[at][0] = self._obs[before][-1]
        valid = np.concatenate((self._valid[None], ~self._ends[at][:-1]))
        ends = self._ends[at] & valid
        self._valid = ~ends[-1]
        return {
            "obs_T1BX": self._obs[at],
            "actions": self._actions[at],
            "rewards_TB": self._rewards[at],
            "terminated_TB": ends,
            "truncated_TB": np.zeros_like(ends),
            "valid_TB": valid,
        }


class Memory(Protocol):
    """What is measured."""

    def append(self, unroll: dict[str, Array]) -> None:
        """Append one unroll."""

    def sample(self, rng: np.random.Generator) -> None:
        """Draw a batch."""

    def update(self, rng: np.random.Generator) -> None:
        """Give its rows new priorities."""


class Ours:
    """`p2pdrl.replay.memory`."""

    def __init__(self, kind: str, capacity: int, n_step: int) -> None:
        shape, dtype, stack = KINDS[kind]
        layout = ReplayLayout(
            shape, dtype, (), "int64", STREAMS, capacity, stack, alpha=ALPHA, epsilon=EPSILON
        )
        self._memory = ReplayMemory(layout, n_step=n_step)
        self._sample: ReplaySample | None = None
        tree_bytes = 9.5 * capacity  # masses, their sums, and which rows count
        self.row_bytes = (layout.nbytes + tree_bytes) / capacity

    def append(self, unroll: dict[str, Array]) -> None:
        """Append one unroll."""
        self._memory.append(**unroll)

    def sample(self, rng: np.random.Generator) -> None:
        """Draw a batch into the arrays of the last one."""
        self._sample = self._memory.sample(BATCH, rng, discount=DISCOUNT, beta=BETA, out=self._sample)

    def update(self, rng: np.random.Generator) -> None:
        """Give its rows new priorities."""
        if self._sample is not None:
            self._memory.update_priorities(
                self._sample.indices_N, self._sample.serials_N, rng.standard_normal(BATCH)
            )


class Naive:
    """Transitions of both observations in a list."""

    def __init__(self, kind: str, capacity: int, n_step: int) -> None:
        shape, dtype, self._stack = KINDS[kind]
        self._capacity, self._n_step = capacity, n_step
        self._rows: list[tuple[Array, int, float, float, Array]] = []
        self._priorities = np.zeros(capacity)
        self._greatest, self._at = 1.0, 0
        self._frames: list[list[Array]] = [[] for _ in range(STREAMS)]
        self._steps: list[list[tuple[Array, int, float]]] = [[] for _ in range(STREAMS)]
        self._drawn = np.zeros(BATCH, np.int64)
        obs_bytes = int(np.prod(shape)) * np.dtype(dtype).itemsize * self._stack
        self.row_bytes = 2 * obs_bytes + 8 + 4 + 4 + 8.0  # the data alone, without Python's objects

    def _observation(self, b: int, frame: Array) -> Array:
        if self._stack == 1:
            return frame.copy()
        frames = [*self._frames[b], frame][-self._stack :]
        self._frames[b] = frames
        empty = [np.zeros_like(frame)] * (self._stack - len(frames))
        return np.stack([*empty, *frames])

    def append(self, unroll: dict[str, Array]) -> None:
        """Append one unroll, step by step."""
        obs, ends = unroll["obs_T1BX"], unroll["terminated_TB"]
        for t in range(STEPS):
            for b in range(STREAMS):
                steps = self._steps[b]
                if not unroll["valid_TB"][t, b]:
                    self._frames[b] = []
                    continue
                seen = self._observation(b, obs[t, b])
                if len(steps) == self._n_step:
                    self._store(steps, seen, done=False)
                    steps.pop(0)
                steps.append((seen, int(unroll["actions"][t, b]), float(unroll["rewards_TB"][t, b])))
                if ends[t, b]:
                    final = self._observation(b, obs[t + 1, b])
                    while steps:
                        self._store(steps, final, done=True)
                        steps.pop(0)

    def _store(self, steps: list[tuple[Array, int, float]], behind: Array, *, done: bool) -> None:
        total = sum(DISCOUNT**i * reward for i, (_, _, reward) in enumerate(steps))
        row = (steps[0][0].copy(), steps[0][1], total, 0.0 if done else DISCOUNT ** len(steps), behind.copy())
        if len(self._rows) < self._capacity:
            self._rows.append(row)
        else:
            self._rows[self._at] = row
        self._priorities[self._at] = self._greatest
        self._at = (self._at + 1) % self._capacity

    def sample(self, rng: np.random.Generator) -> None:
        """Draw a batch and stack it."""
        masses = self._priorities[: len(self._rows)] ** ALPHA
        p = masses / masses.sum()
        self._drawn = rng.choice(len(p), size=BATCH, p=p)
        rows = [self._rows[i] for i in self._drawn]
        weights = (len(p) * p[self._drawn]) ** -BETA
        weights /= weights.max()
        for column in zip(*rows, strict=True):
            np.array(column)

    def update(self, rng: np.random.Generator) -> None:
        """Give its rows new priorities."""
        priorities = np.abs(rng.standard_normal(BATCH)) + EPSILON
        self._priorities[self._drawn] = priorities
        self._greatest = max(self._greatest, float(priorities.max()))


def timed(parts: dict[str, Callable[[], None]], cycles: int) -> dict[str, float]:
    """Return CPU and wall seconds of a cycle, and the CPU seconds of each part when it is repeated alone."""
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(cycles):
        for part in parts.values():
            part()
    taken = {"cpu": (time.process_time() - cpu) / cycles, "wall": (time.perf_counter() - wall) / cycles}
    for name, part in parts.items():
        cpu = time.process_time()  # not within the cycles: where asking is slow, it would be most of them
        for _ in range(cycles):
            part()
        taken[name] = (time.process_time() - cpu) / cycles
    return taken


def measure(kind: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return a row of the table for each memory."""
    naive_capacity = min(
        arguments.capacity, arguments.naive_frames if kind == "frames" else arguments.capacity
    )
    memories: dict[str, tuple[Any, int, int]] = {
        "p2pdrl": (Ours(kind, arguments.capacity, arguments.n_step), arguments.capacity, arguments.cycles),
        "naive": (
            Naive(kind, naive_capacity, arguments.n_step),
            naive_capacity,
            max(arguments.cycles // 10, 5),
        ),
    }
    rng = np.random.default_rng(arguments.seed)
    all_parts: dict[str, dict[str, Callable[[], None]]] = {}
    for name, (memory, capacity, _) in memories.items():
        unrolls = Unrolls(kind, arguments.seed)
        for _ in range(capacity // (STEPS * STREAMS) + 10):
            memory.append(unrolls.next())
        all_parts[name] = {
            "append": lambda memory=memory, unrolls=unrolls: memory.append(unrolls.next()),
            "sample": lambda memory=memory: memory.sample(rng),
            "update": lambda memory=memory: memory.update(rng),
        }
    samples: dict[str, list[dict[str, float]]] = defaultdict(list)
    for turn in range(arguments.rounds + 1):
        for name, parts in all_parts.items():
            taken = timed(parts, memories[name][2])
            if turn > 0:  # the first round warms up
                samples[name].append(taken)
    if arguments.profile:
        with cProfile.Profile() as profile:
            timed(all_parts["p2pdrl"], arguments.cycles)
        profile.print_stats("tottime")
    rows = []
    for name, taken in samples.items():
        median = {part: statistics.median(t[part] for t in taken) for part in taken[0]}
        rows.append(
            {
                "kind": kind,
                "memory": name,
                "capacity": memories[name][1],
                "cycles_per_cpu_s": 1 / median["cpu"],
                "cycles_per_wall_s": 1 / median["wall"],
                **{f"{part}_cpu_s": median[part] for part in ("append", "sample", "update")},
                "row_bytes": memories[name][0].row_bytes,
            }
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table."""
    print(
        f"{'':8} {'memory':7} {'rows':>8} {'cycles/s':>9} {'cycles/s':>9} {'append':>8} {'sample':>8}", end=""
    )
    print(f" {'update':>8} {'bytes':>8}")
    print(f"{'':25} {'CPU':>9} {'wall':>9} {'CPU µs':>8} {'CPU µs':>8} {'CPU µs':>8} {'a row':>8}")
    for row in rows:
        print(
            f"{row['kind']:8} {row['memory']:7} {row['capacity']:>8} {row['cycles_per_cpu_s']:9.0f} "
            f"{row['cycles_per_wall_s']:9.0f} {row['append_cpu_s'] * 1e6:8.0f} "
            f"{row['sample_cpu_s'] * 1e6:8.0f} {row['update_cpu_s'] * 1e6:8.0f} {row['row_bytes']:8.0f}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--capacity", type=int, default=100_000, help="rows")
    parser.add_argument("--naive-frames", type=int, default=8_000, help="rows of the naive memory of frames")
    parser.add_argument(
        "--cycles", type=int, default=200, help="of a round; a tenth of them for the naive memory"
    )
    parser.add_argument("--n-step", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--profile", action="store_true", help="also print where ours spends its time")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    rows = [row for kind in arguments.kinds for row in measure(kind, arguments)]
    if arguments.json:
        print(json.dumps(rows))
    else:
        show(rows)


if __name__ == "__main__":
    main()
