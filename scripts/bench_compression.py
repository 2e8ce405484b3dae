"""Measure compression, robust mixing and the shards' optimizers on one thread, beside a plain copy.

Each round times everything one after another, so that what else the machine does falls on all alike.
Printed are medians of wall and CPU time, MB/s of float32, the wall time over that of a copy of the same
vector in the same round (median of ratios), and the bytes of a message over those of float32.

    python scripts/bench_compression.py --rounds 11 --millions 10
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import get_args

import numpy as np

from p2pdrl.config.strategy import Compression, Mixing
from p2pdrl.tensors.compression import ThresholdResidual, add_message, make_codec
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.optimizers import OptimizerName, ShardOptimizer, update_rule
from p2pdrl.tensors.robust import combine

COPY = "copy"
NODES = 4
ONE_PERCENT = 2.5758
"""A normal number is beyond this once in a hundred times."""


class Stopwatch:
    """Wall and CPU times of each thing measured, one per round."""

    def __init__(self) -> None:
        self.wall_s: dict[str, list[float]] = defaultdict(list)
        self.cpu_s: dict[str, list[float]] = defaultdict(list)
        self.nbytes: dict[str, int] = {}

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add what the block takes to ``name``."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall_s[name].append(time.perf_counter() - wall)
        self.cpu_s[name].append(time.process_time() - cpu)

    def report(self, nbytes: int) -> None:
        """Print a table; the first round warmed up and isn't counted."""
        print(f"{'':34}{'wall ms':>9}{'CPU ms':>9}{'MB/s':>8}{'copies':>8}{'bytes':>8}")
        copies = self.wall_s[COPY][1:]
        for name, walls in self.wall_s.items():
            wall = statistics.median(walls[1:])
            ratio = statistics.median(w / c for w, c in zip(walls[1:], copies, strict=True))
            share = f"{self.nbytes[name] / nbytes:8.4f}" if name in self.nbytes else ""
            print(
                f"{name:34}{wall * 1e3:9.2f}{statistics.median(self.cpu_s[name][1:]) * 1e3:9.2f}"
                f"{nbytes / 1e6 / wall:8.0f}{ratio:8.1f}{share}"
            )


Task = Callable[[Stopwatch], None]


def codec_task(kind: Compression, vector: Float32Array) -> Task:
    """Encode and decode, 1 % of the entries where that is asked."""
    codec = make_codec(kind, vector.size, keep=0.01, threshold=ONE_PERCENT)
    buffer = memoryview(bytearray(codec.max_nbytes))
    out = np.empty_like(vector)

    def run(watch: Stopwatch) -> None:
        codec.reset()
        with watch.timed(f"{kind}, encode"):
            nbytes = codec.encode(vector, buffer)
        watch.nbytes[f"{kind}, encode"] = nbytes
        with watch.timed(f"{kind}, decode"):
            codec.decode(buffer[:nbytes], out)

    return run


def strom_task(vector: Float32Array) -> Task:
    """Add a message of 1 % of the entries, which touches no other."""
    kept = ThresholdResidual(vector.size, ONE_PERCENT)
    buffer = memoryview(bytearray(kept.max_nbytes))
    nbytes = kept.take(buffer, add=vector)
    out = np.zeros_like(vector)

    def run(watch: Stopwatch) -> None:
        with watch.timed("threshold, add a message"):
            add_message(buffer[:nbytes], kept.tau, out)

    return run


def mixing_task(mixing: Mixing, vectors: list[Float32Array]) -> Task:
    """Combine the vectors of some nodes."""
    out = np.empty_like(vectors[0])

    def run(watch: Stopwatch) -> None:
        with watch.timed(f"{mixing} of {len(vectors)} nodes"):
            combine(vectors, [1] * len(vectors), mixing=mixing, out=out)

    return run


def optimizer_task(name: OptimizerName, gradient: Float32Array) -> Task:
    """One step of a whole vector."""
    optimizer = ShardOptimizer(update_rule(name), gradient.size)
    parameters = np.ones_like(gradient)

    def run(watch: Stopwatch) -> None:
        with watch.timed(f"{name}, a step"):
            optimizer.step(parameters, gradient, 1e-3)

    return run


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds after one to warm up")
    parser.add_argument("--millions", type=float, default=10.0, help="elements of the vector, in millions")
    arguments = parser.parse_args()
    size = int(arguments.millions * 1e6)
    vectors = list(np.random.default_rng(0).standard_normal((NODES, size), dtype=np.float32))
    tasks = [codec_task(kind, vectors[0]) for kind in get_args(Compression)]
    tasks.append(strom_task(vectors[0]))
    tasks += [mixing_task(mixing, vectors) for mixing in get_args(Mixing)]
    tasks += [optimizer_task(name, vectors[1]) for name in get_args(OptimizerName)]
    out = np.empty_like(vectors[0])
    watch = Stopwatch()
    for _ in range(arguments.rounds + 1):
        with watch.timed(COPY):
            np.copyto(out, vectors[0])
        for task in tasks:
            task(watch)
    print(f"{size / 1e6:g} M float32, medians of {arguments.rounds} rounds, {os.cpu_count()} cores")
    watch.report(4 * size)


if __name__ == "__main__":
    main()
