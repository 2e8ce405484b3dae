"""Which of the nodes that are in no swarm founds one, or resumes the one that it remembers. Pure.

A node that anybody could take in doesn't found: an answer of any kind shows that somebody is there, and
so does a connection that is taken and never answered (a process that is stopped, or too busy). What
remains are nodes that nobody is there for, and nodes that all start at once. Of the latter the first in
rank goes, and the others join it:

| phase | what the node does |
|---|---|
| following | was given seeds without itself, and some are silent: it keeps trying for ever |
| looking | nobody is there who could take it in, or only nodes that are starting themselves |
| blocked | somebody is there who doesn't take it in: waits |
| claiming | is first in rank, and asks everybody once more whether somebody else claims or has decided |
| decided | has founded, resumed or joined, and can soon take others in |

Whoever claims says so before it asks, so that of two that claim at once at least one sees the other; the one
behind in rank takes its claim back, and the other waits until it has. The admission runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from p2pdrl.membership.joining import Sighting

__all__ = ["PATIENCE_S", "Decision", "Seeker", "decide"]

PATIENCE_S = 3.0
"""A node waits this long for others that start at the same time."""

Phase = Literal["looking", "following", "blocked", "claiming", "decided"]


@dataclass(frozen=True, slots=True)
class Seeker:
    """A node that is in no swarm.

    Attributes:
        node_id: its own id.
        env_steps: of the swarm that its data folder remembers; -1 when it remembers none.
        own_among_seeds: the person counts it among the first nodes.
        waited_s: seconds since it began to look.
        claimed_s: monotonic time of its claim; None while it has none.
    """

    node_id: str
    env_steps: int
    own_among_seeds: bool
    waited_s: float
    claimed_s: float | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """What the node does now.

    Attributes:
        what: "wait"; "claim" (say so and ask everybody again); "lead" (found or resume).
        phase: what it tells others that ask it.
        why: what it waits for, in plain words.
    """

    what: Literal["wait", "claim", "lead"]
    phase: Phase
    why: str = ""


def decide(me: Seeker, sightings: Sequence[Sighting]) -> Decision:
    """Tell what ``me`` does, from what came of its last tries of every address that it knows."""
    others = [sighting for sighting in sightings if sighting.kind != "own"]
    given = [sighting for sighting in others if sighting.given]
    if not others and not me.own_among_seeds and me.env_steps < 0:
        return Decision("lead", "decided")
    present = _who_is_there(others)
    if present:
        return Decision("wait", "blocked", present)
    silent = [sighting.address for sighting in given if sighting.kind in ("silent", "pending")]
    if silent and not me.own_among_seeds:
        return Decision("wait", "following", f"nobody listens at {', '.join(silent)} yet")
    if first := _who_goes_first(me, others):
        return Decision("wait", "looking", first)
    if me.waited_s < PATIENCE_S or any(sighting.kind == "pending" for sighting in others):
        return Decision("wait", "looking", "others may be about to answer")
    if me.claimed_s is None:
        return Decision("claim", "claiming", "asks once more whether somebody else goes first")
    claimed = [s.address for s in others if s.starting is not None and s.starting.phase == "claiming"]
    if claimed:
        return Decision("wait", "claiming", f"{', '.join(claimed)} is about to begin as well")
    if any(sighting.began_s < me.claimed_s for sighting in others):
        return Decision("claim", "claiming", "asks once more whether somebody else goes first")
    return Decision("lead", "decided")


def _who_is_there(others: Sequence[Sighting]) -> str:
    """Say who could take us in sooner or later; empty when nobody could."""
    for sighting in others:
        if sighting.kind == "frozen":
            return (
                f"{sighting.address} takes connections and doesn't answer; is its process stopped, "
                "or very busy?"
            )
        if sighting.kind in ("answered", "joined"):
            why = sighting.words or "asked again"
            return f"{sighting.address} answers, and doesn't take this node in yet ({why})"
        if sighting.starting is not None and sighting.starting.phase == "decided":
            return f"{sighting.address} has begun, and takes this node in once it is up"
    return ""


def _who_goes_first(me: Seeker, others: Sequence[Sighting]) -> str:
    mine = (-me.env_steps, me.node_id)
    for sighting in others:
        said = sighting.starting
        if said is None or said.phase == "following":
            continue
        if said.phase == "blocked":
            return f"{sighting.address} is starting as well, and waits for somebody who is there"
        if (-said.env_steps, sighting.node_id) < mine:
            remembers = said.env_steps > me.env_steps
            reason = "remembers more of the swarm" if remembers else "has the smaller id"
            return f"{sighting.address} is starting as well and goes first: it {reason}"
    return ""
