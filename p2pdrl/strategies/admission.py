"""Who may exchange with us, and what both sides do when one must take the other's state instead.

Every strategy that meets peers one by one asks here, as the one that calls and as the one that is called.
"""

from __future__ import annotations

from p2pdrl.group.compatibility import Summary, Verdict, judge, why_adopt
from p2pdrl.strategies.protocol import SwarmView
from p2pdrl.transport.protocol import Refusal

__all__ = ["BUSY", "ExchangeAdmission"]

BUSY = 423
"""Status with which a node in another exchange refuses: the caller tries somebody else."""


class ExchangeAdmission:
    """Judges those who come and those whom we called.

    Args:
        epoch: mode epoch of the strategy; exchanges of another are refused.
        max_staleness: policy versions; a node further behind adopts.
    """

    def __init__(self, swarm: SwarmView, epoch: int, max_staleness: int) -> None:
        self._swarm = swarm
        self._epoch = epoch
        self._max_staleness = max_staleness

    def admit(self, sender: str, *, stopping: bool) -> Summary:
        """Return what we say of ourselves to a peer that calls.

        Raises:
            Refusal: it is quarantined (403), or there is nothing to exchange with (503).
        """
        if self._swarm.quarantined(sender):
            raise Refusal(403, "quarantined after poisoned vectors")
        mine = self._swarm.summary()
        if mine is None or stopping:
            raise Refusal(503, "no state to mix yet, or no longer")
        return mine

    def judge(self, sender: str, mine: Summary, theirs: Summary) -> Verdict:
        """Say what we do with a peer that calls; an adoption of its state is begun here.

        Returns:
            `Verdict.MIX`, `Verdict.ADOPT` or `Verdict.BE_ADOPTED`.

        Raises:
            Refusal: another task, layout or mode, or an absurd version (409).
        """
        verdict = judge(mine, theirs, self._max_staleness)
        if verdict is Verdict.MIX and theirs.mode_epoch != self._epoch:
            verdict = Verdict.OTHER_MODE
        if verdict in (Verdict.OTHER_TASK, Verdict.OTHER_MODE, Verdict.ABSURD):
            raise Refusal(409, f"can't mix: {verdict.value}")
        if verdict is Verdict.ADOPT:
            self._swarm.adopt(sender, theirs.lineage, why_adopt(mine, theirs))
        return verdict

    def heard(self, peer: str, mine: Summary, theirs: Summary, verdict: str) -> str:
        """Say what a called peer's answer means for us.

        Returns:
            ``ok``: go on; ``behind``: we begin to adopt its state; ``ahead``: it adopts ours; ``failed``:
            what it says makes no sense.
        """
        if verdict == Verdict.BE_ADOPTED.value:
            if judge(mine, theirs, self._max_staleness) is not Verdict.ADOPT:
                return "failed"
            self._swarm.adopt(peer, theirs.lineage, why_adopt(mine, theirs))
            return "behind"
        if verdict == Verdict.ADOPT.value:
            return "ahead"
        return "ok" if verdict == Verdict.MIX.value else "failed"
