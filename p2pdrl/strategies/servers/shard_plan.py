"""Who serves which slice of the vector, and where its contents come from. Pure.

Every member of a group puts what it holds into a `ServerNote`; all members see the same notes of a view and
so come to the same `ShardPlan` without another message. The parts of a plan:

- **Servers** are the pinned members in the order of the pins, then others in rendezvous order. Whoever
  serves a shard of the same cuts keeps it, so the loss of one server moves one shard.
- **Contents**: each piece comes from the copy with the highest version: a live shard, a replica, or a
  worker's whole copy. Only members that acted together last (a *branch*) give, those with
  the most samples behind them: after a partition the side that did more work goes on, and the slices of two
  sides never make one vector. When nobody holds anything of the mode's epoch, servers begin from the mean of
  the members' vectors (the seed).
- **Lineage**: members of another founding than the one with the most steps give nothing; they adopt.

Versions count steps, from the highest policy version at the seed.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from p2pdrl.group.compatibility import Natural, Short, lineage_of_most_words
from p2pdrl.group.rendezvous import ranked
from p2pdrl.group.view import GroupNote

__all__ = [
    "Claim",
    "HeldSpan",
    "Holder",
    "ServerNote",
    "ShardPlan",
    "ShardSpan",
    "cut",
    "make_plan",
    "pieces",
    "read_note",
]

NOTE_BYTES = 256
"""Longest note that a group carries."""
STATE_LAG = 1000
"""Optimizer state this many steps older than the parameters is still worth having: momenta of Adam reach
back as far (β₂ = 0.999)."""
MOST_CLAIMS = 4

Step = Annotated[int, Meta(ge=-1, lt=2**53)]


class ShardSpan(NamedTuple):
    """A run of the vector's entries, ``stop`` excluded."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.stop - self.start

    @property
    def slice(self) -> slice:
        """For indexing."""
        return slice(self.start, self.stop)

    def holds(self, other: ShardSpan) -> bool:
        """Tell whether ``other`` lies within."""
        return self.start <= other.start and other.stop <= self.stop


class Claim(msgspec.Struct, frozen=True, array_like=True):
    """A member's word that it holds parameters and optimizer state of a span."""

    start: Natural
    stop: Natural
    version: Natural
    live: bool
    """Whether it is the shard that the member serves; else a replica."""

    @property
    def span(self) -> ShardSpan:
        """The entries."""
        return ShardSpan(self.start, self.stop)


class ServerNote(GroupNote, frozen=True, array_like=True):
    """What a member says of itself when it agrees to a view."""

    lineage: Short = ""
    """Founding that its parameters descend from; empty while it has none to give."""
    steps: Natural = 0
    """Environment steps of that lineage, as far as it knows."""
    policy: Natural = 0
    """Its policy version."""
    pin: Annotated[int, Meta(ge=-1, le=4096)] = -1
    """Its index among the pinned servers; -1 for none."""
    copy: Step = -1
    """Version of the whole vector that it took from servers of this mode epoch; -1 for none."""
    progress: Natural = 0
    """Samples whose gradients are in that vector, since the seed."""
    branch: Short = ""
    """View in which it took that vector."""
    claims: Annotated[tuple[Claim, ...], Meta(max_length=MOST_CLAIMS)] = ()

    @property
    def version(self) -> int:
        """The highest of what it holds."""
        return max(self.copy, *(claim.version for claim in self.claims), -1)

    def encode(self) -> bytes:
        """Return at most `NOTE_BYTES`; the last claims are left out when it would be longer."""
        note = msgspec.structs.replace(self, claims=self.claims[:MOST_CLAIMS])
        while len(data := msgspec.msgpack.encode(note)) > NOTE_BYTES and note.claims:
            note = msgspec.structs.replace(note, claims=note.claims[:-1])
        return data


class Holder(NamedTuple):
    """A member that can give a piece in some version, with or without optimizer state."""

    peer: str
    version: int
    state: bool


class HeldSpan(NamedTuple):
    """A span that comes from one holder: whom to ask for it, the best first."""

    span: ShardSpan
    holders: tuple[Holder, ...]


class ShardPlan(NamedTuple):
    """What follows from a view and its notes; the same at all members.

    Args:
        servers: node id that serves each shard.
        spans: entries of each shard.
        version: at which all servers begin.
        progress: samples whose gradients are in it.
        seed: whether they begin from the mean of the givers' vectors.
        lineage: the one that stays; empty when nobody has parameters.
        givers: its members.
        holders: those whose contents the servers begin with; none when they begin from a seed.
        donor: the one of them to adopt from.
        successors: node that keeps a replica of each shard; the server itself when it is alone.
    """

    servers: tuple[str, ...]
    spans: tuple[ShardSpan, ...]
    version: int
    progress: int
    seed: bool
    lineage: str
    givers: tuple[str, ...]
    holders: tuple[str, ...]
    donor: str
    successors: tuple[str, ...]

    def shard_of(self, peer: str) -> int | None:
        """Index of the shard that ``peer`` serves."""
        return self.servers.index(peer) if peer in self.servers else None


