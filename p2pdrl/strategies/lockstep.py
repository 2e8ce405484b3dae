"""Learners that take every step together also collect at the same time.

An update is one long collection (of experience) and then one or several gradients, each of which is a round.
Learners that begin at different times would be at different places of their updates for ever: while one
collects, all others wait in mid-update for its next gradient, so a cycle takes as long as all collections one
after another. So when the *leader's* update ends, everybody's does, by a shorter one where need be.

The leader of a round is the member with the smallest id among those that gave a gradient to it. Who computes
the round's result says in it whether the leader's update ends, so that all members conclude the same; they
step in each round alike, whether their updates end or not.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

__all__ = ["Place", "leader_ends"]


class Place(NamedTuple):
    """Where a member's update is in one round.

    Args:
        member: node id.
        weight: of its gradient; 0 when it gave none.
        left: gradients of its update that come after this one.
    """

    member: str
    weight: float
    left: int


def leader_ends(places: Iterable[Place]) -> bool:
    """Return whether the leader's update ends with this round; False when nobody gave a gradient."""
    leader = min((place for place in places if place.weight > 0), default=None)
    return leader is not None and leader.left == 0
