"""May two nodes average, must one adopt the other's state, or neither?

Both sides compute `judge` from the same two summaries and come to mirrored verdicts, so no
further message is needed. Averaging independently initialised policies destroys both, and
averaging with a node that was frozen or cut off drags the swarm back: those adopt.
"""

from __future__ import annotations

from enum import Enum

import msgspec

__all__ = ["Summary", "Verdict", "judge"]


class Summary(msgspec.Struct, frozen=True):
    """What a node says of itself before its vector."""

    node_id: str
    task_hash: str
    layout_hash: str
    mode_epoch: int
    lineage: str
    """Id of the founding that these parameters descend from."""
    lineage_steps: int
    """Environment steps made within that lineage, all nodes together, as far as known."""
    policy_version: int


class Verdict(Enum):
    """What ``mine`` does about ``theirs``."""

    MIX = "mix"
    ADOPT = "adopt"
    """We take their state."""
    BE_ADOPTED = "be-adopted"
    """They take ours."""
    OTHER_TASK = "other-task"
    OTHER_MODE = "other-mode"


def judge(mine: Summary, theirs: Summary, max_staleness: int) -> Verdict:
    """Decide what two nodes that meet do.

    Lineages: the one with more environment steps stays, then the lower id. Within a lineage,
    a node more than ``max_staleness`` policy versions behind adopts.

    Args:
        mine: our own summary.
        theirs: the peer's.
        max_staleness: policy versions.
    """
    if (mine.task_hash, mine.layout_hash) != (theirs.task_hash, theirs.layout_hash):
        return Verdict.OTHER_TASK
    if mine.lineage != theirs.lineage:
        mine_stays = (-mine.lineage_steps, mine.lineage) < (-theirs.lineage_steps, theirs.lineage)
        return Verdict.BE_ADOPTED if mine_stays else Verdict.ADOPT
    if mine.mode_epoch != theirs.mode_epoch:
        return Verdict.OTHER_MODE
    lag = theirs.policy_version - mine.policy_version
    if lag > max_staleness:
        return Verdict.ADOPT
    if -lag > max_staleness:
        return Verdict.BE_ADOPTED
    return Verdict.MIX
