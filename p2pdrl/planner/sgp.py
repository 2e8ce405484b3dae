"""Stochastic gradient push in virtual time, on its own cores (`strategies.gossip`: `core`, `push_sum`).

One push after the other; each is acknowledged. See `strategies.gossip.sgp`. A push whose answer is late is
counted as lost, though TCP delivers it in the end and its mass is kept.

Nodes begin one after the other, as the mode's record reaches them, and who hasn't begun refuses. That costs a
push, and the early ones are a turn ahead in their list of out-peers for good: which matters, for nodes that
take the same turn at the same time mix faster than others.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import SgpConfig
from p2pdrl.planner.exchange_timing import ExchangeTimingModel
from p2pdrl.planner.payload import dense_nbytes
from p2pdrl.planner.world import World
from p2pdrl.strategies.gossip.push import PushCore, out_peers
from p2pdrl.strategies.gossip.sgp import Arrival, PushInFlight, PushSum

__all__ = ["SgpModel"]

ARRIVING = 2
"""Pushes that a node reads at once, as in `strategies.gossip.sgp`."""


class SgpModel(ExchangeTimingModel[PushCore]):
    """Push-sum.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    def __init__(self, config: SgpConfig, world: World) -> None:
        super().__init__(config, world, lambda me, rng: PushCore(config, me, rng), out_peers)
        self._config = config
        self._nbytes = dense_nbytes(world.swarm.size, config.compression)
        self._sums = [PushSum() for _ in world.ids]
        self._sending = [False] * world.capacity
        self._begun = [False] * world.capacity
        self._reading_s: list[list[float]] = [[] for _ in world.ids]

    def weight(self, node: int) -> float:
        """Push-sum weight of a node, with what it has under way."""
        return self._sums[node].weight + self._sums[node].under_way

    def joined(self, node: int) -> None:
        """It begins."""
        self._begun[node] = True
        super().joined(node)

    def _try(self, me: int) -> None:
        world, core, now_s = self.world, self._cores[me], self.world.now_s
        if self._sending[me] or not (world.up[me] and self._begun[me]):
            return
        if not self._due(me):
            return
        peer = core.choose_among(self._peers(me), now_s)
        parcel = None if peer is None else self._sums[me].send(peer, self._config.share)
        if parcel is None:
            self._wake(me)
            return
        core.began(now_s)
        self._send(me, parcel)

    def _send(self, me: int, parcel: PushInFlight) -> None:
        world, now_s, peer = self.world, self.world.now_s, int(parcel.peer)
        self._sending[me] = True
        z_E = None if self.replicas.settled else self.replicas.x_NE[me].copy()
        ready_s = self.cpu.work(me, now_s, calls=0.5, nbytes=self._nbytes)
        there_s = self.network.send(me, peer, self._nbytes, self.half_bytes, ready_s).arrived_s
        until_s = now_s + self._deadlines[me].seconds
        version = world.learners.version[me]
        self.events.at(there_s, self._arrive, me, parcel, z_E, version, (now_s, until_s))

    def _arrive(
        self,
        me: int,
        parcel: PushInFlight,
        z_E: npt.NDArray[np.float64] | None,
        version: int,
        times_s: tuple[float, float],
    ) -> None:
        world, now_s, peer = self.world, self.world.now_s, int(parcel.peer)
        began_s, until_s = times_s
        if not world.up[peer]:
            self.events.at(
                now_s + self.network.delay_s(peer, me), self._answered, me, parcel, z_E, began_s, "failed"
            )
            return
        reading = self._reading_s[peer] = [one_s for one_s in self._reading_s[peer] if one_s > now_s]
        if len(reading) >= ARRIVING or not self._begun[peer]:
            outcome = "busy" if self._begun[peer] else "refused"
            ready_s = self.cpu.work(peer, now_s, calls=0.5)
        else:
            ready_s = self.cpu.work(peer, now_s, calls=1.0, nbytes=self._nbytes)
            reading.append(ready_s)
            outcome = "pushed"
            factor = self._sums[peer].take(Arrival(world.ids[me], "", parcel.number), parcel.mass)
            world.merge(peer, version)
            if z_E is not None and not self.replicas.settled:
                row_E = self.replicas.x_NE[peer]
                row_E += factor * (z_E - row_E)
                self.replicas.changed(now_s)
        back_s = self.network.send(peer, me, 0.0, self.half_bytes, ready_s).arrived_s
        if back_s > until_s and outcome == "pushed":
            outcome = "timeout"
        self.events.at(max(now_s, back_s), self._answered, me, parcel, z_E, began_s, outcome)

    def _answered(
        self, me: int, parcel: PushInFlight, z_E: npt.NDArray[np.float64] | None, began_s: float, outcome: str
    ) -> None:
        world, core, now_s = self.world, self._cores[me], self.world.now_s
        self._sending[me] = False
        if not world.up[me]:
            return
        took_s, sums = now_s - began_s, self._sums[me]
        self._deadlines[me].note("ok" if outcome == "pushed" else outcome, took_s)
        if outcome in ("pushed", "timeout"):
            sums.gone(parcel.number)
        else:
            factor = sums.returned(parcel.number)
            if z_E is not None and not self.replicas.settled:
                row_E = self.replicas.x_NE[me]
                row_E += factor * (z_E - row_E)
        if outcome == "pushed":
            core.mixed(parcel.peer)
            self.statistics.round(me, "pushed", took_s)
        else:
            self.statistics.loss(me, outcome)
            if outcome == "busy":
                core.busy(now_s, took_s)
            else:
                core.failed(parcel.peer, now_s)
        self._try(me)
