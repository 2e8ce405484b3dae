"""How long to wait for a peer that was called, and what its failure is called."""

from __future__ import annotations

from dataclasses import replace

from p2pdrl.errors import (
    P2PDRLError,
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    PoisonedVectorError,
    TransportError,
)
from p2pdrl.group.adaptive_timeout import AdaptiveTimeout
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.protocol import RoundReport

__all__ = ["CallDeadline", "failed", "outcome_of"]

UNREADY = 503
"""Status with which a node refuses that has no state yet, or no longer."""
FIRST_S = 1.0
"""Deadline before anybody answered: who waits long for a lost answer is busy for all others."""
LEAST_S = 0.25
FEW = 4
"""Calls that went well below which the longest of them, times `FEW_MARGIN`, is the measure."""
FEW_MARGIN = 4.0
ANSWER_MARGIN = 8.0
"""On the time of a mere answer, which carried no vector."""
FULL_EVERY = 4
"""Of calls in a row that nobody answered, each so many-th is waited for as long as may be."""


class CallDeadline:
    """A deadline for calls that follows the calls that went well.

    Before there are some, the time in which peers answer at all is the measure. After three calls in a row
    that nobody answered the next is given all of ``most_s``: a network that became slow at once is found
    out so. To wait longer and longer instead is a trap where messages are lost: nodes that wait are busy
    for each other, so that hardly a call goes well, and the waits never end.
    """

    def __init__(self, most_s: float) -> None:
        self._timeout = AdaptiveTimeout(most_s, least_s=LEAST_S)
        self._in_vain = 0
        self._good: list[float] = []
        self._answered_s: float | None = None

    @property
    def seconds(self) -> float:
        """How long the next call may take."""
        most_s = self._timeout.most_s
        in_full = self._in_vain % FULL_EVERY == FULL_EVERY - 1
        return most_s if in_full else min(self._base_s(), most_s)

    def note(self, outcome: str, seconds: float) -> None:
        """Note how a call ended, and how long it took.

        Args:
            outcome: ``ok``, ``timeout``, ``busy`` or ``refused``; another word says nothing about time.
        """
        if outcome == "timeout":
            self._in_vain += 1
        elif outcome in ("ok", "busy", "refused"):
            self._in_vain = 0
        if outcome == "ok":
            self._timeout.observe(seconds)
            if len(self._good) < FEW:
                self._good.append(seconds)
        elif outcome in ("busy", "refused"):
            self._answered_s = max(self._answered_s or 0.0, seconds)

    def _base_s(self) -> float:
        if len(self._good) >= FEW:
            return self._timeout.deadline_s
        if self._good:
            return max(FEW_MARGIN * max(self._good), LEAST_S)
        if self._answered_s is not None:
            return max(ANSWER_MARGIN * self._answered_s, LEAST_S)
        return FIRST_S


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


def failed(report: RoundReport, error: P2PDRLError) -> RoundReport:
    """Complete the report of an exchange that ended with ``error``."""
    unready = isinstance(error, PeerRefusedError) and error.status == UNREADY
    return replace(report, outcome=outcome_of(error), error=str(error), unready=unready)
