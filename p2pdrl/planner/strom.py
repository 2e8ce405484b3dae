"""Threshold messages to everybody, in virtual time (Strom 2015); see `strategies.relay.strom`.

A node's message goes to all others at once, and each of these pushes counts as a round. With a thousand nodes
that is a million pushes for one update of each, so that a message's way to all is computed in one walk over
arrays, and its arrivals are counted at once. Replicas begin equal, and what one adds all add: there is no
distance to lose.

More than `strategies.relay.strom.DIRECT_MEMBERS` real nodes pass messages on along a sparse graph instead.
That isn't modelled: for so many this says what sending straight to all would cost.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import StromConfig
from p2pdrl.planner.payload import sparse_nbytes
from p2pdrl.planner.world import Model, World

__all__ = ["StromModel"]


class StromModel(Model):
    """Everybody to everybody.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    def __init__(self, config: StromConfig, world: World) -> None:
        super().__init__(world)
        self._config = config
        self._nbytes = sparse_nbytes(world.swarm.size, world.swarm.moved)
        self._updates = [0] * world.capacity
        self._ready_s = [0.0] * world.capacity
        links = [world.swarm.link(node) for node in range(world.capacity)]
        self._in_s_N = (self._nbytes + self.half_bytes) / np.array([link.in_bytes_s for link in links])
        self._delay_s_N = np.array([link.delay_s for link in links])
        self._free_s_N = np.zeros(world.capacity)
        self._heard_N = np.frombuffer(world.learners.heard, np.uint8)
        self._there_N = np.array(world.up)
        self._there_P = np.flatnonzero(self._there_N)

    def begin(self) -> None:
        """All begin with the same."""
        first = self.world.view[0]
        self.replicas.alike(self.world.view, self.replicas.x_NE[first].copy(), 0.0)

    def killed(self, node: int) -> None:
        """It gets nothing any more."""
        self._exists(node, there=False)

    def joined(self, node: int) -> None:
        """It is sent to."""
        self._exists(node, there=True)

    def _exists(self, node: int, *, there: bool) -> None:
        self._there_N[node] = there
        self._there_P = np.flatnonzero(self._there_N)

    def updated(self, node: int) -> None:
        """Tell all what has moved, if the last message is out."""
        world, config, now_s = self.world, self._config, self.world.now_s
        self._updates[node] += 1
        if self._updates[node] < config.every_updates or now_s < self._ready_s[node]:
            return
        self._updates[node] = 0
        others_P = self._there_P[self._there_P != node]
        self.statistics.lost[node] += len(world.view) - 1 - len(others_P)
        if not len(others_P):
            return
        sent_s = self._send(node, others_P, now_s)
        self._ready_s[node] = max(sent_s, now_s + config.min_interval_s)

    def _send(self, node: int, others_P: npt.NDArray[np.int64], now_s: float) -> float:
        """Send to all; return when the last has left."""
        world, statistics, costs = self.world, self.statistics, self.world.costs
        count, each = len(others_P), self._nbytes + self.half_bytes
        link = world.swarm.link(node)
        ready_s = self.cpu.work(node, now_s, calls=0.5 * count, nbytes=self._nbytes)
        left_s_P = now_s + np.maximum(
            np.linspace(0.0, ready_s - now_s, count), each / link.out_bytes_s * np.arange(1, count + 1)
        )
        work_s = costs.call_s + self._nbytes * costs.byte_s
        begin_s_P = np.maximum(left_s_P + link.delay_s + self._delay_s_N[others_P], self._free_s_N[others_P])
        done_s_P = begin_s_P + np.maximum(self._in_s_N[others_P], work_s)
        self._free_s_N[others_P] = done_s_P
        lag_s = float(np.mean(done_s_P)) - now_s
        statistics.broadcast(node, others_P, self._nbytes, each)
        self._heard_N[others_P] = True
        statistics.merged(int(lag_s / self.learners.update_s(node)), count)
        statistics.round(node, "pushed", lag_s, count)
        return float(left_s_P[-1])
