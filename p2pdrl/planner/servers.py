"""Parameter servers in virtual time, synchronous and asynchronous."""

from __future__ import annotations

import math

from p2pdrl.config.strategy import ServerAsyncConfig, ServerOptions, ServerSyncConfig
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.rendezvous import ranked
from p2pdrl.planner.network import dense_nbytes, payload_nbytes
from p2pdrl.planner.world import DOUBT_S, Model, World

__all__ = ["ServersAsyncModel", "ServersModel", "ServersSyncModel"]


class ServersModel(Model):
    """What synchronous and asynchronous servers share: servers, workers and slices.

    Servers are the first nodes in the rendezvous order of the ids, as in `strategies.servers.shard_plan`. A
    worker sends each its slice of a gradient; one on the server's own node hands it over without the network.

    Args:
        config: the strategy's options.
        world: the swarm.
        differences: whether parameters come compressed, as differences; else as float32.
    """

    doubt_s = DOUBT_S

    def __init__(self, config: ServerOptions, world: World, *, differences: bool) -> None:
        super().__init__(world)
        self.served = config
        size, kind = world.swarm.size, config.compression
        self._gradient = payload_nbytes(size, kind, keep=config.keep, moved=world.swarm.moved)
        self._parameters = dense_nbytes(size, kind if differences else "none")
        self.frozen_s = 0.0
        self.servers: list[int] = []

    def begin(self) -> None:
        """The servers take the mean of all, and all workers take it from them."""
        self._elect()
        view = self.world.view
        self.events.at(self._seeded_s(), self._seed, view)

    def _seeded_s(self) -> float:
        """When all vectors have gone to the servers and back, one after the other."""
        now_s, done_s = self.world.now_s, self.world.now_s
        for server in self.servers:
            for node in self.world.view:
                done_s = max(done_s, self.up_s(node, server, now_s, gradient=False)[0])
        end_s = done_s
        for server in self.servers:
            for node in self.world.view:
                end_s = max(end_s, self.down_s(server, node, done_s, wants=True))
        return end_s

    def _seed(self, members: list[int]) -> None:
        self.replicas.alike(members, self.replicas.x_NE[members].mean(0), self.world.now_s)

    def _elect(self) -> None:
        order = ranked("servers 0", [self.world.ids[node] for node in self.world.view])
        self.servers = [int(one) for one in order[: self.served.servers]]

    def left(self, node: int) -> None:
        """The group forms anew; another node serves the shard."""
        self._regroup()

    def joined(self, node: int) -> None:
        """Likewise."""
        self._regroup()

    def _regroup(self) -> None:
        self._elect()
        self.frozen_s = self.world.now_s + self.world.swarm.churn.regroup_s

    def updated(self, node: int) -> None:
        """Pushes follow requests."""

    def up_s(self, node: int, server: int, begin_s: float, *, gradient: bool = True) -> tuple[float, float]:
        """A worker's slice goes to a server; return when it is there, and when it has left."""
        whole = self._gradient if gradient else self._parameters
        nbytes = whole / max(1, len(self.servers))
        if node == server:
            return begin_s, begin_s
        ready_s = self.cpu.work(node, begin_s, calls=0.5, nbytes=nbytes)
        passage = self.network.send(node, server, nbytes, self.half_bytes, ready_s)
        return passage.arrived_s, passage.written_s

    def step_s(self, node: int, server: int, begin_s: float) -> float:
        """The server takes one slice in; return when that is done."""
        nbytes = self._gradient / max(1, len(self.servers))
        return self.cpu.work(server, begin_s, calls=0.0 if node == server else 1.0, nbytes=2.0 * nbytes)

    def down_s(self, server: int, node: int, begin_s: float, *, wants: bool) -> float:
        """The answer goes to a worker; return when the worker has used it."""
        nbytes = self._parameters / max(1, len(self.servers)) if wants else 0.0
        if node == server:
            return self.cpu.work(node, begin_s, nbytes=nbytes)
        ready_s = self.cpu.work(server, begin_s, nbytes=nbytes)
        back_s = self.network.send(server, node, nbytes, self.half_bytes, ready_s).arrived_s
        return self.cpu.work(node, back_s, calls=0.5, nbytes=nbytes)


class ServersSyncModel(ServersModel):
    """Rounds with a quorum and backup workers (`strategies.servers.server_sync`).

    A round closes when all but ``backups`` gradients are there, or, past a deadline that follows what was
    observed, a ``quorum`` of them. Who comes later gets the newest parameters, and its gradient is dropped.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    def __init__(self, config: ServerSyncConfig, world: World) -> None:
        super().__init__(config, world, differences=True)
        self._config = config
        self._timeout = AdaptiveTimeout(config.deadline_s)
        self._number = 0
        self._first_s = 0.0
        self._based = [0] * world.capacity
        self._here: dict[int, float] = {}
        """Whose gradients of this round are at the servers: when they were sent."""
        self._posted_s = [0.0] * world.capacity
        self._under_way: set[int] = set()

    def requested(self, node: int) -> None:
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
            self._timeout.observe(now_s - self._first_s)
            self.statistics.loss(node, "late")
            self._give(node, merged=False)
            return
        if not self._here:
            self._first_s = now_s
            self.events.at(now_s + self._timeout.deadline_s, self._timed_out, self._number)
        self._timeout.observe(now_s - self._first_s)
        self._here[node] = self._posted_s[node]
        if len(self._here) >= max(1, len(self.world.view) - self._config.backups):
            self._close()

    def _timed_out(self, number: int) -> None:
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

    def requested(self, node: int) -> None:
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
