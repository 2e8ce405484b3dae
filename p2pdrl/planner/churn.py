"""Nodes that come and go while the simulated swarm runs."""

from __future__ import annotations

import random

from p2pdrl.planner.description import Churn
from p2pdrl.planner.world import Model, World

__all__ = ["ChurnEvents", "moments"]

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
    """

    def __init__(
        self, world: World, model: Model, churn: Churn, kills_s: list[float], joins_s: list[float]
    ) -> None:
        self._world, self._model, self._churn = world, model, churn
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
