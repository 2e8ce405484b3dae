"""D-PSGD in virtual time: rounds with neighbours on the real graph, with the real weights and timeouts.

A node's round begins when its learner asks; an edge counts once both ends stand in the same round, and the
lower id's call has gone and come; a node mixes when all its edges count or are known not to, or its timeout
is over. Who hears that its neighbours are further on meets them there. See
`strategies.neighbours.dsgd`. With ``exchanges = "gradients"`` parameters are mixed each
``parameters_every`` rounds, within the same call of this model.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2pdrl.config.strategy import DsgdConfig
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.group.calls import HOLD
from p2pdrl.planner.network import dense_nbytes, payload_nbytes
from p2pdrl.planner.world import DOUBT_S, Model, World
from p2pdrl.strategies.topology import metropolis

__all__ = ["NeighboursModel"]


class NeighboursModel(Model):
    """Synchronous gossip.

    Args:
        config: the strategy's options.
        world: the swarm.
    """

    doubt_s = DOUBT_S

    def __init__(self, config: DsgdConfig, world: World) -> None:
        super().__init__(world)
        self._config = config
        size = world.swarm.size
        self._parameters = dense_nbytes(size, config.compression)
        self._gradients = payload_nbytes(size, config.compression, keep=config.keep, moved=world.swarm.moved)
        self._timeouts = [AdaptiveTimeout(config.deadline_s) for _ in world.ids]
        self._number = [0] * world.capacity
        self._began_s = [-1.0] * world.capacity
        """When a round began; below zero: the learner is at work."""
        self._met: list[dict[int, tuple[float, int, npt.NDArray[np.float64]]]] = [{} for _ in world.ids]
        """The round's edges that count: when, the other's policy version, its vector."""
        self._missed: list[set[int]] = [set() for _ in world.ids]
        """The round's edges that won't count."""
        self._seen = [0] * world.capacity
        """The latest round that neighbours told of."""
        self._last = [(-1, 0.0)] * world.capacity
        """The last round, and when it began."""
        self._weights: list[dict[int, float]] = [{} for _ in world.ids]
        self._called_s: list[dict[int, float]] = [{} for _ in world.ids]
        """When the round's calls are at the neighbours with greater ids."""
        self._answering: list[set[int]] = [set() for _ in world.ids]
        """The round's edges that will count: an answer is under way."""
        self._frozen_s = 0.0

    def begin(self) -> None:
        """Lay the graph."""
        self._lay()

    def _lay(self) -> None:
        world, config = self.world, self._config
        rows = metropolis(
            config.topology,
            [world.ids[n] for n in world.view],
            degree=config.degree,
            seed=str(len(world.view)),
        )
        for me, row in rows.items():
            self._weights[int(me)] = {int(other): weight for other, weight in row.items() if other != me}

    def left(self, node: int) -> None:
        """The group forms anew, and so does the graph."""
        self._regroup()

    def joined(self, node: int) -> None:
        """Likewise; all go on from the highest number."""
        self._regroup()

    def _regroup(self) -> None:
        self._lay()
        first = max(self._number[node] for node in self.world.view)
        self._frozen_s = self.world.now_s + self.world.swarm.churn.regroup_s
        for node in self.world.view:
            self._number[node] = first
            self._met[node].clear()
            self._missed[node].clear()
            self._called_s[node].clear()
            self._answering[node].clear()
            if self._began_s[node] >= 0:
                self.statistics.outcomes["regrouped"] += 1
                self.events.at(self._frozen_s, self._begin, node)

    def updated(self, node: int) -> None:
        """Rounds follow requests."""

    def requested(self, node: int) -> None:
        """A round begins."""
        self._began_s[node] = self.world.now_s
        self.events.at(max(self._frozen_s, self.world.now_s), self._begin, node)

    def _begin(self, me: int) -> None:
        now_s, number = self.world.now_s, self._number[me]
        if self._began_s[me] < 0 or now_s < self._frozen_s or not self.world.up[me]:
            return
        self._began_s[me] = max(self._began_s[me], self._frozen_s)
        self._last[me] = (number, now_s)
        if not self._weights[me]:
            self._end(me, number)
            return
        for other in self._weights[me]:
            if other > me:
                self._called_s[me][other] = self._sent_s(me, other, number)
        for other in self._weights[me]:
            if other not in self._met[me]:
                self._look(me, other, number)
        if not self._settled(me):
            timeout_s = self._timeouts[me].deadline_s
            self.events.at(now_s + HOLD * timeout_s, self._timed_out, me, number, True)
            self.events.at(now_s + timeout_s, self._timed_out, me, number, False)

    def _look(self, me: int, other: int, number: int) -> None:
        """A round has begun at ``me``: what that means for one of its edges."""
        theirs, there = self._number[other], self._began_s[other] >= 0
        if theirs > number:  # its round is over: its answer says so, or else its next call
            if me < other:
                self._miss(me, other)
                last, began_s = self._last[other]
                if last == number:
                    self._timeouts[other].observe(self.world.now_s - began_s)
        elif there and theirs == number:
            self._edge(min(me, other), max(me, other))
        elif there:
            self._miss(other, me)
        elif me < other:  # our call tells it where we are, and waits there
            self._number[other] = number

    def _miss(self, me: int, other: int) -> None:
        """An edge of a round at ``me`` won't count."""
        if not self._known(me, other):
            self._missed[me].add(other)
            self._seen[me] = max(self._seen[me], self._number[other])
            self.statistics.outcomes["late edges"] += 1
            self._settled(me)

    def _known(self, me: int, other: int) -> bool:
        """Whether it is known of an edge what becomes of it."""
        return other in self._met[me] or other in self._missed[me] or other in self._answering[me]

    def _settled(self, me: int) -> bool:
        """Whether it is known of all edges what becomes of them; the round ends with the last one then."""
        if len(self._met[me]) + len(self._missed[me]) < len(self._weights[me]):
            return False
        last_s = max((met[0] for met in self._met[me].values()), default=0.0)
        self.events.at(last_s, self._end, me, self._number[me])
        return True

    def _nbytes(self, number: int) -> float:
        """What an edge of a round carries each way."""
        if self._config.exchanges == "parameters":
            return self._parameters
        mixes = (number + 1) % self._config.parameters_every == 0
        return self._gradients + (self._parameters if mixes else 0.0)

    def _sent_s(self, low: int, high: int, number: int) -> float:
        """The lower one calls as soon as its round begins; return when the call is there."""
        nbytes = self._nbytes(number)
        ready_s = self.cpu.work(low, self.world.now_s, calls=0.5, nbytes=nbytes)
        return self.network.send(low, high, nbytes, self.half_bytes, ready_s).arrived_s

    def _edge(self, low: int, high: int) -> None:
        """Both ends stand in the round: the call is answered as soon as it is there."""
        if self.world.up[low] and self.world.up[high] and high in self._called_s[low]:
            self._answering[low].add(high)
            self._answering[high].add(low)
            self.events.at(self._called_s[low][high], self._serve, low, high, self._number[low])

    def _serve(self, low: int, high: int, number: int) -> None:
        done_s = self.cpu.work(high, self.world.now_s, calls=1.0, nbytes=self._nbytes(number))
        self.events.at(done_s, self._answer, low, high, number)

    def _answer(self, low: int, high: int, number: int) -> None:
        if high not in self._answering[low]:
            return  # the graph is another one by now
        nbytes = self._nbytes(number)
        back = self.network.send(high, low, nbytes, self.half_bytes, self.world.now_s)
        end_s = self.cpu.work(low, back.arrived_s, calls=0.5, nbytes=nbytes)
        x_NE, version = self.replicas.x_NE, self.learners.version
        for me, other, at_s in ((low, high, end_s), (high, low, back.written_s)):
            self._answering[me].discard(other)
            self._met[me][other] = (at_s, version[other], x_NE[other].copy())
            self._timeouts[me].observe(at_s - self._began_s[me])
            self._settled(me)

    def _timed_out(self, me: int, number: int, called: bool) -> None:
        """Wait no longer for neighbours whom we ``called``, or for those that are to call us."""
        if self._number[me] != number or self._began_s[me] < 0:
            return
        took_s = self.world.now_s - self._began_s[me]
        for other in self._weights[me]:
            if (other > me) == called and not self._known(me, other):
                if called:  # it lives, and is slower than we thought
                    self._timeouts[me].observe(2.0 * took_s)
                self._miss(me, other)

    def _end(self, me: int, number: int) -> None:
        """Mix, and let the learner go on."""
        if self._number[me] != number or self._began_s[me] < 0 or not self.world.up[me]:
            return
        now_s = self.world.now_s
        met, self._met[me] = self._met[me], {}
        self._missed[me].clear()
        self._called_s[me].clear()
        took_s, self._began_s[me] = now_s - self._began_s[me], -1.0
        self._number[me] = max(number + 1, self._seen[me])
        if not met and self._number[me] > number + 1:  # the others are further on: meet them there
            self.statistics.outcomes["past"] += 1
            self.requested(me)
            return
        for _, version, _ in met.values():
            self.world.merge(me, version)
        if met:
            self.statistics.round(me, "ok", took_s)
            self._mix(me, {other: x_E for other, (_, _, x_E) in met.items()}, number)
        elif self._weights[me]:
            self.statistics.loss(me, "timeout")
        self.learners.answer(me, now_s)

    def _mix(self, me: int, others: dict[int, npt.NDArray[np.float64]], number: int) -> None:
        config = self._config
        mixes = config.exchanges == "parameters" or (number + 1) % config.parameters_every == 0
        if mixes and not self.replicas.settled:
            x_E, weights = self.replicas.x_NE[me], self._weights[me]
            self.replicas.x_NE[me] = x_E + sum(weights[o] * (z_E - x_E) for o, z_E in others.items())
            self.replicas.changed(self.world.now_s)
