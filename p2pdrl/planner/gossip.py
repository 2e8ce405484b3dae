"""Asynchronous gossip in virtual time, on the real cores: AD-PSGD, SGP, GALA."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import AdpsgdConfig, GalaConfig, Partners, SgpConfig
from p2pdrl.planner.network import dense_nbytes, payload_nbytes
from p2pdrl.planner.world import Model, World
from p2pdrl.strategies.call_timeouts import CallDeadline
from p2pdrl.strategies.gossip.adpsgd import AdpsgdCore
from p2pdrl.strategies.gossip.asynchronous import ExchangeTimer
from p2pdrl.strategies.gossip.push import PushCore, out_peers
from p2pdrl.strategies.gossip.sgp import Arrival, PushInFlight, PushSum
from p2pdrl.strategies.topology import candidates

__all__ = ["AdpsgdModel", "ExchangeTimingModel", "GalaModel", "SgpModel"]

Core = TypeVar("Core", bound=ExchangeTimer)


class ExchangeTimingModel(Model, ABC, Generic[Core]):
    """Nodes that begin exchanges by themselves.

    Args:
        config: the strategy's options.
        world: the swarm.
        core: from a node's id and a source of random choices to what decides there.
        peers: whom a node may meet: from kind of partners, its id and all ids.
    """

    def __init__(
        self,
        config: AdpsgdConfig | GalaConfig | SgpConfig,
        world: World,
        core: Callable[[str, random.Random], Core],
        peers: Callable[[Partners, str, Iterable[str]], list[str]],
    ) -> None:
        super().__init__(world)
        self._timetable = config
        self._among = peers
        self._cores = [core(me, random.Random(world.rng.random())) for me in world.ids]
        self._deadlines = [CallDeadline(config.deadline_s) for _ in world.ids]
        self._wakes_s = [-1.0] * world.capacity

    def begin(self) -> None:
        """Exchanges by time begin by themselves."""
        for node in self.world.view:  # each by its own clock
            self.events.at(self.world.rng.random() * self._timetable.every_s, self.joined, node)

    def joined(self, node: int) -> None:
        """Likewise."""
        self._try(node)

    def updated(self, node: int) -> None:
        """An update may make an exchange due."""
        self._cores[node].updated(1)
        self._try(node)

    def requested(self, node: int) -> None:
        """A gradient is there."""
        super().requested(node)
        self.updated(node)

    @abstractmethod
    def _try(self, me: int) -> None:
        """Begin an exchange if one is due and we are free; else come back when that may be so."""

    def _due(self, me: int) -> bool:
        """Whether to begin one now; if not, come back when it may be time."""
        now_s, core = self.world.now_s, self._cores[me]
        if core.due(now_s):
            return True
        if now_s < core.next_s or self._timetable.every_s > 0:
            self._wake(me)
        return False

    def _peers(self, me: int) -> list[str]:
        """Whom to choose among."""
        kind = self._timetable.partners
        if kind == "random":
            return self.world.some(me)
        return self.world.known(me, lambda own, all_: self._among(kind, own, all_))

    def _wake(self, me: int, free_s: float = 0.0) -> None:
        """Come back when an exchange may begin, and not before ``free_s``."""
        now_s = self.world.now_s
        if self._wakes_s[me] <= now_s:
            self._wakes_s[me] = max(free_s, now_s + self._cores[me].rest_s(now_s))
            self.events.at(self._wakes_s[me], self._woken, me)

    def _woken(self, node: int) -> None:
        self._wakes_s[node] = -1.0
        self._try(node)


class AdpsgdModel(ExchangeTimingModel[AdpsgdCore]):
    """AD-PSGD: one call carries both vectors.

    The callee refuses others until its answer is written, the caller until it has come; nobody queues. With
    ``exchanges = "gradients"`` learners are taken never to wait, and vectors come together in the exchanges
    of parameters alone.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    def __init__(self, config: AdpsgdConfig, world: World) -> None:
        super().__init__(config, world, lambda me, rng: AdpsgdCore(config, me, rng), candidates)
        self._config = config
        size = world.swarm.size
        self._parameters = dense_nbytes(size, config.compression)
        self._gradients = payload_nbytes(size, config.compression, keep=config.keep, moved=world.swarm.moved)
        self._locked_s = [-1.0] * world.capacity

    def _try(self, me: int) -> None:
        now_s = self.world.now_s
        if not self.world.up[me]:
            return
        if self._locked_s[me] > now_s:
            self._wake(me, self._locked_s[me])
        elif self._due(me):
            peer = self._cores[me].choose_among(self._peers(me), now_s)
            if peer is None:
                self._wake(me)
            else:
                self._meet(me, int(peer))

    def _meet(self, me: int, peer: int) -> None:
        now_s, core = self.world.now_s, self._cores[me]
        core.began(now_s)
        gradients = core.gradients_next
        nbytes = self._gradients if gradients else self._parameters
        until_s = now_s + self._deadlines[me].seconds
        self._locked_s[me] = until_s
        ready_s = self.cpu.work(me, now_s, calls=0.5, nbytes=nbytes)
        passage = self.network.send(me, peer, nbytes, self.half_bytes, ready_s)
        if passage.arrived_s >= until_s:
            self.events.at(until_s, self._ended, me, peer, now_s, "timeout")
        else:
            self.events.at(passage.arrived_s, self._asked, me, peer, now_s, until_s, gradients)

    def _asked(self, me: int, peer: int, began_s: float, until_s: float, gradients: bool) -> None:
        """The call has reached the peer."""
        world, now_s = self.world, self.world.now_s
        if not world.up[peer]:
            back_s = now_s + self.network.delay_s(peer, me)
            self.events.at(back_s, self._ended, me, peer, began_s, "failed")
            return
        if self._locked_s[peer] > now_s:
            ready_s = self.cpu.work(peer, now_s, calls=0.5)
            back = self.network.send(peer, me, 0.0, self.half_bytes, ready_s)
            self.events.at(min(back.arrived_s, until_s), self._ended, me, peer, began_s, "busy")
            return
        nbytes = self._gradients if gradients else self._parameters
        ready_s = self.cpu.work(peer, now_s, calls=1.0, nbytes=2.0 * nbytes)
        back = self.network.send(peer, me, nbytes, self.half_bytes, ready_s)
        self._locked_s[peer] = back.written_s
        if back.arrived_s >= until_s:
            self.events.at(until_s, self._ended, me, peer, began_s, "timeout")
            return
        done_s = self.cpu.work(me, back.arrived_s, calls=0.5, nbytes=nbytes)
        self._locked_s[me] = max(self._locked_s[me], done_s)
        self.events.at(done_s, self._met, me, peer, began_s, gradients)

    def _met(self, me: int, peer: int, began_s: float, gradients: bool) -> None:
        """Both sides have moved."""
        world, now_s = self.world, self.world.now_s
        took_s = now_s - began_s
        self._locked_s[me] = now_s
        if not world.up[me]:
            return
        self._deadlines[me].note("ok", took_s)
        core = self._cores[me]
        core.mixed(world.ids[peer])
        core.exchanged(world.ids[peer], gradients=gradients)
        self._cores[peer].exchanged(world.ids[me], gradients=gradients)
        self.statistics.round(me, "ok", took_s)
        mine, theirs = self.learners.version[me], self.learners.version[peer]
        world.merge(me, theirs)
        world.merge(peer, mine)
        if not gradients and not self.replicas.settled:
            x_NE = self.replicas.x_NE
            step_E = self._config.weight * (x_NE[peer] - x_NE[me])
            x_NE[me] += step_E
            x_NE[peer] -= step_E
            self.replicas.changed(now_s)
        self._try(me)

    def _ended(self, me: int, peer: int, began_s: float, outcome: str) -> None:
        """It came to nothing."""
        now_s, core = self.world.now_s, self._cores[me]
        took_s = now_s - began_s
        self._locked_s[me] = now_s
        if not self.world.up[me]:
            return
        self._deadlines[me].note(outcome, took_s)
        self.statistics.loss(me, outcome)
        if outcome == "busy":
            core.busy(now_s, took_s)
        else:
            core.failed(self.world.ids[peer], now_s)
        self._try(me)


