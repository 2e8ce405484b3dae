"""How a process of `bench_pipeline.py` is talked to: lines of JSON on standard input and output."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from p2pdrl.pipeline.schedule import ScheduleName

__all__ = ["LEARNING_RATE", "MAX_GRAD_NORM", "Contender", "Stopwatch", "Trial", "hear", "say"]

LEARNING_RATE = 0.0
"""All work of a step is done and nothing moves: so every contender finds the same gradient at every step."""
MAX_GRAD_NORM = 0.5


def say(**words: object) -> None:
    """Send one line."""
    sys.stdout.write(json.dumps(words) + "\n")
    sys.stdout.flush()


def hear() -> dict[str, Any]:
    """Wait for the next line.

    Raises:
        EOFError: there are no more.
    """
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    heard: dict[str, Any] = json.loads(line)
    return heard


@dataclass(frozen=True)
class Trial:
    """What to do.

    Attributes:
        schedule: of the pipeline.
        microbatches: M.
        steps: how many.
        key: over the connections with a swarm key, where there are such.
    """

    schedule: ScheduleName
    microbatches: int
    steps: int
    key: bool = False


@dataclass
class Stopwatch:
    """Notes when steps end; the clock is the same in all processes of a machine.

    Args:
        device: whose work has to be done by then.
        peak_bytes: asked at the end of each step for the most memory so far; None doesn't ask.
    """

    device: torch.device
    peak_bytes: Callable[[], int] | None = None
    begin_s: float = 0.0
    begin_cpu_s: float = 0.0
    end_s: float = 0.0
    end_cpu_s: float = 0.0
    norms: list[float] = field(default_factory=list)
    most_bytes: int = 0

    def begin(self) -> None:
        """The first step begins, or the wait for it."""
        self.norms = []
        self.begin_s, self.begin_cpu_s = self._now()

    def stepped(self, norm: float) -> None:
        """A step has ended."""
        self.norms.append(norm)
        self.end_s, self.end_cpu_s = self._now()
        if self.peak_bytes is not None:
            self.most_bytes = self.peak_bytes()

    def read(self) -> dict[str, Any]:
        """Return when the steps began and ended, CPU seconds, and the gradients' norms."""
        return {
            "begin_s": self.begin_s,
            "end_s": self.end_s,
            "cpu_s": self.end_cpu_s - self.begin_cpu_s,
            "norms": self.norms,
        }

    def _now(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.monotonic(), time.process_time()


class Contender(Protocol):
    """One way to step, in one process of it."""

    def meet(self, **options: Any) -> None:
        """Connect with the other ranks: may `say` and `hear` to learn where they are."""
        ...

    def prepare(self, trial: Trial) -> None:
        """Get ready for such a trial.

        Raises:
            ConfigError: there can't be one.
            ValueError: likewise.
        """
        ...

    def run(self, trial: Trial, watch: Stopwatch) -> dict[str, Any]:
        """Do the steps of a trial, and tell the watch; return more figures.

        Rank 0 has been told that the others are there.
        """
        ...

    def close(self) -> None:
        """End."""
        ...
