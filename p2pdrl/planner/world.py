"""All parts of one simulated swarm, and who is in it; strategies' models stand on it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

from p2pdrl.config.learner_mode import learner_mode_of
from p2pdrl.config.strategy import StrategyConfig
from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.event_queue import EventQueue
from p2pdrl.planner.learners import Learners
from p2pdrl.planner.network import Network
from p2pdrl.planner.processors import Processors
from p2pdrl.planner.replicas import Replicas
from p2pdrl.planner.statistics import Statistics

__all__ = ["DOUBT_S", "Model", "World"]

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
        learner_mode = learner_mode_of(strategy)
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

    def posted(self, node: int) -> None:
        """A learner has posted; whoever doesn't care answers at once."""
        self.learners.answer(node, self.world.now_s)

    def killed(self, node: int) -> None:
        """A node has ended; nobody knows yet."""

    def left(self, node: int) -> None:
        """All know that it has."""

    def joined(self, node: int) -> None:
        """A node is there, and all know it."""
