"""How long to sleep between two looks at shared memory, which tells nobody that it has changed."""

from __future__ import annotations

__all__ = ["PollPause"]


class PollPause:
    """Sleeps that grow with the wait: as short as what is waited for may be, and cheap when it takes long.

    Args:
        shortest_s: the first.
        longest_s: the last.
        growth: from one to the next.
    """

    def __init__(self, shortest_s: float = 1e-4, longest_s: float = 0.01, growth: float = 1.25) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._growth = growth
        self._s = shortest_s

    def next_s(self) -> float:
        """Return how long to sleep before the next look."""
        pause_s, self._s = self._s, min(self._s * self._growth, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the shortest again: what was waited for has come."""
        self._s = self._shortest_s
