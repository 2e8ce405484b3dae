"""Finds what keeps an event loop from going on: a callback without end, or many at one moment of its time.

A coroutine whose awaits all return at once (its event is set, its lock free, its result there) lets nobody
else run: no timeout of asyncio's can end it, and a daemon in which that happens is taken for dead by all
others. And where virtual time waits for tasks that always have something to do, it stands still.
"""

# asyncio tells nobody else when a callback begins and ends.
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

import pytest

__all__ = ["SpinGuard"]

LOOK_EVERY = 4096
"""Callbacks between two looks at the loop's time."""


class SpinGuard:
    """While it is entered, fails the test in which a loop spins. One at a time, in the main thread.

    Args:
        busy_s: processor time of this process, in seconds, that one callback may take, and up to twice that.
        at_once: callbacks that may run at one moment of the loop's time, and up to `LOOK_EVERY` more.
    """

    def __init__(self, busy_s: float, at_once: int) -> None:
        self._busy_s, self._at_once = busy_s, at_once
        self._failure: BaseException | None = None
        self._count, self._count_before = 0, -1
        self._inside = False
        self._moment, self._moment_count = -1.0, 0

    def __enter__(self) -> SpinGuard:
        guard, run = self, asyncio.Handle._run
        self._run: Any = run

        def watched(handle: Any) -> None:
            guard._count += 1
            guard._inside = True
            run(handle)
            guard._inside = False
            if guard._count % LOOK_EVERY == 0:
                guard._look_at_time(handle._loop.time())
            # Whatever was interrupted may have kept its failure to itself, or told it to nobody who asks.
            if guard._failure is not None:
                failure, guard._failure = guard._failure, None
                raise failure

        asyncio.Handle._run = watched
        self._handler = None
        if threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGVTALRM, self._look_at_count)
            signal.setitimer(signal.ITIMER_VIRTUAL, self._busy_s, self._busy_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        asyncio.Handle._run = self._run
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            signal.signal(signal.SIGVTALRM, self._handler)

    def _look_at_count(self, _signal: int, _frame: FrameType | None) -> None:
        """Fail what runs now, if it ran the last time as well."""
        if self._inside and self._count == self._count_before:
            self._failure = pytest.fail.Exception(
                f"a callback held the event loop up for {self._busy_s:g} s of processor time"
            )
            raise self._failure
        self._count_before = self._count

    def _look_at_time(self, now_s: float) -> None:
        if now_s != self._moment:
            self._moment, self._moment_count = now_s, self._count
        elif self._count - self._moment_count >= self._at_once:
            self._moment = -1.0
            self._failure = pytest.fail.Exception(
                f"{self._at_once} callbacks ran, and for the loop it is {now_s:g} s still"
            )
