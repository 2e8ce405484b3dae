"""How far a long job is, and how long it'll take yet: on standard error, for whoever waits for it.

On a terminal it is one line that changes, several times a second at most; elsewhere a line every ten seconds,
so that logs stay short and quick jobs say nothing. Jobs of commands (``eval``, ``export``, ``doctor``,
``pipeline plan``) tell theirs, the child processes that they start too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from time import monotonic
from typing import TextIO

__all__ = ["Progress"]

LIVE_EVERY_S = 0.2
LOG_EVERY_S = 10.0
SHOWN_AFTER_S = 1.0
"""What is left is told once so much of a part is known."""


class Progress:
    """Tells about one part after the other; leaving it as a context manager wipes the line that changes.

    Args:
        out: where to.
        clock: monotonic seconds.
        live: whether a line can be written over; by default where ``out`` is a terminal that isn't dumb.
    """

    def __init__(
        self, out: TextIO | None = None, clock: Callable[[], float] = monotonic, *, live: bool | None = None
    ) -> None:
        self._out = sys.stderr if out is None else out
        self._clock = clock
        self._live = self._out.isatty() and os.environ.get("TERM") != "dumb" if live is None else live
        self._what = ""
        self._began_s = self._told_s = clock()
        self._width = 0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.clear()

    def part(self, what: str) -> None:
        """Begin a part: ``playing 100 greedy episodes``."""
        self._what, self._began_s = what, self._clock()
        self._told_s = self._began_s
        if self._live:
            self._write(f"{what} …")

    def at(self, done: int, total: int) -> None:
        """Say that so much of the part is done."""
        now_s = self._clock()
        if done >= total or now_s - self._told_s < (LIVE_EVERY_S if self._live else LOG_EVERY_S):
            return
        self._told_s = now_s
        spent_s = now_s - self._began_s
        left = ""
        if done > 0 and spent_s >= SHOWN_AFTER_S:
            left = f", {_span(spent_s / done * (total - done))} left"
        self._write(f"{self._what}: {done:,} of {total:,}{left}")

    def clear(self) -> None:
        """Wipe the line that changes."""
        if self._live and self._width:
            self._out.write(f"\r{' ' * self._width}\r")
            self._out.flush()
        self._width = 0

    def _write(self, line: str) -> None:
        if self._live:
            self._out.write(f"\r{line:<{self._width}}")
            self._width = len(line)
        else:
            self._out.write(f"{line}\n")
        self._out.flush()


def _span(seconds: float) -> str:
    """``12 s``, ``3 min``, ``2 h``."""
    for unit, size in (("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"
