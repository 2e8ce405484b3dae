"""What a node does for its swarm, as told in its signed member record.

    actor    makes experience
    learner  updates parameters
    replay   holds transitions for others
    server   holds parameters for others

A member of an earlier release says nothing: it does all that its task needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, get_args

__all__ = ["Role", "roles_in", "tags_of"]

Role = Literal["actor", "learner", "replay", "server"]

_TAG = "roles"
_ALL_NEEDED: tuple[Role, ...] = ("actor", "learner", "server")
"""What every task there is needs; replay waits for an algorithm that has one."""


def tags_of(roles: Sequence[Role]) -> dict[str, str]:
    """Return the tags of a member record that tell ``roles``; none given are all that a task needs."""
    return {_TAG: ",".join(sorted(set(roles or _ALL_NEEDED)))}


def roles_in(tags: Mapping[str, str]) -> tuple[Role, ...]:
    """Return the roles that a member's tags tell, in order; words of later releases are passed over."""
    told = tags.get(_TAG)
    if told is None:
        return _ALL_NEEDED
    words = told.split(",")
    return tuple(role for role in get_args(Role) if role in words)
