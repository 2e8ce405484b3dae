"""Parameter servers in virtual time: what the synchronous and the asynchronous ones share.

Servers are the first nodes in the rendezvous order of the ids, as in `strategies.servers.shard_plan`. A
worker sends each its slice of a gradient; a worker on the server's own node hands it over without the
network.
"""

from __future__ import annotations

from p2pdrl.config.strategy import ServerOptions
from p2pdrl.group.rendezvous import ranked
from p2pdrl.planner.payload import dense_nbytes, payload_nbytes
from p2pdrl.planner.world import DOUBT_S, Model, World

__all__ = ["ServersModel"]


class ServersModel(Model):
    """Servers, workers and slices.

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
        """Pushes follow posts."""

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
