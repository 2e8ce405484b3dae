"""What happened, counted per node."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter

import numpy as np
import numpy.typing as npt

__all__ = ["STALENESS_BOUNDS", "Statistics"]

STALENESS_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
"""Greatest staleness, in policy versions, of each bucket but the last, which takes the rest; as on nodes."""


class Statistics:
    """Counts since the beginning.

    Args:
        capacity: nodes at most.

    Attributes:
        updates: made by learners.
        fresh: those of them that began on parameters which others' work had reached since the one before.
        rounds: that ended well, of those that a node began or took part in.
        lost: that didn't.
        outcomes: of all rounds, in words.
        waited_s: how long learners stood still.
        lived_s: how long nodes were there.
        out: payload that left.
        into: payload that came.
        wire_out: with heads and packets.
        wire_in: with heads and packets.
        staleness: of what was merged, by bucket.
        round_s: seconds of all rounds that ended well.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self.reset()

    def reset(self) -> None:
        """Count from 0 on."""
        capacity = self._capacity
        self.updates = [0] * capacity
        self.fresh = [0] * capacity
        self.rounds = [0] * capacity
        self.lost = [0] * capacity
        self.outcomes: Counter[str] = Counter()
        self.waited_s = [0.0] * capacity
        self.lived_s = [0.0] * capacity
        self.out = [0.0] * capacity
        self.into = [0.0] * capacity
        self.wire_out = [0.0] * capacity
        self.wire_in = [0.0] * capacity
        self.staleness = [0] * (len(STALENESS_BOUNDS) + 1)
        self.round_s = 0.0
        self._heard_NF = np.zeros((capacity, 3))
        """By `broadcast`, and not in the lists yet: payload that came, bytes on the wire, answers' bytes."""

    def message(self, source: int, target: int, payload: float, on_wire: float) -> None:
        """A message went from one to the other."""
        self.out[source] += payload
        self.into[target] += payload
        self.wire_out[source] += on_wire
        self.wire_in[target] += on_wire

    def broadcast(
        self,
        source: int,
        targets_P: npt.NDArray[np.int64],
        payload: float,
        on_wire: float,
        answer: float,
    ) -> None:
        """One message went to each of ``targets_P``, who answered; they see it after `settle`.

        Args:
            source: who sent it.
            targets_P: nodes, each once.
            payload: bytes of each copy that count for the strategy.
            on_wire: bytes of each copy with heads and packets.
            answer: bytes of each answer, which carries no payload.
        """
        self.out[source] += payload * len(targets_P)
        self.wire_out[source] += on_wire * len(targets_P)
        self.wire_in[source] += answer * len(targets_P)
        self._heard_NF[targets_P] += (payload, on_wire, answer)

    def settle(self) -> None:
        """The end: what came by `broadcast` is counted with the rest."""
        for node, (payload, on_wire, answers) in enumerate(self._heard_NF.tolist()):
            self.into[node] += payload
            self.wire_in[node] += on_wire
            self.wire_out[node] += answers
        self._heard_NF[:] = 0.0

    def round(self, node: int, outcome: str, seconds: float, count: int = 1) -> None:
        """Rounds of ``node`` ended well, each after ``seconds``."""
        self.rounds[node] += count
        self.outcomes[outcome] += count
        self.round_s += seconds * count

    def loss(self, node: int, outcome: str) -> None:
        """A round of ``node`` came to nothing."""
        self.lost[node] += 1
        self.outcomes[outcome] += 1

    def merged(self, staleness: int, count: int = 1) -> None:
        """Contributions of others were merged, each so many versions behind the one who merges."""
        self.staleness[bisect_left(STALENESS_BOUNDS, staleness)] += count
