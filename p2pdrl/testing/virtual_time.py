"""Virtual time: an event loop whose clock jumps to the next timer as soon as nobody has anything to do.

Coroutines that wait for timers and for each other alone run as fast as their work, and always in the same
order. Whoever waits for a thread, a process or a socket would wait in vain.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

__all__ = ["VirtualTimeLoop", "run_in_virtual_time"]

T = TypeVar("T")


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that never sleeps; its time begins at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0
        super().__init__(_JumpingSelector(self))

    def time(self) -> float:
        """Virtual seconds."""
        return self._now_s

    def jump(self, seconds: float | None) -> None:
        """Nobody has anything to do for so long; None: ever.

        Raises:
            RuntimeError: no timer will ever wake anybody.
        """
        if seconds is None:
            raise RuntimeError("in virtual time all wait for each other, and no timer is set")
        self._now_s += seconds


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout != 0:
            self._loop.jump(timeout)
        return ready


def run_in_virtual_time(work: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, in virtual time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(work)