def read_note(data: bytes | None, size: int) -> ServerNote:
    """Read a member's note; an empty one when it can't be read, and without impossible claims."""
    note = ServerNote.read(data)
    good = tuple(claim for claim in note.claims if claim.start < claim.stop <= size)
    return msgspec.structs.replace(note, claims=good)


def cut(size: int, count: int) -> tuple[ShardSpan, ...]:
    """Cut ``size`` entries into ``count`` spans whose lengths differ by one at most."""
    edges = [index * size // count for index in range(count + 1)]
    return tuple(ShardSpan(start, stop) for start, stop in itertools.pairwise(edges))


def make_plan(
    seed: str, members: Sequence[str], notes: Mapping[str, ServerNote], servers: int, size: int
) -> ShardPlan:
    """Decide from a view what each member does.

    Args:
        seed: of the rendezvous order.
        servers: how many shards are wanted.
        size: D.
    """
    lineage, givers, donor = _givers(members, notes)
    kept = {peer: notes[peer] for peer in givers}
    pinned = sorted((notes[peer].pin, peer) for peer in members if notes[peer].pin >= 0)
    chosen = [peer for _, peer in pinned]
    order = chosen + [peer for peer in ranked(seed, members) if peer not in chosen]
    count = min(servers, len(order), size)
    spans = cut(size, count)
    holders = _branch(kept)
    serving = _assign(order[:count], spans, {peer: kept[peer] for peer in holders})
    base = max((note.policy for note in kept.values()), default=0)
    return ShardPlan(
        servers=serving,
        spans=spans,
        version=max((kept[peer].version for peer in holders), default=base),
        progress=max((kept[peer].progress for peer in holders), default=0),
        seed=not holders,
        lineage=lineage,
        givers=givers,
        holders=holders,
        donor=donor,
        successors=tuple(_successor(peer, order, count) for peer in serving),
    )


def pieces(span: ShardSpan, me: str, plan: ShardPlan, notes: Mapping[str, ServerNote]) -> list[HeldSpan]:
    """Return where each part of ``span`` comes from: the highest version, of equals our own."""
    claims = [(peer, claim) for peer in plan.holders for claim in notes[peer].claims]
    edges = {span.start, span.stop}
    for _, claim in claims:
        edges |= {edge for edge in (claim.start, claim.stop) if span.start < edge < span.stop}
    ordered = sorted(edges)
    result = []
    for part in (ShardSpan(*pair) for pair in itertools.pairwise(ordered)):
        holders = [
            Holder(peer, claim.version, state=True) for peer, claim in claims if claim.span.holds(part)
        ]
        holders += [Holder(peer, notes[peer].copy, state=False) for peer in plan.holders]
        holders.sort(key=lambda holder: (-holder.version, not holder.state, holder.peer != me, holder.peer))
        result.append(HeldSpan(part, tuple(holders)))
    return result


def _givers(members: Sequence[str], notes: Mapping[str, ServerNote]) -> tuple[str, tuple[str, ...], str]:
    """Return the lineage that stays (see `group.compatibility`), its members, and one to adopt from."""
    able = [peer for peer in members if notes[peer].lineage]
    if not able:
        return "", (), ""
    lineage = lineage_of_most_words((notes[peer].lineage, notes[peer].steps) for peer in able)
    givers = tuple(peer for peer in able if notes[peer].lineage == lineage)
    return lineage, givers, min(givers, key=lambda peer: (-notes[peer].steps, peer))


def _assign(
    servers: Sequence[str], spans: Sequence[ShardSpan], notes: Mapping[str, ServerNote]
) -> tuple[str, ...]:
    """Give each span to a server: to that which serves it already, the rest in order."""
    taken: dict[ShardSpan, str] = {}
    for peer in servers:
        live = [claim for claim in notes[peer].claims if claim.live] if peer in notes else []
        for claim in live:
            if claim.span in spans and claim.span not in taken and peer not in taken.values():
                taken[claim.span] = peer
    free = iter([peer for peer in servers if peer not in taken.values()])
    return tuple(taken[span] if span in taken else next(free) for span in spans)


def _branch(notes: Mapping[str, ServerNote]) -> tuple[str, ...]:
    """Return the members with a whole copy that acted together last and came furthest."""
    able = {peer: note for peer, note in notes.items() if note.copy >= 0}
    if not able:
        return ()
    best = max(able.values(), key=lambda note: (note.progress, note.version, note.branch)).branch
    return tuple(peer for peer, note in able.items() if note.branch == best)


def _successor(server: str, order: Sequence[str], count: int) -> str:
    """Return who keeps a replica of a server's shard: the first that doesn't serve, else the next server."""
    if len(order) > count:
        return order[count]
    return order[(order.index(server) + 1) % len(order)]
