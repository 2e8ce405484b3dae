"""How many steps, episodes and updates the swarm has made: counters that merge and never go down.

Each (node, boot) has one owner who raises its counts; everyone else keeps the greatest it has heard
of, per field. So tables merge in any order, any number of times (a grow-only counter: Shapiro 2011,
"A comprehensive study of convergent and commutative replicated data types", section 3.1.1).

Boots would pile up for ever, so an owner *folds* its earlier ones into one ``base`` that stands for
every boot up to ``folded_through``. When two tables meet, the further folded one leads; where the
other one's sum over the same boots is greater (it heard of steps that a crash made the owner
forget), that sum stays. Every figure is a lower bound of what was really done, and so is the
greatest of several: no merge lowers a figure, and none counts a step twice.

Called by the daemon at each status, by the digest exchange, and by the checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated

import msgspec
from msgspec import Meta

__all__ = ["LARGEST", "MAX_ENTRIES", "ZERO", "CounterTable", "Counts", "CountsWire", "NodeCounts"]

MAX_ENTRIES = 8192
"""Bases and boots of a table, all nodes together; what others say beyond it isn't taken in."""

LARGEST = 2**53 - 1
"""Where counting stops: the greatest integer that every JSON reader keeps exact."""

Natural = Annotated[int, Meta(ge=0, le=LARGEST)]
NodeId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]


class Counts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
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


class NodeCounts(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One node's counters as they travel and are stored."""

    node: NodeId
    base: Counts
    """Sum over all boots up to ``folded_through``."""
    folded_through: Natural
    """The last boot that ``base`` contains; 0 when none was folded."""
    boots: Annotated[tuple[tuple[Natural, Counts], ...], Meta(max_length=MAX_ENTRIES)]
    """Later boots with their counts, in order."""


class CountsWire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A whole table, or a part of it, as it travels and is stored."""

    nodes: Annotated[tuple[NodeCounts, ...], Meta(max_length=MAX_ENTRIES)] = ()


@dataclass(slots=True)
class _Node:
    base: Counts = ZERO
    folded_through: int = 0
    boots: dict[int, Counts] = field(default_factory=dict)

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

    def copy(self) -> _Node:
        return _Node(self.base, self.folded_through, dict(self.boots))


class CounterTable:
    """Counters of every node ever heard of.

    Args:
        owner: id of the node that keeps this table; what others say about its present ``boot`` is ignored.
        max_entries: bound on bases and boots together.
    """

    def __init__(self, owner: str = "", boot: int = 0, *, max_entries: int = MAX_ENTRIES) -> None:
        self.refused = 0
        """Entries that weren't taken in because the table was full."""
        self._owner = owner
        self._boot = boot
        self._max_entries = max_entries
        self._nodes: dict[str, _Node] = {}
        self._entries = 0

    def raise_to(self, node: str, boot: int, counts: Counts) -> None:
        """Raise the counts of one boot to at least ``counts``, field by field; a folded boot stays."""
        self._join(node, _Node(boots={boot: counts}))

    def fold_own(self) -> None:
        """Fold the owner's earlier boots into its base.

        Best called once the swarm's table has been merged after a start: peers may have heard of
        later counts than the checkpoint that this node came back with.
        """
        mine = self._nodes.get(self._owner)
        if mine is not None and self._boot > 0:
            self._entries -= len(mine.boots)
            mine.fold(self._boot - 1)
            self._entries += len(mine.boots)

    def merge(self, wire: CountsWire, *, latest_boot: int | None = None) -> bool:
        """Take in another table; return whether this one changed.

        Boots beyond ``latest_boot`` (the far future) are ignored; None takes all.
        """
        changed = False
        for entry in wire.nodes:
            if latest_boot is not None and entry.folded_through > latest_boot:
                continue
            boots = {boot: counts for boot, counts in entry.boots if boot > entry.folded_through}
            if latest_boot is not None:
                boots = {boot: counts for boot, counts in boots.items() if boot <= latest_boot}
            if entry.node == self._owner:
                if entry.folded_through >= self._boot:
                    continue
                boots = {boot: counts for boot, counts in boots.items() if boot < self._boot}
            changed |= self._join(entry.node, _Node(entry.base, entry.folded_through, boots))
        return changed

    def to_wire(self, nodes: Iterable[str] | None = None) -> CountsWire:
        """Return the table, or the part about ``nodes``, in an order that depends on its content only."""
        wanted = self._nodes.keys() if nodes is None else self._nodes.keys() & set(nodes)
        return CountsWire(
            tuple(
                NodeCounts(name, node.base, node.folded_through, tuple(sorted(node.boots.items())))
                for name, node in ((name, self._nodes[name]) for name in sorted(wanted))
            )
        )

    def of_node(self, node: str) -> Counts:
        """All that one node has done, over all its boots."""
        entry = self._nodes.get(node)
        return ZERO if entry is None else sum(entry.boots.values(), entry.base)

    def total(self) -> Counts:
        """All that the swarm has done."""
        return sum((self.of_node(node) for node in self._nodes), ZERO)

    def __len__(self) -> int:
        """Bases and boots held."""
        return self._entries

    def _join(self, name: str, theirs: _Node) -> bool:
        mine = self._nodes.get(name)
        joined = _Node() if mine is None else mine.copy()
        joined.join(theirs)
        if joined == mine:
            return False
        growth = len(joined.boots) - (-1 if mine is None else len(mine.boots))
        if growth > 0 and name != self._owner and self._entries + growth > self._max_entries:
            self.refused += 1
            return False
        self._nodes[name] = joined
        self._entries += growth
        return True
