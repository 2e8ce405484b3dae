"""When a daemon's work is done: one thing at a time, on its own core or on cores that all share."""

from __future__ import annotations

import heapq

from p2pdrl.planner.description import CallCosts

__all__ = ["Processors"]


class Processors:
    """The daemons' cores.

    Args:
        costs: of calls and bytes.
        capacity: nodes at most.
    """

    def __init__(self, costs: CallCosts, capacity: int) -> None:
        self._call_s, self._byte_s = costs.call_s, costs.byte_s
        self._free_s = [0.0] * capacity
        self._cores = [0.0] * costs.cores

    def work(self, node: int, begin_s: float, *, calls: float = 0.0, nbytes: float = 0.0) -> float:
        """Do the work of ``calls`` and ``nbytes`` on a node, from ``begin_s`` on; return when it is done."""
        seconds = calls * self._call_s + nbytes * self._byte_s
        start_s = max(begin_s, self._free_s[node])
        if self._cores:
            start_s = max(start_s, self._cores[0])
            heapq.heapreplace(self._cores, start_s + seconds)
        self._free_s[node] = start_s + seconds
        return start_s + seconds
