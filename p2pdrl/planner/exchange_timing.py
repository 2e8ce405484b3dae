"""Asynchronous gossip in virtual time: when each node looks whether to begin an exchange.

What `gossip`, `sgp` and `gala` share; the cores, on `strategies.gossip.asynchronous`, are the real ones.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from p2pdrl.config.strategy import AdpsgdConfig, GalaConfig, Partners, SgpConfig
from p2pdrl.planner.world import Model, World
from p2pdrl.strategies.call_timeouts import CallDeadline
from p2pdrl.strategies.gossip.asynchronous import ExchangeTimer

__all__ = ["ExchangeTimingModel"]

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

    def posted(self, node: int) -> None:
        """A gradient is there."""
        super().posted(node)
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
