"""One simulated swarm: virtual time, learners, nodes that come and go; what a strategy's model is."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from typing import Any

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.planner.description import Churn, SwarmDescription
from p2pdrl.planner.forecast import Replicas, Statistics
from p2pdrl.planner.network import Network, Processors

__all__ = ["DOUBT_S", "ChurnEvents", "EventQueue", "Learners", "Model", "World", "moments"]


class EventQueue:
    """Virtual time: what is to be done, by moments; of one moment, in the order in which it was asked for.

    Attributes:
        now_s: virtual time.
        done: steps taken.
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self.done = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._made = 0

    def at(self, when_s: float, do: Callable[..., None], *arguments: object) -> None:
        """Call ``do(*arguments)`` at ``when_s``, or now if that is over."""
        self._made += 1
        heapq.heappush(self._heap, (max(when_s, self.now_s), self._made, do, arguments))

    def run(self, until_s: float) -> None:
        """Do everything up to ``until_s``."""
        heap, pop = self._heap, heapq.heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, do, arguments = pop(heap)
            self.done += 1
            do(*arguments)
        self.now_s = until_s


class Learners:
    """Learners that compute, ask and wait as their `LearnerMode` says; an update counts with its gradient.

    Args:
        swarm: whose machines they run on.
        learner_mode: how they work.
        events: time.
        statistics: where updates are counted.
        rng: of jitter.
        capacity: nodes at most.

    Attributes:
        version: policy version of each.
        based: the version that the gradient under way is computed on.
        sent: the version that its last finished gradient was computed on.
        heard: whether others' work reached its parameters since its last update began; a byte each.
        updated: told of each update (free learners).
        requested: called at each request.
    """

    def __init__(
        self,
        swarm: SwarmDescription,
        learner_mode: LearnerMode,
        events: EventQueue,
        statistics: Statistics,
        rng: random.Random,
        *,
        capacity: int,
    ) -> None:
        self._learner_mode, self._events, self._statistics, self._rng = learner_mode, events, statistics, rng
        self._free = learner_mode.sends == "nothing"
        self._request_s = swarm.costs.post_s
        machines = [swarm.machine(node) for node in range(capacity)]
        self._update_s = [one.update_s * one.factor / max(1, learner_mode.learners) for one in machines]
        self._jitter = [one.jitter for one in machines]
        self.version = [0] * capacity
        self.based = [0] * capacity
        self.sent = [0] * capacity
        self.heard = bytearray(capacity)
        self._up = [False] * capacity
        self._since = [0] * capacity
        self._open = [0] * capacity
        self._waits_s: list[float | None] = [None] * capacity
        self._fresh = [False] * capacity
        self.updated: Callable[[int], None] = lambda _: None
        self.requested: Callable[[int], None] = lambda _: None

    def start(self, node: int) -> None:
        """A node begins to learn, somewhere within its first update."""
        self._up[node] = True
        self._begin(node, self._rng.random())

    def stop(self, node: int) -> None:
        """A node is gone."""
        self._up[node] = False

    def waiting(self, node: int) -> bool:
        """Whether a learner stands still."""
        return self._waits_s[node] is not None

    def update_s(self, node: int) -> float:
        """What one update takes, without jitter."""
        return self._update_s[node]

    def answer(self, node: int, when_s: float) -> None:
        """The oldest request is answered at ``when_s``; the learner hears of it a moment later."""
        self._events.at(when_s + self._request_s, self._answered, node)

    def _begin(self, node: int, part: float = 1.0) -> None:
        self.based[node] = self.version[node]
        self._fresh[node] = bool(self.heard[node])
        self.heard[node] = False
        seconds = self._update_s[node] * (1.0 + self._jitter[node] * (2.0 * self._rng.random() - 1.0))
        self._events.at(self._events.now_s + part * seconds, self._done, node)

    def _done(self, node: int) -> None:
        if not self._up[node]:
            return
        self._statistics.updates[node] += 1
        self._statistics.fresh[node] += self._fresh[node]
        self.sent[node] = self.based[node]
        if self._free:
            self.version[node] += 1
            self.updated(node)
            self._begin(node)
            return
        if self._learner_mode.steps:
            self.version[node] += 1
        self._since[node] += 1
        if self._since[node] < self._learner_mode.every:
            self._begin(node)
            return
        self._since[node] = 0
        self._open[node] += 1
        waits = self._learner_mode.sends == "parameters" or self._open[node] > self._learner_mode.ahead
        if waits:
            self._waits_s[node] = self._events.now_s
        self._events.at(self._events.now_s + self._request_s, self._request, node)
        if not waits:
            self._begin(node)

    def _request(self, node: int) -> None:
        if self._up[node]:
            self.requested(node)

    def _answered(self, node: int) -> None:
        if not self._up[node]:
            return
        self._open[node] -= 1
        since_s = self._waits_s[node]
        if since_s is not None:
            self._statistics.waited_s[node] += self._events.now_s - since_s
            self._waits_s[node] = None
            self._begin(node)

    def settle(self, now_s: float) -> None:
        """The end: those who stand still have waited until now."""
        for node, since_s in enumerate(self._waits_s):
            if since_s is not None and self._up[node]:
                self._statistics.waited_s[node] += now_s - since_s
                self._waits_s[node] = now_s


DOUBT_S = 0.5
"""Until a group doubts a member whose connections are refused, or that doesn't say that it is alive."""
SAMPLE = 8
"""Peers drawn for a core to choose among, where it may meet anybody: a choice among many is the same."""


