"""Local health awareness and suspicion timers (Lifeguard, sections IV-A and IV-B)."""

from __future__ import annotations

import math

__all__ = ["Awareness", "SuspicionTimer", "suspicion_timeout_s"]


class Awareness:
    """Local health: a counter between 0 (well) and ``maximum``.

    Every sign that we, not the others, are slow (a late timer, a relay that sent no nack, having to refute a
    suspicion) raises it; each good probe lowers it. Probe interval and deadline are multiplied by health + 1,
    so that an ailing node accuses others more slowly (Lifeguard, section IV-A).
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = maximum
        self._score = 0

    @property
    def score(self) -> int:
        """0 (well) to the maximum."""
        return self._score

    def add(self, delta: int) -> None:
        """Raise (positive) or lower (negative) the score within its bounds."""
        self._score = min(self._maximum, max(0, self._score + delta))

    def scale(self, seconds: float) -> float:
        """``seconds`` stretched by the score."""
        return seconds * (self._score + 1)


def suspicion_timeout_s(confirmations: int, needed: int, min_s: float, max_s: float) -> float:
    """Seconds from the first accusation to death (Lifeguard, section IV-B).

        timeout(n) = max − ln(n + 1) / ln(k + 1) · (max − min)

    Args:
        confirmations: accusers besides the first (n).
        needed: confirmations that bring it down to ``min_s`` (k); 0 takes ``min_s`` at once.
        min_s: shortest time.
        max_s: longest time.
    """
    if needed <= 0 or confirmations >= needed:
        return min_s
    return max_s - math.log(confirmations + 1) / math.log(needed + 1) * (max_s - min_s)


class SuspicionTimer:
    """One suspicion of one member.

    Args:
        accuser: node id of the first accuser.
        needed: k of the formula.
        min_s: shortest time to death.
        max_s: longest time to death.
        started: monotonic time of the first accusation.
    """

    __slots__ = ("_accusers", "_dead_verdicts", "_max_s", "_min_s", "_needed", "started")

    def __init__(self, accuser: str, needed: int, min_s: float, max_s: float, started: float) -> None:
        self._accusers = [accuser]
        self._dead_verdicts: set[str] = set()
        self._needed = needed
        self._min_s = min_s
        self._max_s = max_s
        self.started = started

    @property
    def accusers(self) -> tuple[str, ...]:
        """Who accused, in order."""
        return tuple(self._accusers)

    @property
    def settled(self) -> bool:
        """True when further accusers change nothing."""
        return len(self._accusers) - 1 >= self._needed

    @property
    def deadline(self) -> float:
        """Monotonic time at which the member is given up."""
        return self.started + suspicion_timeout_s(
            len(self._accusers) - 1, self._needed, self._min_s, self._max_s
        )

    def confirm(self, accuser: str) -> bool:
        """Count ``accuser``; False when it counts already or changes nothing any more."""
        if self.settled or accuser in self._accusers:
            return False
        self._accusers.append(accuser)
        return True

    def confirm_dead(self, accuser: str, needed: int, now: float) -> bool:
        """Count ``accuser`` among those that declared the suspect dead; False when it counts already.

        Each of them waited a whole suspicion. Once ``needed`` have, there is nothing left to wait for:
        whoever heard late looks for itself now.
        """
        if accuser in self._dead_verdicts or len(self._dead_verdicts) >= needed:
            return False
        self._dead_verdicts.add(accuser)
        if len(self._dead_verdicts) >= needed:
            self.started -= max(0.0, self.deadline - now)
        return True

    def restart(self, now: float) -> None:
        """Give the suspect, which has just answered, the minimum from ``now`` on."""
        self.started = now - (self.deadline - self.started) + self._min_s
