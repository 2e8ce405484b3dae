"""How long to wait for a peer that was called, and what its failure is called."""

from __future__ import annotations

from p2pdrl.errors import (
    P2PDRLError,
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    PoisonedVectorError,
    TransportError,
)
from p2pdrl.strategies.door import BUSY
from p2pdrl.strategies.patience import Patience

__all__ = ["CallDeadline", "outcome_of"]

MAX_DOUBLINGS = 6


class CallDeadline:
    """A deadline for calls that follows the calls that went well.

    Each call in a row that ran out of time doubles it, up to ``most_s``: or a network that became slow at
    once would never be waited for again.

    Args:
        most_s: never wait longer.
    """

    def __init__(self, most_s: float) -> None:
        self._patience = Patience(most_s)
        self._in_a_row = 0

    @property
    def seconds(self) -> float:
        """How long the next call may take."""
        patience = self._patience
        return min(patience.deadline_s * 2.0**self._in_a_row, patience.most_s)

    def note(self, outcome: str, seconds: float) -> None:
        """Note how a call ended, and how long it took.

        Args:
            outcome: ``ok``, ``timeout``, or another word, which says nothing about time.
            seconds: how long it took.
        """
        if outcome == "ok":
            self._patience.observe(seconds)
            self._in_a_row = 0
        elif outcome == "timeout":
            self._in_a_row = min(self._in_a_row + 1, MAX_DOUBLINGS)


def outcome_of(error: P2PDRLError) -> str:
    """Name what went wrong in one exchange.

    Returns:
        ``timeout busy refused poisoned failed unsure``; ``unsure`` means that the peer may have moved.
    """
    match error:
        case PeerTimeoutError():
            return "timeout"
        case PeerRefusedError(status=status):
            return "busy" if status == BUSY else "refused"
        case PoisonedVectorError():
            return "poisoned"
        case PeerUnreachableError():
            return "failed"
        case TransportError():
            return "unsure"
        case _:
            return "failed"