ARRIVING = 2
"""Pushes that a node reads at once, as in `strategies.gossip.sgp`."""


class SgpModel(ExchangeTimingModel[PushCore]):
    """SGP: one push after the other, each acknowledged.

    A push whose answer is late counts as lost, though TCP delivers it in the end and its mass is kept. Nodes
    begin one after the other, as the mode's record reaches them, and who hasn't begun refuses: the early ones
    are a turn ahead in their list of out-peers for good, which matters, for nodes that take the same turn at
    the same time mix faster than others.

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
        flight = None if peer is None else self._sums[me].send(peer, self._config.share)
        if flight is None:
            self._wake(me)
            return
        core.began(now_s)
        self._send(me, flight)

    def _send(self, me: int, flight: PushInFlight) -> None:
        world, now_s, peer = self.world, self.world.now_s, int(flight.peer)
        self._sending[me] = True
        z_E = None if self.replicas.settled else self.replicas.x_NE[me].copy()
        ready_s = self.cpu.work(me, now_s, calls=0.5, nbytes=self._nbytes)
        there_s = self.network.send(me, peer, self._nbytes, self.half_bytes, ready_s).arrived_s
        until_s = now_s + self._deadlines[me].seconds
        version = world.learners.version[me]
        self.events.at(there_s, self._arrive, me, flight, z_E, version, (now_s, until_s))

    def _arrive(
        self,
        me: int,
        flight: PushInFlight,
        z_E: npt.NDArray[np.float64] | None,
        version: int,
        times_s: tuple[float, float],
    ) -> None:
        world, now_s, peer = self.world, self.world.now_s, int(flight.peer)
        began_s, until_s = times_s
        if not world.up[peer]:
            self.events.at(
                now_s + self.network.delay_s(peer, me), self._answered, me, flight, z_E, began_s, "failed"
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
            factor = self._sums[peer].take(Arrival(world.ids[me], "", flight.number), flight.mass)
            world.merge(peer, version)
            if z_E is not None and not self.replicas.settled:
                row_E = self.replicas.x_NE[peer]
                row_E += factor * (z_E - row_E)
                self.replicas.changed(now_s)
        back_s = self.network.send(peer, me, 0.0, self.half_bytes, ready_s).arrived_s
        if back_s > until_s and outcome == "pushed":
            outcome = "timeout"
        self.events.at(max(now_s, back_s), self._answered, me, flight, z_E, began_s, outcome)

    def _answered(
        self, me: int, flight: PushInFlight, z_E: npt.NDArray[np.float64] | None, began_s: float, outcome: str
    ) -> None:
        world, core, now_s = self.world, self._cores[me], self.world.now_s
        self._sending[me] = False
        if not world.up[me]:
            return
        took_s, sums = now_s - began_s, self._sums[me]
        self._deadlines[me].note("ok" if outcome == "pushed" else outcome, took_s)
        if outcome in ("pushed", "timeout"):
            sums.gone(flight.number)
        else:
            factor = sums.returned(flight.number)
            if z_E is not None and not self.replicas.settled:
                row_E = self.replicas.x_NE[me]
                row_E += factor * (z_E - row_E)
        if outcome == "pushed":
            core.mixed(flight.peer)
            self.statistics.round(me, "pushed", took_s)
        else:
            self.statistics.loss(me, outcome)
            if outcome == "busy":
                core.busy(now_s, took_s)
            else:
                core.failed(flight.peer, now_s)
        self._try(me)


Received = tuple[int, npt.NDArray[np.float64]]
"""A peer's policy version and vector."""


