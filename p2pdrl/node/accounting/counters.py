"""How many steps, episodes and updates the swarm has made: counters that merge and never go down.

Each (node, boot) has one owner who raises its counts, and signs what it says of them (`facts`): a *row*.
Others keep a node's newest row and pass it on unchanged. Views of the same node merge field by field, the
greater counts (a grow-only counter: Shapiro 2011, "A comprehensive study of convergent and commutative
replicated data types", section 3.1.1), so rows come in any order, any number of times.

Boots would pile up for ever, so an owner *folds* its earlier ones into one ``base`` that stands for
every boot up to ``folded_through``. When two rows meet, the further folded one leads; where the
other one's sum over the same boots is greater (a crash made the owner forget steps that it had told),
that sum stays, and so does the row that shows it, until the owner has learnt of it: its own rows come back to
it, and its next one says what all of them say. Every figure is a lower bound of what was really done, and so
is the greatest of several: no merge lowers a figure, and none counts a step twice.

Called by the daemon at each status, by the digest exchange, and by the checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.node.accounting.facts import SignedFact

__all__ = ["LARGEST", "MAX_ENTRIES", "ZERO", "CounterTable", "Counts", "CountsRow", "NodeCounts"]

MAX_ENTRIES = 8192
"""Bases and boots of a table, all nodes together; what others say beyond it isn't taken in."""
MAX_BOOTS = 32
"""Boots that a row tells apart; an owner that starts again more often than it folds folds the oldest."""
MAX_ROWS = 4
"""Rows of one node, each of which says something that the others don't. Honest nodes have two, for a minute
after a crash."""

LARGEST = 2**53 - 1
"""Where counting stops: the greatest integer that every JSON reader keeps exact."""

Natural = Annotated[int, Meta(ge=0, le=LARGEST)]


class Counts(msgspec.Struct, frozen=True, array_like=True):
    """What one boot, node or swarm has done."""

    env_steps: Natural = 0
    """Environment steps taken."""
    episodes: Natural = 0
    """Episodes finished."""
    updates: Natural = 0
    """Updates of the learner."""

    def __add__(self, other: Counts) -> Counts:
        return Counts(
            min(self.env_steps + other.env_steps, LARGEST),
            min(self.episodes + other.episodes, LARGEST),
            min(self.updates + other.updates, LARGEST),
        )

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.env_steps - other.env_steps, self.episodes - other.episodes, self.updates - other.updates
        )

    def at_least(self, other: Counts) -> Counts:
        """The greater of both, field by field."""
        return Counts(
            max(self.env_steps, other.env_steps),
            max(self.episodes, other.episodes),
            max(self.updates, other.updates),
        )


ZERO = Counts()
"""Nothing done yet."""


class NodeCounts(msgspec.Struct, frozen=True, array_like=True):
    """What a node says of itself, in one lineage: the body of a row."""

    base: Counts = ZERO
    """Sum over all boots up to ``folded_through``."""
    folded_through: Natural = 0
    """The last boot that ``base`` contains; 0 when none was folded."""
    boots: Annotated[tuple[tuple[Natural, Counts], ...], Meta(max_length=MAX_BOOTS)] = ()
    """Later boots with their counts, in order."""

    @property
    def newest_boot(self) -> int:
        """The last boot that it tells of."""
        return max((boot for boot, _ in self.boots), default=self.folded_through)


@dataclass(frozen=True, slots=True)
class CountsRow:
    """A row as it is held: what it says, and the fact that is passed on."""

    counts: NodeCounts
    fact: SignedFact


@dataclass(slots=True)
class _Node:
    base: Counts = ZERO
    folded_through: int = 0
    boots: dict[int, Counts] = field(default_factory=dict)

    @classmethod
    def of(cls, said: NodeCounts) -> _Node:
        boots = {boot: counts for boot, counts in said.boots if boot > said.folded_through}
        return cls(said.base, said.folded_through, boots)

    def prefix(self, through: int) -> Counts:
        """Sum over all boots up to ``through``."""
        return sum((counts for boot, counts in self.boots.items() if boot <= through), self.base)

    def fold(self, through: int) -> None:
        """Move all boots up to ``through`` into the base."""
        if through > self.folded_through:
            self.base = self.prefix(through)
            self.folded_through = through
            self.boots = {boot: counts for boot, counts in self.boots.items() if boot > through}

    def join(self, theirs: _Node) -> None:
        """Take in another view of the same node."""
        through = max(self.folded_through, theirs.folded_through)
        their_prefix = theirs.prefix(through)
        self.fold(through)
        self.base = self.base.at_least(their_prefix)
        for boot, counts in theirs.boots.items():
            if boot > through:
                self.boots[boot] = self.boots.get(boot, ZERO).at_least(counts)

    @property
    def total(self) -> Counts:
        return sum(self.boots.values(), self.base)


def _joined(rows: Sequence[CountsRow]) -> _Node:
    """All that several rows of one node say; the least folded first, as those tell boots apart."""
    node = _Node()
    for row in sorted(rows, key=lambda row: (row.counts.folded_through, row.fact.body)):
        node.join(_Node.of(row.counts))
    return node


