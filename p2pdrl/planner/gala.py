"""Gossiping actor-learners in virtual time: pushes to out-peers, averaged once after each update.

``x ← (x + Σ x_in) / (1 + n)``; see `strategies.gossip.gala`. Nobody waits. With ``exchanges = "gradients"``
learners are taken never to wait, and vectors come together in the pushes of parameters alone.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import GalaConfig
from p2pdrl.planner.exchange_timing import ExchangeTimingModel
from p2pdrl.planner.payload import dense_nbytes, payload_nbytes
from p2pdrl.planner.world import World
from p2pdrl.strategies.gossip.push import PushCore, out_peers

__all__ = ["GalaModel"]

Letter = tuple[int, npt.NDArray[np.float64]]
"""A peer's policy version and vector."""


class GalaModel(ExchangeTimingModel[PushCore]):
    """GALA.

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
        self._letters: list[dict[int, Letter]] = [{} for _ in world.ids]
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
        if not self._letters[me] or not self._unmixed[me]:
            return
        self._unmixed[me] = False
        letters, self._letters[me] = self._letters[me], {}
        version, x_NE = self.learners.version[me], self.replicas.x_NE
        good = [one for one in letters.values() if version - one[0] <= self._config.max_lag]
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
        letter = (world.learners.version[me], self.replicas.x_NE[me].copy())
        ready_s = self.cpu.work(me, now_s, nbytes=nbytes)
        for peer in peers:
            self._flights[me].add(peer)
            ready_s = self.cpu.work(me, ready_s, calls=0.5)
            there_s = self.network.send(me, peer, nbytes, self.half_bytes, ready_s).arrived_s
            self.events.at(there_s, self._arrive, me, peer, None if gradients else letter, nbytes, now_s)

    def _arrive(self, me: int, peer: int, letter: Letter | None, nbytes: float, began_s: float) -> None:
        world, now_s = self.world, self.world.now_s
        if not world.up[peer]:
            back_s = now_s + self.network.delay_s(peer, me)
            self.events.at(back_s, self._answered, me, peer, began_s, "failed")
            return
        ready_s = self.cpu.work(peer, now_s, calls=1.0, nbytes=nbytes)
        if letter is not None:
            self._letters[peer][me] = letter
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
