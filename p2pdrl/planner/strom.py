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
from p2pdrl.planner.network import on_wire_bytes, sparse_nbytes
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
        self._next_s = [0.0] * world.capacity
        """When a node may make another message."""
        self._waiting = [0] * world.capacity
        """Messages of each node that wait for an update after the last push was answered."""
        self._ready_s = [0.0] * world.capacity
        """When that is."""
        links = [world.swarm.link(node) for node in range(world.capacity)]
        self._in_s_N = 1.0 / np.array([link.in_bytes_s for link in links])
        self._delay_s_N = np.array([link.delay_s + link.jitter_s / 2 for link in links])
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
        """Make a message of what has moved, and push it once the last push is answered."""
        now_s = self.world.now_s
        self._updates[node] += 1
        if self._updates[node] < self._config.every_updates or now_s < self._next_s[node]:
            return
        self._updates[node], self._next_s[node] = 0, now_s + self._config.min_interval_s
        self._waiting[node] += 1
        if now_s < self._ready_s[node]:
            return
        messages, self._waiting[node] = self._waiting[node], 0
        others_P = self._there_P[self._there_P != node]
        self.statistics.lost[node] += len(self.world.view) - 1 - len(others_P)
        if len(others_P):
            back_s = self._send(node, others_P, messages * self._nbytes)
            self._ready_s[node] = back_s + self._config.min_interval_s

    def _send(self, node: int, others_P: npt.NDArray[np.int64], nbytes: float) -> float:
        """Send to all; return when they have answered."""
        world, statistics, costs, now_s = self.world, self.statistics, self.world.costs, self.world.now_s
        count, each = len(others_P), on_wire_bytes(nbytes + self.half_bytes)
        link = world.swarm.link(node)
        ready_s = self.cpu.work(node, now_s, calls=0.5 * count, nbytes=nbytes)
        left_s_P = now_s + np.maximum(
            np.linspace(0.0, ready_s - now_s, count), each / link.out_bytes_s * np.arange(1, count + 1)
        )
        work_s = costs.call_s + nbytes * costs.byte_s
        begin_s_P = np.maximum(
            left_s_P + self._delay_s_N[node] + self._delay_s_N[others_P], self._free_s_N[others_P]
        )
        done_s_P = begin_s_P + np.maximum(each * self._in_s_N[others_P], work_s)
        self._free_s_N[others_P] = done_s_P
        lag_s = float(np.mean(done_s_P)) - now_s
        statistics.broadcast(node, others_P, nbytes, each, on_wire_bytes(self.half_bytes))
        self._heard_N[others_P] = True
        statistics.merged(int(lag_s / self.learners.update_s(node)), count)
        back_s = float(np.mean(self._delay_s_N[others_P]) + self._delay_s_N[node])
        statistics.round(node, "pushed", lag_s + back_s, count)
        return now_s + lag_s + back_s