def _with(held: Sequence[CountsRow], row: CountsRow) -> tuple[list[CountsRow], _Node]:
    """Return the rows that are needed once another one has come, and what they say together."""
    rows = [*held, row]
    joined = _joined(rows)
    for old in held:
        without = [other for other in rows if other is not old]
        if _joined(without) == joined:
            rows = without
    return rows, joined


class CounterTable:
    """Counters of every node ever heard of, in one lineage.

    Args:
        owner: id of the node that keeps this table; only it counts its present ``boot``.
        max_entries: bound on bases and boots together.
    """

    def __init__(self, owner: str = "", boot: int = 0, *, max_entries: int = MAX_ENTRIES) -> None:
        self.refused = 0
        """Rows that weren't taken in because the table was full, or their node tells too many stories."""
        self._owner = owner
        self._boot = boot
        self._max_entries = max_entries
        self._rows: dict[str, tuple[CountsRow, ...]] = {}
        """Of each other node: as few as say all that is known, nearly always one."""
        self._nodes: dict[str, _Node] = {}
        """What they say together, and what we did ourselves."""
        self._entries = 0

    def raise_own(self, counts: Counts) -> None:
        """Raise the counts of the owner's present boot to at least ``counts``, field by field."""
        self._join_own(_Node(boots={self._boot: counts}))

    def recall_own(self, said: NodeCounts) -> bool:
        """Take in what the owner said of its earlier boots; tell whether that is news to it."""
        if said.folded_through >= self._boot:
            return False
        mine = _Node.of(said)
        mine.boots = {boot: counts for boot, counts in mine.boots.items() if boot < self._boot}
        return self._join_own(mine)

    def fold_own(self) -> None:
        """Fold the owner's earlier boots into its base.

        Best called once the swarm's table has been merged after a start: peers may have heard of
        later counts than the checkpoint that this node came back with.
        """
        mine = self._nodes.get(self._owner)
        if mine is not None and self._boot > 0:
            mine.fold(self._boot - 1)

    def own(self) -> NodeCounts:
        """What the owner says of itself now. Of too many boots that it hasn't folded, it folds the oldest."""
        mine = self._nodes.get(self._owner, _Node())
        if len(mine.boots) > MAX_BOOTS:
            mine.fold(sorted(mine.boots)[-MAX_BOOTS - 1])
        return NodeCounts(mine.base, mine.folded_through, tuple(sorted(mine.boots.items())))

    @property
    def own_in_this_boot(self) -> Counts:
        """What the owner did in its present boot."""
        mine = self._nodes.get(self._owner)
        return ZERO if mine is None else mine.boots.get(self._boot, ZERO)

    def holds(self, node: str, fact: SignedFact) -> bool:
        """Whether that row of another node is held."""
        return any(row.fact == fact for row in self._rows.get(node, ()))

    def gain(self, node: str, said: NodeCounts) -> Counts | None:
        """How much more a row would have us believe of another node; None if we don't need it."""
        known = self._nodes.get(node, _Node())
        held = self._rows.get(node, ())
        rows, joined = _with(held, CountsRow(said, _UNSIGNED))
        return None if joined == known and len(rows) >= len(held) else joined.total - known.total

    def put(self, node: str, row: CountsRow, at_most: int = MAX_ENTRIES) -> bool:
        """Take in a row of another node, whose signature was checked; tell whether we needed it.

        That is if it says anything new, or says alone what took several.

        Args:
            at_most: bases and boots for which there is room, if that is less than the table's own bound.
        """
        at_most = min(at_most, self._max_entries)
        held = self._rows.get(node, ())
        rows, joined = _with(held, row)
        needed = joined != self._nodes.get(node, _Node()) or len(rows) < len(held)
        if node == self._owner or not needed:
            return False
        growth = sum(1 + len(one.counts.boots) for one in rows)
        growth -= sum(1 + len(one.counts.boots) for one in held)
        if len(rows) > MAX_ROWS or (growth > 0 and self._entries + growth > at_most):
            self.refused += 1
            return False
        self._rows[node], self._nodes[node] = tuple(rows), joined
        self._entries += growth
        return True

    def facts(self) -> dict[str, list[SignedFact]]:
        """Return all rows of the other nodes, by node."""
        return {node: [row.fact for row in rows] for node, rows in self._rows.items()}

    def of_node(self, node: str) -> Counts:
        """All that one node has done, over all its boots."""
        entry = self._nodes.get(node)
        return ZERO if entry is None else entry.total

    def total(self) -> Counts:
        """All that the swarm has done."""
        return sum((node.total for node in self._nodes.values()), ZERO)

    def nodes(self) -> list[str]:
        """Ids of all nodes that it counts for."""
        return list(self._nodes)

    def __len__(self) -> int:
        """Bases and boots held in rows of others."""
        return self._entries

    def _join_own(self, theirs: _Node) -> bool:
        before = self._nodes.get(self._owner, _Node())
        mine = _Node(before.base, before.folded_through, dict(before.boots))
        mine.join(theirs)
        self._nodes[self._owner] = mine
        return mine != before


_UNSIGNED = SignedFact(bytes(32), b"", b"")
