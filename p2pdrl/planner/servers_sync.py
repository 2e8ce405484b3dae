"""Synchronous parameter servers in virtual time: rounds with a quorum and backup workers.

A round closes when all but ``backups`` gradients are there, or, past a deadline that follows what was
observed, a ``quorum`` of them. Who comes later gets the newest parameters, and its gradient is dropped. See
`strategies.servers.server_sync`.
"""

from __future__ import annotations

import math

from p2pdrl.config.strategy import ServerSyncConfig
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.planner.servers import ServersModel
from p2pdrl.planner.world import World

__all__ = ["ServersSyncModel"]


class ServersSyncModel(ServersModel):
    """Broadcast, map, reduce.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    def __init__(self, config: ServerSyncConfig, world: World) -> None:
        super().__init__(config, world, differences=True)
        self._config = config
        self._patience = AdaptiveTimeout(config.deadline_s)
        self._number = 0
        self._first_s = 0.0
        self._based = [0] * world.capacity
        self._here: dict[int, float] = {}
        """Whose gradients of this round are at the servers: when they were posted."""
        self._posted_s = [0.0] * world.capacity
        self._under_way: set[int] = set()

    def posted(self, node: int) -> None:
        """A gradient goes to the servers."""
        now_s = self.world.now_s
        self._posted_s[node] = now_s
        self._send(node)

    def _send(self, node: int) -> None:
        now_s = self.world.now_s
        if not self.world.up[node]:
            return
        if now_s < self.frozen_s:
            self.events.at(self.frozen_s, self._send, node)
            return
        if any(not self.world.up[server] for server in self.servers):
            self._under_way.add(node)  # it is sent again in the next view
            return
        there_s = max(self.up_s(node, server, now_s)[0] for server in self.servers)
        self.events.at(there_s, self._come, node)

    def _regroup(self) -> None:
        super()._regroup()
        again = [*self._here, *self._under_way]
        self._here.clear()
        self._under_way.clear()
        for node in again:
            if self.world.up[node]:
                self.statistics.loss(node, "regrouped")
                self._based[node] = self._number
                self.events.at(self.frozen_s, self._send, node)

    def _come(self, node: int) -> None:
        """A gradient is at the servers."""
        now_s = self.world.now_s
        done_s = max(self.step_s(node, server, now_s) for server in self.servers)
        self.events.at(done_s, self._taken, node)

    def _taken(self, node: int) -> None:
        now_s = self.world.now_s
        if self._based[node] < self._number:
            self._patience.observe(now_s - self._first_s)
            self.statistics.loss(node, "late")
            self._give(node, merged=False)
            return
        if not self._here:
            self._first_s = now_s
            self.events.at(now_s + self._patience.deadline_s, self._impatient, self._number)
        self._patience.observe(now_s - self._first_s)
        self._here[node] = self._posted_s[node]
        if len(self._here) >= max(1, len(self.world.view) - self._config.backups):
            self._close()

    def _impatient(self, number: int) -> None:
        least = max(1, math.ceil(self._config.quorum * len(self.world.view)))
        if number == self._number and len(self._here) >= least:
            self._close()

    def _close(self) -> None:
        """Step, and answer all who wait."""
        self._number += 1
        nodes = list(self._here)
        self._here.clear()
        for node in nodes:
            self._give(node, merged=True)

    def _give(self, node: int, *, merged: bool) -> None:
        end_s = max(self.down_s(server, node, self.world.now_s, wants=True) for server in self.servers)
        self.events.at(end_s, self._given, node, self._number, merged)

    def _given(self, node: int, number: int, merged: bool) -> None:
        if not self.world.up[node]:
            return
        self._based[node] = number
        self.learners.version[node] = number
        self.learners.heard[node] = len(self.world.view) > 1
        if merged:
            self.statistics.merged(0)
            self.statistics.round(node, "ok", self.world.now_s - self._posted_s[node])
        self.learners.answer(node, self.world.now_s)
