"""May two nodes average, must one adopt the other's state, or neither?

Both sides compute `judge` from the same two summaries and come to mirrored verdicts, so no
further message is needed. Averaging independently initialised policies destroys both, and
averaging with a node that was frozen or cut off drags the swarm back: those adopt. What a summary says of its
lineage's steps is a claim: a node adopts the state of another lineage only if its own counts say so too.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["Natural", "Short", "Summary", "Verdict", "judge", "lineage_of_most_words", "why_adopt"]

MAX_VERSION_GAP = 10**9
"""No two honest nodes are this many updates apart: at 200 a second it is two months."""

Natural = Annotated[int, Meta(ge=0, lt=2**53)]
Short = Annotated[str, Meta(max_length=64)]


class Summary(msgspec.Struct, frozen=True):
    """What a node says of itself before its vector."""

    node_id: Short
    task_hash: Short
    layout_hash: Short
    mode_epoch: Natural
    lineage: Short
    """Id of the founding that these parameters descend from."""
    lineage_steps: Natural
    """Environment steps made within that lineage, all nodes together, as far as known."""
    policy_version: Natural


class Verdict(Enum):
    """What ``mine`` does about ``theirs``."""

    MIX = "mix"
    ADOPT = "adopt"
    """We take their state."""
    BE_ADOPTED = "be-adopted"
    """They take ours."""
    OTHER_TASK = "other-task"
    OTHER_MODE = "other-mode"
    ABSURD = "absurd-version"
    """No honest node is that far ahead or behind."""


def judge(mine: Summary, theirs: Summary, max_staleness: int) -> Verdict:
    """Decide what two nodes that meet do.

    Lineages: the one with more environment steps stays, then the lower id. Within a lineage,
    a node more than ``max_staleness`` policy versions behind adopts.
    """
    if (mine.task_hash, mine.layout_hash) != (theirs.task_hash, theirs.layout_hash):
        return Verdict.OTHER_TASK
    if mine.lineage != theirs.lineage:
        mine_stays = (-mine.lineage_steps, mine.lineage) < (-theirs.lineage_steps, theirs.lineage)
        return Verdict.BE_ADOPTED if mine_stays else Verdict.ADOPT
    if abs(theirs.policy_version - mine.policy_version) > MAX_VERSION_GAP:
        return Verdict.ABSURD
    if mine.mode_epoch != theirs.mode_epoch:
        return Verdict.OTHER_MODE
    lag = theirs.policy_version - mine.policy_version
    if lag > max_staleness:
        return Verdict.ADOPT
    if -lag > max_staleness:
        return Verdict.BE_ADOPTED
    return Verdict.MIX


def lineage_of_most_words(words: Iterable[tuple[str, int]]) -> str:
    """Return the lineage that stays among those that a group's members tell of, the same at all of them.

    One that several members tell of goes before one that a single member tells of, whatever it says; then the
    one with more environment steps, then the lower id. Whether a node really adopts the state of another
    lineage it judges for itself, by what it believes of the steps (`SwarmView.adopted`).

    Args:
        words: lineage and steps, of each member; at least one.
    """
    told: dict[str, list[int]] = {}
    for lineage, steps in words:
        told.setdefault(lineage, []).append(steps)
    return min(told, key=lambda lineage: (len(told[lineage]) < 2, -max(told[lineage]), lineage))


def why_adopt(mine: Summary, theirs: Summary) -> str:
    """Say in words why ``mine`` adopts the state of ``theirs``."""
    if mine.lineage != theirs.lineage:
        return f"lineage {theirs.lineage} has {theirs.lineage_steps} steps, ours {mine.lineage_steps}"
    return f"{theirs.policy_version - mine.policy_version} policy versions behind"
