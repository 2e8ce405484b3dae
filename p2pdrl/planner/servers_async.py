"""Asynchronous parameter servers in virtual time: each push is applied as it comes."""

from __future__ import annotations

from p2pdrl.config.strategy import ServerAsyncConfig
from p2pdrl.planner.servers import ServersModel
from p2pdrl.planner.world import World

__all__ = ["ServersAsyncModel"]


class ServersAsyncModel(ServersModel):
    """Downpour: each push is applied as it comes (`strategies.servers.server_async`).

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    def __init__(self, config: ServerAsyncConfig, world: World) -> None:
        super().__init__(config, world, differences=False)
        self._config = config
        self._steps = 0
        self._held = [0] * world.capacity
        """Version of what a worker has."""
        self._pushes = [0] * world.capacity
        self._lanes = [0] * world.capacity
        self._queue: list[list[int]] = [[] for _ in world.ids]
        """Posts that wait for a lane: the versions that they were computed on."""

    def posted(self, node: int) -> None:
        """A gradient is there; it goes out when a lane is free."""
        self._queue[node].append(self.learners.sent[node])
        self._next(node)

    def _next(self, node: int) -> None:
        now_s = self.world.now_s
        if not self._queue[node] or self._lanes[node] >= max(1, self._config.ahead):
            return
        if now_s < self.frozen_s:
            self.events.at(self.frozen_s, self._next, node)
            return
        base = self._queue[node].pop(0)
        self._lanes[node] += 1
        self._pushes[node] += 1
        wants = self._pushes[node] % self._config.fetch_every == 0
        if any(not self.world.up[server] for server in self.servers):
            self.events.at(now_s + self.network.delay_s(node, self.servers[0]), self._lost, node)
            return
        there_s = max(self.up_s(node, server, now_s)[0] for server in self.servers)
        self.events.at(there_s, self._step, node, base, wants, now_s)

    def _lost(self, node: int) -> None:
        self.statistics.loss(node, "lost")
        self._lanes[node] -= 1
        if self.world.up[node]:
            self.learners.answer(node, self.world.now_s)
            self._next(node)

    def _step(self, node: int, base: int, wants: bool, began_s: float) -> None:
        """All servers have their slices."""
        staleness = max(0, self._steps - base)
        stale = self._config.stale == "drop" and staleness > self._config.max_staleness
        if not stale:
            self.statistics.merged(staleness)
        self._steps += not stale
        now_s = self.world.now_s
        done_s = max(self.step_s(node, server, now_s) for server in self.servers)
        version = self._steps
        self.events.at(done_s, self._give, node, version, wants, began_s, stale)

    def _give(self, node: int, version: int, wants: bool, began_s: float, stale: bool) -> None:
        now_s = self.world.now_s
        end_s = max(self.down_s(server, node, now_s, wants=wants) for server in self.servers)
        self.events.at(end_s, self._given, node, version if wants else -1, began_s, stale)

    def _given(self, node: int, version: int, began_s: float, stale: bool) -> None:
        self._lanes[node] -= 1
        if not self.world.up[node]:
            return
        now_s = self.world.now_s
        if version >= 0:
            if version > self._held[node] + 1:
                self.learners.heard[node] = True
            self._held[node] = self.learners.version[node] = max(self._held[node], version)
        if stale:
            self.statistics.loss(node, "stale")
        else:
            self.statistics.round(node, "ok", now_s - began_s)
        self.learners.answer(node, now_s)
        self._next(node)
