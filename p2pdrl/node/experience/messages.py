"""What nodes that act and nodes that learn tell each other, and who works for whom.

    actor's node ── Enlist: environments of each actor ──► learner's node
                 ◄── Enlisted: a lane for each, layouts; the policy as the vector ──
                 ── SentUnroll, the unroll's content as the vector ──►
                 ◄── UnrollReceipt; the policy as the vector where the actor's is older: whole, or
                     differences from the one that it has (`tensors.shared_policy.PolicyImage`) ──

Where nodes hold shards of a replay memory, actors send their unrolls there, as to a learner:

    shard's node ── FetchPolicy ──► learner's node
                 ◄── UnrollReceipt; the policy as the vector where it is newer ──
    learner's node ── AskRows ──► shard's node
                   ◄── RowsDrawn, the rows as the vector (`replay.shards.sample_items`) ──
                   ── SetPriorities, TD errors as the vector ──►

An unroll is known by (node, boot, lane, serial), so one whose answer was lost is sent again and counts once.
Where there is no room, or no lane of that sender, the call is refused at once (423, 409), and nobody waits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.strategies.protocol import SwarmView
from p2pdrl.tensors.shared_policy import MOST_DIFFERENCES
from p2pdrl.transport.protocol import Incoming, Refusal, Reply

__all__ = [
    "REPLAY_ROUTE",
    "ROUTE",
    "AskRows",
    "Enlist",
    "Enlisted",
    "ExperienceRoute",
    "FetchPolicy",
    "RowsDrawn",
    "SentUnroll",
    "SetPriorities",
    "UnrollReceipt",
    "learner_of",
]

ROUTE = "experience"
REPLAY_ROUTE = "replay"
MOST_ROWS = 1 << 20
MOST_ACTORS = 1024

Whole = Annotated[int, Meta(ge=1, le=1 << 20)]


class Enlist(msgspec.Struct, frozen=True, tag="enlist"):
    """Asks for a lane for each actor process of the sender; it keeps those that it has, in the same boot."""

    task_hash: Short
    boot: Natural
    environments: Annotated[tuple[Whole, ...], Meta(min_length=1, max_length=MOST_ACTORS)]
    """Of each actor."""


class Enlisted(msgspec.Struct, frozen=True):
    """The lanes, and what the learner's memory is made of."""

    lanes: Annotated[tuple[Natural, ...], Meta(max_length=MOST_ACTORS)]
    """One for each actor, in order."""
    board: bytes
    """msgpack of `BoardSpec.to_wire`."""
    unrolls: bytes
    """msgpack of `UnrollSpec.to_wire`; shares and slots are the learner's."""


class SentUnroll(msgspec.Struct, frozen=True, tag="unroll"):
    """Goes before an unroll's content, which is laid out as in a slot of the ring."""

    boot: Natural
    lane: Natural
    serial: Annotated[int, Meta(ge=1, lt=2**53)]
    """Of the unroll among its actor's, from 1."""
    life: Natural
    """Which of the actor's processes made it."""
    policy_version: Natural
    """Of the parameters that acted."""
    episodes: Natural
    environments: Whole
    held: Annotated[int, Meta(ge=-1, lt=2**53)]
    """Version of the newest policy that the sender has; -1 for none."""
    counted: bool = False
    """Whether the sender counts its steps and episodes: so does a node that has a learner of its own. What
    nodes that only act make is counted by the learner."""
    differences: bool = False
    """Whether the policy may come as differences from the one that is held."""


class UnrollReceipt(msgspec.Struct, frozen=True):
    """The unroll is there, now or since before."""

    policy_version: Natural
    """Of the learner's newest parameters; 0 while there are none."""
    begins: Annotated[tuple[Natural, ...], Meta(max_length=MOST_DIFFERENCES)] = ()
    """Versions that the differences in the vector begin from; none where a whole policy comes."""
    checksum: Annotated[int, Meta(ge=0, lt=2**32)] = 0
    """CRC-32 of what they make."""


class FetchPolicy(msgspec.Struct, frozen=True, tag="policy"):
    """Asks a learner for its policy."""

    task_hash: Short
    held: Annotated[int, Meta(ge=-1, lt=2**53)]
    """Version of the newest that the sender has; -1 for none."""
    differences: bool = False
    """Whether it may come as differences from that one."""


class AskRows(msgspec.Struct, frozen=True, tag="rows"):
    """Asks a shard of the replay memory for rows, drawn by their priorities."""

    task_hash: Short
    rows: Annotated[int, Meta(ge=0, le=MOST_ROWS)]
    """0 only asks how it stands."""


class RowsDrawn(msgspec.Struct, frozen=True):
    """What a shard gave, and how it stands; see `replay.shards.ShardState`."""

    boot: Natural
    rows: Annotated[int, Meta(ge=0, le=MOST_ROWS)]
    """As many as asked for, or none where none may be drawn yet."""
    mass: Annotated[float, Meta(ge=0.0, lt=1e30)]
    count: Natural
    appended: Natural
    full: bool


class SetPriorities(msgspec.Struct, frozen=True, tag="priorities"):
    """TD errors of rows that were drawn; the vector has the arrays of `replay.shards.PRIORITIES`."""

    task_hash: Short
    boot: Natural
    """As the shard told when it gave the rows."""
    rows: Annotated[int, Meta(ge=1, le=MOST_ROWS)]


class ExperienceRoute(ABC):
    """Serves one of the routes, but nobody in quarantine.

    Args:
        strikes: notes who sent what can't be, and knows who is in quarantine.
    """

    def __init__(self, strikes: SwarmView) -> None:
        self._strikes = strikes
        self.refused: Counter[int] = Counter()
        """Calls that were refused, by status."""

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a call.

        Raises:
            Refusal: quarantined (403), or as the route says.
        """
        if self._strikes.quarantined(incoming.sender):
            self.refused[403] += 1
            raise Refusal(403, "in quarantine for unrolls or parameters that can't be")
        try:
            return await self._answer(incoming)
        except Refusal as refusal:
            self.refused[refusal.status] += 1
            raise

    @abstractmethod
    async def _answer(self, incoming: Incoming) -> Reply:
        """Serve a call of somebody who may call."""


def acting_together(
    me: str, acting: Iterable[str], actors: Iterable[str], learners: Iterable[str], *, joint: bool
) -> list[str]:
    """Return the nodes whose unrolls go to the same batches as ours, ourselves included, in order.

    Args:
        acting: the other nodes that act, whether they learn or not.
        actors: those of them that don't learn.
        learners: all nodes that learn.
        joint: whether learners share out each update; else each has updates to itself, of its own unrolls
            and those of the nodes whose learner it is (`learner_of`).
    """
    together, ranked = sorted({me, *acting}), sorted(learners)
    if joint or len(ranked) < 2:
        return together
    mates = sorted({*actors, *({me} - {*ranked})})
    works_for = {mate: ranked[number % len(ranked)] for number, mate in enumerate(mates)}
    ours = works_for.get(me, me)
    return [node for node in together if works_for.get(node, node) == ours]


def learner_of(me: str, actors: Iterable[str], learners: Iterable[str]) -> str | None:
    """Return which learner a node's actors work for: as many nodes for each as can be; None without one.

    Every node comes to the same answer for all, from the ids of those that live.

    Args:
        actors: the other nodes that act and don't learn.
        learners: nodes that learn.
    """
    ranked = sorted(learners)
    mates = sorted({me, *actors})
    return ranked[mates.index(me) % len(ranked)] if ranked else None
