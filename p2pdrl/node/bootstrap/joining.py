"""How a node comes to a swarm: it joins one, resumes the one that it remembers, or founds one. Pure.

A node that anybody could take in doesn't found: an answer of any kind shows that somebody is there, and
so does a connection that is taken and never answered (a process that is stopped, or too busy). What
remains are nodes that nobody is there for, and nodes that all start at once. Of the latter the first in
rank founds, and the others join it:

| phase | what the node does |
|---|---|
| following | was given seeds without itself, and some are silent: it keeps trying for ever |
| looking | nobody is there who could take it in, or only nodes that are starting themselves |
| blocked | somebody is there who doesn't take it in: waits |
| claiming | is first in rank, and asks everybody once more whether somebody else claims or has decided |
| decided | has founded, resumed or joined, and can soon take others in |

Each tells who asks it whom else it knows to be starting, so those that were given one seed and no more
learn of each other. A node that claims says so before it asks, so of two that claim at once at least one
sees the other; the one behind in rank takes its claim back, and the other waits until it has.
`admission` runs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from p2pdrl.config.fields import without_defaults
from p2pdrl.config.task import TaskConfig, task_hash
from p2pdrl.errors import WireError
from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.membership.joining import Sighting
from p2pdrl.membership.messages import Phase
from p2pdrl.transport import codec

__all__ = [
    "WAIT_FOR_OTHERS_S",
    "Candidate",
    "FoundingDecision",
    "JoinInfo",
    "SwarmOrigin",
    "decide",
    "decode_info",
    "refuse_task",
]


class JoinInfo(msgspec.Struct, frozen=True):
    """What a member tells a newcomer beside the view and the records."""

    task: TaskConfig
    task_hash: str
    lineage: Short
    """Empty while that member has no state itself."""
    policy_version: Natural
    founded_at: float

    def encode(self) -> bytes:
        """Return the bytes of it, without the options that are as by default."""
        return msgspec.msgpack.encode(without_defaults(self))


@dataclass(frozen=True)
class SwarmOrigin:
    """Where this node's task and lineage come from."""

    how: Literal["founded", "resumed", "joined"]
    task: TaskConfig
    info: JoinInfo | None
    """What the member through which we joined told; None when founding or resuming."""
    lineage: str = ""
    """The remembered one that is resumed; empty otherwise."""
    settled: bool = False
    """Whether its mode and stop condition are remembered, too."""


def decode_info(data: bytes) -> JoinInfo:
    """Decode what a member told.

    Raises:
        WireError: malformed, or its hash isn't that of its task.
    """
    info: JoinInfo = codec.decode(data, JoinInfo, "swarm's task (of another release?)")
    if task_hash(info.task) != info.task_hash:
        raise WireError("the swarm's task doesn't have the hash that was told")
    return info


def refuse_task(wanted_hash: str, task: TaskConfig, our_hash: str) -> str | None:
    """Say why a newcomer that wants ``wanted_hash`` (empty: any task) isn't let in; None when it is."""
    if wanted_hash in ("", our_hash):
        return None
    return (
        f"this swarm trains {task.subject} with {task.algorithm.__struct_config__.tag} "
        f"(task {our_hash[:8]}), "
        f"you ask for another task ({wanted_hash[:8]}): leave out your task options to take the swarm's"
    )


WAIT_FOR_OTHERS_S = 3.0
"""A node waits this long for others that start at the same time."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that is in no swarm."""

    node_id: str
    env_steps: int
    """Of the swarm that its data folder remembers; -1 when it remembers none."""
    own_among_seeds: bool
    """The person counts it among the first nodes."""
    waited_s: float
    claimed_s: float | None = None
    """Monotonic time of its claim; None while it has none."""
    may_found: bool = True
    """Whether it could train what it founds."""


@dataclass(frozen=True, slots=True)
class FoundingDecision:
    """What the candidate does now, and why."""

    what: Literal["wait", "claim", "found"]
    """``claim``: say so, and ask everybody again; ``found``: or resume what it remembers."""
    phase: Phase
    """What it tells others that ask it."""
    why: str = ""


def decide(me: Candidate, sightings: Sequence[Sighting]) -> FoundingDecision:
    """Tell what ``me`` does, from what came of its last tries of every address that it knows."""
    others = [sighting for sighting in sightings if sighting.kind != "own"]
    if not me.may_found:
        return FoundingDecision("wait", "following", "a node that only acts waits for one that learns")
    given = [sighting for sighting in others if sighting.given]
    if not others and not me.own_among_seeds and me.env_steps < 0:
        return FoundingDecision("found", "decided")
    present = _who_is_there(others)
    if present:
        return FoundingDecision("wait", "blocked", present)
    silent = [sighting.address for sighting in given if sighting.kind in ("silent", "pending")]
    if silent and not me.own_among_seeds:
        return FoundingDecision("wait", "following", f"nobody listens at {', '.join(silent)} yet")
    if first := _who_goes_first(me, others):
        return FoundingDecision("wait", "looking", first)
    if me.waited_s < WAIT_FOR_OTHERS_S or any(sighting.kind == "pending" for sighting in others):
        return FoundingDecision("wait", "looking", "others may be about to answer")
    if me.claimed_s is None:
        return FoundingDecision("claim", "claiming", "asks once more whether somebody else goes first")
    claimed = [s.address for s in others if s.starting is not None and s.starting.phase == "claiming"]
    if claimed:
        return FoundingDecision("wait", "claiming", f"{', '.join(claimed)} is about to begin as well")
    if any(sighting.began_s < me.claimed_s for sighting in others):
        return FoundingDecision("claim", "claiming", "asks once more whether somebody else goes first")
    return FoundingDecision("found", "decided")


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


def _who_goes_first(me: Candidate, others: Sequence[Sighting]) -> str:
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