class World:
    """The swarm.

    Args:
        swarm: what it is made of.
        strategy: what it runs.
        capacity: nodes at most, those that will join included.
        seed: of everything random.

    Attributes:
        ids: node ids; their order is that of the numbers.
        up: who is there.
        view: whom all believe to be there, sorted; another list after each change.
    """

    def __init__(self, swarm: SwarmDescription, strategy: StrategyConfig, capacity: int, seed: int) -> None:
        self.swarm, self.costs, self.capacity, self.seed = swarm, swarm.costs, capacity, seed
        self.rng = random.Random(seed)
        self.events, self.statistics = EventQueue(), Statistics(capacity)
        self.network = Network(swarm, capacity, self.statistics, self.rng)
        self.cpu = Processors(swarm.costs, capacity)
        self.replicas = Replicas(capacity, swarm.nodes, seed)
        learner_mode = strategy.learner_mode
        self.learners = Learners(
            swarm, learner_mode, self.events, self.statistics, self.rng, capacity=capacity
        )
        self.ids = [f"{node:05d}" for node in range(capacity)]
        self.up = [node < swarm.nodes for node in range(capacity)]
        self.view = list(range(swarm.nodes))
        self._known: dict[int, list[str]] = {}

    @property
    def now_s(self) -> float:
        """Virtual time."""
        return self.events.now_s

    def some(self, me: int) -> list[str]:
        """A few members at random, or all when they are few."""
        view, random01 = self.view, self.rng.random
        if len(view) <= SAMPLE + 1:
            return [self.ids[node] for node in view if node != me]
        drawn = [view[int(random01() * len(view))] for _ in range(SAMPLE)]
        return [self.ids[node] for node in drawn if node != me]

    def known(self, me: int, of: Callable[[str, list[str]], list[str]]) -> list[str]:
        """What ``of(me, members)`` gives; remembered until the members change."""
        found = self._known.get(me)
        if found is None:
            found = self._known[me] = of(self.ids[me], [self.ids[node] for node in self.view])
        return found

    def merge(self, me: int, version: int) -> None:
        """``me`` has merged another's work of policy version ``version``."""
        learners = self.learners
        self.statistics.merged(max(0, learners.version[me] - version))
        learners.heard[me] = True
        learners.version[me] = max(learners.version[me], version)

    def set_view(self, view: list[int]) -> None:
        """All believe in other members from now on."""
        self.view = view
        self._known.clear()


class Model:
    """One strategy on a world.

    Args:
        world: the swarm.

    Attributes:
        doubt_s: until it finds out by itself that a node is dead, if that is before membership does.
    """

    doubt_s = math.inf

    def __init__(self, world: World) -> None:
        self.world = world
        self.events, self.statistics, self.cpu = world.events, world.statistics, world.cpu
        self.network, self.learners, self.replicas = world.network, world.learners, world.replicas
        self.half_bytes = world.costs.call_bytes / 2.0

    def begin(self) -> None:
        """The swarm is there."""

    def updated(self, node: int) -> None:
        """A free learner made an update."""

    def requested(self, node: int) -> None:
        """A learner has asked; whoever doesn't care answers at once."""
        self.learners.answer(node, self.world.now_s)

    def killed(self, node: int) -> None:
        """A node has ended; nobody knows yet."""

    def left(self, node: int) -> None:
        """All know that it has."""

    def joined(self, node: int) -> None:
        """A node is there, and all know it."""


LEAST = 2
"""Fewer nodes than this don't lose another one."""


def moments(per_minute: float, seconds: float, rng: random.Random) -> list[float]:
    """The moments of a Poisson process."""
    found: list[float] = []
    at_s = 0.0
    while per_minute > 0:
        at_s += rng.expovariate(per_minute / 60.0)
        if at_s >= seconds:
            break
        found.append(at_s)
    return found


class ChurnEvents:
    """Puts all of them on the events.

    Args:
        world: the swarm.
        model: is told.
        churn: how much of it.
        kills_s: moments at which a node ends.
        joins_s: moments at which one comes.

    Attributes:
        kills: nodes that have ended.
    """

    def __init__(
        self, world: World, model: Model, churn: Churn, kills_s: list[float], joins_s: list[float]
    ) -> None:
        self._world, self._model, self._churn = world, model, churn
        self.kills = 0
        self._next = world.swarm.nodes
        self._began_s = dict.fromkeys(range(world.swarm.nodes), 0.0)
        for at_s in kills_s:
            world.events.at(at_s, self._kill)
        for at_s in joins_s:
            world.events.at(at_s, self._join)

    def close(self) -> None:
        """Count how long those that are there have lived."""
        for node, began_s in self._began_s.items():
            self._world.statistics.lived_s[node] = self._world.now_s - began_s

    def _kill(self) -> None:
        world = self._world
        there = [node for node in world.view if world.up[node]]
        if len(there) <= LEAST:
            return
        node = world.rng.choice(there)
        world.up[node] = False
        self.kills += 1
        world.learners.stop(node)
        world.replicas.left(node)
        world.statistics.lived_s[node] = world.now_s - self._began_s.pop(node)
        self._model.killed(node)
        detect_s = min(self._churn.detect_s, self._model.doubt_s)
        world.events.at(world.now_s + detect_s, self._found_dead, node)

    def _found_dead(self, node: int) -> None:
        self._world.set_view([other for other in self._world.view if other != node])
        self._model.left(node)

    def _join(self) -> None:
        world = self._world
        there = [node for node in world.view if world.up[node]]
        node, self._next = self._next, self._next + 1
        world.up[node] = True
        self._began_s[node] = world.now_s
        donor = world.rng.choice(there)
        world.replicas.joined(node, donor)
        world.learners.version[node] = world.learners.version[donor]
        world.set_view([*world.view, node])
        self._model.joined(node)
        world.learners.start(node)
