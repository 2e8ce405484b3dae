"""Counts what peers did wrong, and says who isn't spoken to for a while. Pure."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Quarantine"]

STRIKE_LIFE_S = 600.0
"""A strike older than this is forgiven."""
MAX_PEERS = 4096
"""Peers remembered, of either kind: made-up ids must not fill the memory."""

V = TypeVar("V")


class Quarantine:
    """Strikes by peer; enough of them within ten minutes and the peer is refused for a time.

    Args:
        strikes: poisoned vectors after which a peer is quarantined.
        duration_s: how long.
    """

    def __init__(self, strikes: int, duration_s: float) -> None:
        self._limit = strikes
        self._duration_s = duration_s
        self._strikes: dict[str, list[float]] = {}
        self._until_s: dict[str, float] = {}
        self.total = 0
        """Strikes so far, all peers together."""

    def strike(self, peer: str, now_s: float) -> bool:
        """Count one strike; return whether it puts the peer into quarantine."""
        self.total += 1
        recent = [at_s for at_s in self._strikes.pop(peer, []) if at_s > now_s - STRIKE_LIFE_S]
        recent.append(now_s)
        if len(recent) < self._limit:
            _remember(self._strikes, peer, recent)
            return False
        _remember(self._until_s, peer, now_s + self._duration_s)
        return True

    def holds(self, peer: str, now_s: float) -> bool:
        """Tell whether ``peer`` is in quarantine at ``now_s``."""
        until_s = self._until_s.get(peer)
        if until_s is None:
            return False
        if now_s >= until_s:
            del self._until_s[peer]
            return False
        return True

    def held(self, now_s: float) -> tuple[str, ...]:
        """Return the ids in quarantine at ``now_s``, sorted."""
        return tuple(sorted(peer for peer in list(self._until_s) if self.holds(peer, now_s)))


def _remember(table: dict[str, V], peer: str, value: V) -> None:
    """Put ``peer`` at the end of ``table``; the oldest goes when there are too many."""
    table.pop(peer, None)
    table[peer] = value
    if len(table) > MAX_PEERS:
        del table[next(iter(table))]
