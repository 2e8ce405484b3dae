"""How far a long job is, and how long it'll take yet: on standard error, for whoever waits for it.

On a terminal it is one line that changes, several times a second at most; elsewhere a line every ten
seconds, so that logs stay short and quick jobs say nothing. What is left is told where it is known how much
there is to do; else how long it has taken so far. Jobs of commands (``eval``, ``export``, ``doctor``,
``pipeline plan``) tell theirs, the child processes that they start too.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from time import monotonic
from typing import Self, TextIO

__all__ = ["ProgressLine"]

LIVE_EVERY_S = 0.2
LOG_EVERY_S = 10.0
TICK_S = 1.0
SHOWN_AFTER_S = 1.0
"""What is left is told once so much of a part is known."""


class ProgressLine:
    """Tells about one part after the other.

    As a context manager it tells by itself, in a thread, how long a part has taken of which nobody says how
    far it is; leaving that wipes the line that changes.

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
        self._what, self._done, self._total = "", 0, 0
        self._began_s = self._told_s = clock()
        self._width = 0
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick_on, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.clear()

    def _tick_on(self) -> None:
        while not self._over.wait(TICK_S):
            self.tick()

    def tick(self) -> None:
        """Say how long the part has taken, if nothing was said for a while."""
        with self._lock:
            self._tell(TICK_S if self._live else LOG_EVERY_S)

    def part(self, what: str) -> None:
        """Begin a part: ``playing 100 greedy episodes``."""
        with self._lock:
            self._what, self._began_s = what, self._clock()
            self._told_s, self._done, self._total = self._began_s, 0, 0
            if self._live:
                self._write(f"{what} …")

    def at(self, done: int, total: int) -> None:
        """Say that so much of the part is done."""
        with self._lock:
            self._done, self._total = done, total
            if done < total:
                self._tell(LIVE_EVERY_S if self._live else LOG_EVERY_S)

    def _tell(self, every_s: float) -> None:
        now_s = self._clock()
        if not self._what or now_s - self._told_s < every_s:
            return
        self._told_s = now_s
        spent_s = now_s - self._began_s
        if not self._total:
            words = f"{_span(spent_s)} so far"
        else:
            words = f"{self._done:,} of {self._total:,}"
            if self._done and spent_s >= SHOWN_AFTER_S:
                words += f", {_span(spent_s / self._done * (self._total - self._done))} left"
        self._write(f"{self._what}: {words}")

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
