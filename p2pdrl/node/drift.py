"""Whose exchanges go with a fall of the evaluated return: that peer pulls less until it is back. Pure.

Returns fall for many reasons, and an evaluation can't tell whose pull did it. What can be told is who pulled
us unusually far since the last good evaluation. Where nobody did, nobody is blamed.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import NamedTuple

from p2pdrl.strategies.protocol import RoundReport

__all__ = ["Blame", "DriftWatch"]

EVALUATIONS = 8
"""The last evaluations, which an evaluation is compared with."""
FALLEN = 0.3
"""It has fallen when it lies below their median by this part of their range and of the median itself."""
UNUSUAL = 1.5
"""A peer's pull is unusual from this multiple of the lower median over the peers on."""
ENOUGH = 3
"""Fewer peers don't say what is usual."""
PEERS = 256
LESS = 0.5
REGAINED = 1.25
"""By which a peer's weight rises with each evaluation that is no fall."""
LEAST = 2.0**-10


class Blame(NamedTuple):
    """A fall, and whose exchanges went before it.

    Args:
        before: what was usual.
        after: the evaluation that fell.
        times: how far the peer pulled, as a multiple of what is usual among peers.
        weight: by which its pull is multiplied from now on.
    """

    peer: str
    before: float
    after: float
    times: float
    weight: float


class DriftWatch:
    """What each peer's pull is multiplied by."""

    def __init__(self) -> None:
        self._pulls: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._returns: deque[float] = deque(maxlen=EVALUATIONS)

    def weight(self, peer: str) -> float:
        """1 but for those who were blamed."""
        return self._weights.get(peer, 1.0)

    @property
    def weights(self) -> dict[str, float]:
        """Of those who were blamed and whose weight isn't 1 again."""
        return dict(self._weights)

    def round(self, report: RoundReport) -> None:
        """Add up how far each peer pulled us."""
        for one, pull in zip(report.merged, report.pulls, strict=False):
            if one.peer in self._pulls or len(self._pulls) < PEERS:
                self._pulls[one.peer] = self._pulls.get(one.peer, 0.0) + pull

    def judged(self, mean_return: float) -> Blame | None:
        """Note one more evaluation; say whom it blames, if anybody."""
        fell = self._fell(mean_return)
        if fell is None:
            self._returns.append(mean_return)
            self._pulls.clear()
            self._weights = {
                peer: risen for peer, weight in self._weights.items() if (risen := weight * REGAINED) < 1.0
            }
            return None
        pulls = {peer: pull for peer, pull in self._pulls.items() if pull > 0}
        if len(pulls) < ENOUGH:
            return None
        peer = max(pulls, key=lambda one: (pulls[one], one))
        times = pulls[peer] / statistics.median_low(pulls.values())
        if times < UNUSUAL:
            return None
        self._weights[peer] = max(LEAST, LESS * self.weight(peer))
        self._pulls.clear()
        return Blame(peer, fell, mean_return, times, self._weights[peer])

    def _fell(self, mean_return: float) -> float | None:
        """What was usual, where the evaluation is a fall from it."""
        if len(self._returns) < ENOUGH:
            return None
        usual = statistics.median(self._returns)
        range_ = max(max(self._returns) - min(self._returns), abs(usual))
        return usual if usual - mean_return > FALLEN * range_ else None
