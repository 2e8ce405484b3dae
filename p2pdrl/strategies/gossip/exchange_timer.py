"""When to begin an exchange, and which peers rest: what all asynchronous gossip shares. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Protocol

from p2pdrl.config.strategy import Partners

__all__ = ["ExchangeTimer", "Timetable"]

IDLE_S = 1.0
"""Longest wait for news: what else an exchange waits for (a state, members) is looked at so often."""
COOL_FIRST_S = 0.5
COOL_MAX_S = 15.0
UNREADY_MAX_S = 1.0
"""A peer that says that it is only just starting rests no longer."""
MAX_DOUBLINGS = 3
MAX_FAILURES = 16
"""Counted no further: the rest has long reached its bound by then."""


class Timetable(Protocol):
    """The options that say when, and with whom."""

    @property
    def partners(self) -> Partners:
        """Whom to meet."""
        ...

    @property
    def every_updates(self) -> int:
        """Begin after so many updates of the learner; 0 leaves it to ``every_s``."""
        ...

    @property
    def every_s(self) -> float:
        """Or after so many seconds; 0 leaves it to ``every_updates``."""
        ...

    @property
    def min_interval_s(self) -> float:
        """Never closer together."""
        ...


class ExchangeTimer:
    """Timing, and the rests of peers that failed.

    Args:
        config: the strategy's options.
        rng: source of the random moments.
        cool_first_s: how long a peer rests after its first failure in a row.
    """

    def __init__(self, config: Timetable, rng: random.Random, cool_first_s: float = COOL_FIRST_S) -> None:
        self._timetable = config
        self._rng = rng
        self._cool_first_s = cool_first_s
        self._updates = 0
        self._began_s = float("-inf")
        self._next_s = float("-inf")
        self._busy_in_a_row = 0
        self._failures: dict[str, int] = {}
        self._cool_until_s: dict[str, float] = {}

    @property
    def next_s(self) -> float:
        """Monotonic time before which no exchange begins."""
        return self._next_s

    def rest_s(self, now_s: float) -> float:
        """How long to wait for news: up to the moment at which an exchange may begin.

        Without updates (the learner is paused, say) only time makes one due, so there is no hurry.
        """
        left_s = self._next_s - now_s
        if left_s <= 0:
            every_s = self._timetable.every_s
            left_s = self._timetable.min_interval_s
            if not self.due(now_s):
                left_s = IDLE_S if every_s <= 0 else min(IDLE_S, self._began_s + every_s - now_s)
        return max(left_s, 0.005)

    def updated(self, updates: int) -> None:
        """Note that the learner made ``updates`` more updates."""
        self._updates += updates

    def due(self, now_s: float) -> bool:
        """Tell whether an exchange should begin at ``now_s``."""
        if now_s < self._next_s:
            return False
        config = self._timetable
        by_count = config.every_updates > 0 and self._updates >= config.every_updates
        by_time = config.every_s > 0 and now_s >= self._began_s + config.every_s
        return by_count or by_time

    def fit(self, peers: Iterable[str], now_s: float) -> list[str]:
        """Those of ``peers``, in their order, that don't rest after a failure."""
        return [peer for peer in peers if self._cool_until_s.get(peer, now_s) <= now_s]

    def began(self, now_s: float) -> None:
        """Note that an exchange begins."""
        self._began_s = now_s
        self._next_s = now_s + self._timetable.min_interval_s

    def mixed(self, partner: str) -> None:
        """Note that an exchange with ``partner`` ended well."""
        self._updates = 0
        self._busy_in_a_row = 0
        self._failures.pop(partner, None)
        self._cool_until_s.pop(partner, None)

    def busy(self, now_s: float, took_s: float) -> None:
        """Note that the partner was in another exchange: try somebody else after a moment.

        The moment is random, so that two nodes that called each other don't do so again; it is
        measured in the time that the refused call took, and doubles like Ethernet's back-off,
        because calls that last longer than the moments differ would cross for ever.

        Args:
            now_s: monotonic time.
            took_s: how long the refused call took.
        """
        spread = 2.0 ** min(self._busy_in_a_row, MAX_DOUBLINGS)
        self._busy_in_a_row += 1
        self._began_s = float("-inf")
        least_s = self._rng.uniform(0.1, 0.5) * self._timetable.min_interval_s
        self._next_s = now_s + least_s + self._rng.uniform(0.0, spread) * took_s

    def failed(self, partner: str, now_s: float, *, unready: bool = False) -> None:
        """Note that an exchange with ``partner`` failed: it rests a while, which doubles up to 15 s.

        Args:
            partner: who didn't answer, or refused.
            now_s: monotonic time.
            unready: it said that it has no state yet: it rests a second at most, however often it says so.
        """
        failures = min(self._failures.get(partner, 0) + 1, MAX_FAILURES)
        rest_s = min(self._cool_first_s * 2.0 ** (failures - 1), COOL_MAX_S)
        if unready and rest_s > UNREADY_MAX_S:
            rest_s = UNREADY_MAX_S
        else:
            self._failures[partner] = failures
        self._cool_until_s[partner] = now_s + rest_s

    def forget(self, gone: Iterable[str]) -> None:
        """Drop what is remembered of members that are gone."""
        for peer in gone:
            self._failures.pop(peer, None)
            self._cool_until_s.pop(peer, None)
