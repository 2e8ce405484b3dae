"""AD-PSGD in virtual time, on its own core: who is engaged refuses others, nobody queues.

One call carries both vectors; the callee is engaged until its answer is written, the caller until it has
come. See `strategies.gossip.adpsgd`, whose steps these are. With ``exchanges = "gradients"`` learners
are taken never to wait, and vectors come together in the exchanges of parameters alone.
"""

from __future__ import annotations

from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.planner.exchange_timing import ExchangeTimingModel
from p2pdrl.planner.payload import dense_nbytes, payload_nbytes
from p2pdrl.planner.world import World
from p2pdrl.strategies.gossip.adpsgd import AdpsgdCore
from p2pdrl.strategies.topology import candidates

__all__ = ["GossipModel"]


class GossipModel(ExchangeTimingModel[AdpsgdCore]):
    """Pairwise averaging.

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
        self._engaged_s = [-1.0] * world.capacity

    def _try(self, me: int) -> None:
        now_s = self.world.now_s
        if not self.world.up[me]:
            return
        if self._engaged_s[me] > now_s:
            self._wake(me, self._engaged_s[me])
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
        self._engaged_s[me] = until_s
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
        if self._engaged_s[peer] > now_s:
            ready_s = self.cpu.work(peer, now_s, calls=0.5)
            back = self.network.send(peer, me, 0.0, self.half_bytes, ready_s)
            self.events.at(min(back.arrived_s, until_s), self._ended, me, peer, began_s, "busy")
            return
        nbytes = self._gradients if gradients else self._parameters
        ready_s = self.cpu.work(peer, now_s, calls=1.0, nbytes=2.0 * nbytes)
        back = self.network.send(peer, me, nbytes, self.half_bytes, ready_s)
        self._engaged_s[peer] = back.written_s
        if back.arrived_s >= until_s:
            self.events.at(until_s, self._ended, me, peer, began_s, "timeout")
            return
        done_s = self.cpu.work(me, back.arrived_s, calls=0.5, nbytes=nbytes)
        self._engaged_s[me] = max(self._engaged_s[me], done_s)
        self.events.at(done_s, self._met, me, peer, began_s, gradients)

    def _met(self, me: int, peer: int, began_s: float, gradients: bool) -> None:
        """Both sides have moved."""
        world, now_s = self.world, self.world.now_s
        took_s = now_s - began_s
        self._engaged_s[me] = now_s
        if not world.up[me]:
            return
        self._deadlines[me].note("ok", took_s)
        core = self._cores[me]
        core.mixed(world.ids[peer])
        core.exchanged(gradients=gradients)
        self._cores[peer].exchanged(gradients=gradients)
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
        self._engaged_s[me] = now_s
        if not self.world.up[me]:
            return
        self._deadlines[me].note(outcome, took_s)
        self.statistics.loss(me, outcome)
        if outcome == "busy":
            core.busy(now_s, took_s)
        else:
            core.failed(self.world.ids[peer], now_s)
        self._try(me)
