"""Learners in virtual time: they compute, post and wait as their learner mode says.

See `config.learner_mode`; `FakeLearner` of `testing` is the same on a node. An update counts when its
gradient is there.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.event_queue import EventQueue
from p2pdrl.planner.statistics import Statistics

__all__ = ["Learners"]


class Learners:
    """All learners.

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
        posted: told of each post.
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
        self._post_s = swarm.costs.post_s
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
        self.posted: Callable[[int], None] = lambda _: None

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
        """The oldest post is answered at ``when_s``; the learner hears of it a moment later."""
        self._events.at(when_s + self._post_s, self._answered, node)

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
        self._events.at(self._events.now_s + self._post_s, self._post, node)
        if not waits:
            self._begin(node)

    def _post(self, node: int) -> None:
        if self._up[node]:
            self.posted(node)

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
