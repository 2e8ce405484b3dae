"""What is wrong in a swarm, from one node's list of members: pure, for scripts/peer_health.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from p2pdrl.cli.formats import age, as_number, clean

__all__ = ["MAX_REPORT_AGE_S", "problems"]

MAX_REPORT_AGE_S = 60.0
"""A member whose numbers are older than this is only known to be alive, not to be well."""


def problems(members: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line per member that is unwell: who, and why.

    A member that has left is not unwell; one that is suspect or dead is.
    """
    lines = []
    for member in members:
        if reasons := _reasons(member):
            who = f"{clean(member.get('name', '?'), 64)} at {clean(member.get('address', '?'), 64)}"
            lines.append(f"{who}: {'; '.join(clean(reason) for reason in reasons)}")
    return lines


def _reasons(member: Mapping[str, Any]) -> list[str]:
    state = member.get("state")
    if state == "left":
        return []
    if state != "alive":
        why = member.get("state_reason")
        return [f"{state} ({why})" if why else str(state)]
    reasons = [str(reason) for reason in member.get("reasons") or []]
    if member.get("healthy") is False and not reasons:
        reasons.append("says that it is unwell")
    old_s = as_number(member.get("report_age_s"))
    if not member.get("self") and (old_s is None or old_s > MAX_REPORT_AGE_S):
        reasons.append("has sent no numbers yet" if old_s is None else f"its numbers are {age(old_s)} old")
    return reasons
