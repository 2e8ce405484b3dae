"""Virtual time: what is to be done, in the order of its moments; those of one moment in the order made."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any

__all__ = ["EventQueue"]


class EventQueue:
    """The simulator's loop.

    Attributes:
        now_s: virtual time.
        done: steps taken.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, when_s: float, do: Callable[..., None], *arguments: object) -> None:
        """Call ``do(*arguments)`` at ``when_s``, or now if that is over."""
        self._made += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._made, do, arguments))

    def run(self, until_s: float) -> None:
        """Do everything up to ``until_s``."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, do, arguments = pop(heap)
            self.done += 1
            do(*arguments)
        self.now_s = until_s
