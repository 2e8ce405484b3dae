"""Counts what peers did wrong, and says who isn't spoken to for a while. Pure."""

from __future__ import annotations

__all__ = ["Quarantine"]


class Quarantine:
    """Strikes by peer; enough of them and the peer is refused for a time.

    Args:
        strikes: poisoned vectors after which a peer is quarantined.
        duration_s: how long.
    """

    def __init__(self, strikes: int, duration_s: float) -> None:
        self._limit = strikes
        self._duration_s = duration_s
        self._strikes: dict[str, int] = {}
        self._until_s: dict[str, float] = {}
        self.total = 0
        """Strikes so far, all peers together."""

    def strike(self, peer: str, now_s: float) -> bool:
        """Count one strike; return whether it puts the peer into quarantine."""
        self.total += 1
        count = self._strikes.get(peer, 0) + 1
        if count < self._limit:
            self._strikes[peer] = count
            return False
        self._strikes.pop(peer, None)
        self._until_s[peer] = now_s + self._duration_s
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