class GalaModel(ExchangeTimingModel[PushCore]):
    """GALA: pushes to out-peers that nobody waits for, averaged once after each update.

    With ``exchanges = "gradients"`` learners are taken never to wait, and vectors come together in the pushes
    of parameters alone.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    def __init__(self, config: GalaConfig, world: World) -> None:
        super().__init__(config, world, lambda me, rng: PushCore(config, me, rng), out_peers)
        self._config = config
        size = world.swarm.size
        self._parameters = dense_nbytes(size, config.compression)
        self._gradients = payload_nbytes(size, config.compression, keep=config.keep, moved=world.swarm.moved)
        self._received: list[dict[int, Received]] = [{} for _ in world.ids]
        self._flights: list[set[int]] = [set() for _ in world.ids]
        self._in_a_row = [0] * world.capacity
        self._unmixed = [False] * world.capacity
        """Whether a learner made an update since its node last averaged."""

    def updated(self, node: int) -> None:
        """Average what has come, and push if it is time to: two tasks, of which either may be first."""
        self._unmixed[node] = True
        if self.world.rng.random() < 0.5:
            self._average(node)
        super().updated(node)
        self._average(node)

    def _average(self, me: int) -> None:
        """Once after each update, with what is there by then or comes first."""
        if not self._received[me] or not self._unmixed[me]:
            return
        self._unmixed[me] = False
        others, self._received[me] = self._received[me], {}
        version, x_NE = self.learners.version[me], self.replicas.x_NE
        good = [one for one in others.values() if version - one[0] <= self._config.max_lag]
        for theirs, _ in good:
            self.world.merge(me, theirs)
        if good and not self.replicas.settled:
            x_NE[me] = (x_NE[me] + np.sum([z_E for _, z_E in good], axis=0)) / (1 + len(good))
            self.replicas.changed(self.world.now_s)

    def _try(self, me: int) -> None:
        now_s = self.world.now_s
        if not self.world.up[me] or not self._due(me):
            return
        peers = [peer for peer in map(int, self._all_peers(me, now_s)) if peer not in self._flights[me]]
        if peers:
            self._cores[me].began(now_s)
            self._push(me, peers)
        else:
            self._wake(me)

    def _all_peers(self, me: int, now_s: float) -> list[str]:
        """Whom to push to at once."""
        core, peers = self._cores[me], self._peers(me)
        if self._config.partners == "random":
            one = core.choose_among(peers, now_s)
            return [] if one is None else [one]
        return core.fit(peers, now_s)

    def _push(self, me: int, peers: list[int]) -> None:
        now_s, world = self.world.now_s, self.world
        gradients = (
            self._config.exchanges == "gradients" and self._in_a_row[me] < self._config.parameters_every
        )
        self._in_a_row[me] = self._in_a_row[me] + 1 if gradients else 0
        nbytes = self._gradients if gradients else self._parameters
        sent = (world.learners.version[me], self.replicas.x_NE[me].copy())
        ready_s = self.cpu.work(me, now_s, nbytes=nbytes)
        for peer in peers:
            self._flights[me].add(peer)
            ready_s = self.cpu.work(me, ready_s, calls=0.5)
            there_s = self.network.send(me, peer, nbytes, self.half_bytes, ready_s).arrived_s
            self.events.at(there_s, self._arrive, me, peer, None if gradients else sent, nbytes, now_s)

    def _arrive(self, me: int, peer: int, sent: Received | None, nbytes: float, began_s: float) -> None:
        world, now_s = self.world, self.world.now_s
        if not world.up[peer]:
            back_s = now_s + self.network.delay_s(peer, me)
            self.events.at(back_s, self._answered, me, peer, began_s, "failed")
            return
        ready_s = self.cpu.work(peer, now_s, calls=1.0, nbytes=nbytes)
        if sent is not None:
            self._received[peer][me] = sent
            self._average(peer)
        else:
            world.merge(peer, world.learners.version[me])
        back_s = self.network.send(peer, me, 0.0, self.half_bytes, ready_s).arrived_s
        self.events.at(back_s, self._answered, me, peer, began_s, "pushed")

    def _answered(self, me: int, peer: int, began_s: float, outcome: str) -> None:
        now_s, core = self.world.now_s, self._cores[me]
        self._flights[me].discard(peer)
        if not self.world.up[me]:
            return
        took_s = now_s - began_s
        if outcome == "pushed" and took_s > self._deadlines[me].seconds:
            outcome = "timeout"
        self._deadlines[me].note("ok" if outcome == "pushed" else outcome, took_s)
        if outcome == "pushed":
            core.mixed(self.world.ids[peer])
            self.statistics.round(me, outcome, took_s)
        else:
            core.failed(self.world.ids[peer], now_s)
            self.statistics.loss(me, outcome)
        self._try(me)
