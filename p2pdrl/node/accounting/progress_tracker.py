"""What the swarm has done so far: counts by lineage, and everyone's normaliser moments.

Counts are kept apart by lineage, because the lineage with more environment steps is the one
that stays when two meet; the swarm's total is the sum over all of them, so no step is lost by
an adoption. All merging is idempotent: a message that comes twice changes nothing.

Called by `training` (our own counts), `metrics_gossip` (others') and `checkpoints` (checkpoints).
"""

from __future__ import annotations

from typing import Any

import msgspec

from p2pdrl.errors import WireError
from p2pdrl.node.accounting.counters import ZERO, CounterTable, Counts, CountsWire
from p2pdrl.tensors.moments import Moments, MomentsTable
from p2pdrl.tensors.sidecar import SidecarLayout
from p2pdrl.transport.codec import decode

__all__ = ["LineageCounts", "ProgressTracker"]

MAX_LINEAGES = 64
MAX_NAME_CHARS = 64
MAX_STREAMS = 8
SAMPLES_PER_STEP = 2
"""A normaliser counts one sample a step; a learner that was killed may have counted more than it told."""

LineageCounts = dict[str, CountsWire]


class ProgressTracker:
    """Counts and moments, as far as known to this node."""

    def __init__(self, me: str, boot: int) -> None:
        self._me = me
        self._boot = boot
        self._lineages: dict[str, CounterTable] = {}
        self._elsewhere = ZERO
        self._lineage = ""
        self._moments: dict[str, MomentsTable] = {}

    def follow(self, lineage: str) -> None:
        """From now on our own counts belong to ``lineage``."""
        self._lineage = lineage
        self._table(lineage)
        others = (table for name, table in self._lineages.items() if name != lineage)
        self._elsewhere = sum((self._of_this_boot(table) for table in others), ZERO)

    def credit(self, totals: Counts) -> None:
        """Raise our own counts of this boot to ``totals``."""
        self._table(self._lineage).raise_to(self._me, self._boot, totals - self._elsewhere)

    def fold_own(self) -> None:
        """Fold our earlier boots, once peers have had time to tell what they know of them."""
        for table in self._lineages.values():
            table.fold_own()

    def steps(self, lineage: str) -> int:
        """Environment steps made within ``lineage``."""
        table = self._lineages.get(lineage)
        return 0 if table is None else table.total().env_steps

    def total(self) -> Counts:
        """All that the swarm has done."""
        return sum((table.total() for table in self._lineages.values()), ZERO)

    def of_node(self, node: str) -> Counts:
        """All that one node has done, over all its boots and lineages."""
        return sum((table.of_node(node) for table in self._lineages.values()), ZERO)

    def counts(self) -> LineageCounts:
        """Return all counts, to be sent or saved; a lineage in which nothing was done is left out."""
        return {
            lineage: table.to_wire() for lineage, table in self._lineages.items() if table.total() != ZERO
        }

    def merge_counts(self, counts: LineageCounts, *, latest_boot: int | None = None) -> None:
        """Take in what a peer sent or a checkpoint held.

        Of lineages that we don't know yet, those in which nothing was done are passed over. When there
        is no room, a lineage makes room for one with more steps, unless it is or was our own.

        Boots beyond ``latest_boot`` (the far future) are ignored; None takes all.
        """
        for lineage, wire in counts.items():
            known = self._lineages.get(lineage)
            table = CounterTable(self._me, self._boot) if known is None else known
            table.merge(wire, latest_boot=latest_boot)
            fits = len(lineage) <= MAX_NAME_CHARS and table.total() != ZERO
            if known is None and fits and self._make_room(table.total().env_steps):
                self._lineages[lineage] = table

    def open_streams(self, sidecar: SidecarLayout) -> None:
        """Make room for the moments of the learner's normalisers, so that peers' are taken in at once.

        In the sidecar, ``<stream>.mean`` by rule ``moments`` gives a stream's shape.

        Raises:
            WireError: there are too many streams.
        """
        for item in sidecar.items:
            name, _, part = item.name.rpartition(".")
            if item.rule == "moments" and part == "mean":
                self._stream(name, item.shape)

    def put_moments(self, own: dict[str, bytes]) -> None:
        """Keep the learner's own cumulative moments, msgpack by stream name.

        Raises:
            WireError: if one can't be read, or there are too many streams.
        """
        for name, data in own.items():
            moments = Moments.from_wire(decode(data, Any, "moments"))
            self._stream(name, moments.mean.shape).put_own(moments)

    def others_moments(self) -> dict[str, bytes]:
        """Return the merged moments of everybody else and our earlier boots, msgpack by stream name."""
        return {
            name: msgspec.msgpack.encode(table.others().to_wire()) for name, table in self._moments.items()
        }

    def moments_digest(self) -> dict[str, list[list[object]]]:
        """Say which moments we hold, so that a peer sends only newer ones."""
        return {name: table.digest() for name, table in self._moments.items()}

    def moments_since(self, digest: dict[str, object]) -> dict[str, list[object]]:
        """Return the entries that a peer with ``digest`` lacks.

        Raises:
            WireError: if the digest can't be read.
        """
        return {name: [*table.delta_since(digest.get(name, []))] for name, table in self._moments.items()}

    def merge_moments(self, entries: dict[str, list[object]], *, latest_boot: int | None = None) -> int:
        """Take in a peer's entries of the streams that we have; return how many were new.

        Cumulative moments never forget, so an entry is put aside (it may come again) unless it is
        plausible in size and counts no more samples than the swarm's environment steps, as far as
        known, allow: a learner counts those of other nodes' actors, too. Merge the counts of the same
        message first.

        Boots beyond ``latest_boot`` are ignored.

        Raises:
            WireError: if they can't be read or are of another shape.
        """
        bound = SAMPLES_PER_STEP * self.total().env_steps

        def admit(_node: str, boot: int, moments: Moments) -> bool:
            in_time = latest_boot is None or boot <= latest_boot
            return in_time and moments.count <= bound and moments.plausible

        tables = self._moments
        return sum(tables[name].merge(rows, admit) for name, rows in entries.items() if name in tables)

    def restore_moments(self, entries: dict[str, list[object]]) -> None:
        """Take back what a checkpoint held; streams that we don't have yet are made.

        Raises:
            WireError: if the entries can't be read.
        """
        for name, rows in entries.items():
            for row in rows:
                if not isinstance(row, list | tuple) or len(row) != 3:
                    raise WireError("moments of a checkpoint: expected node, boot, moments")
                self._stream(name, Moments.from_wire(row[2]).mean.shape)
            if rows:
                self._moments[name].merge(rows)

    def _of_this_boot(self, table: CounterTable) -> Counts:
        wire = table.to_wire([self._me])
        return dict(wire.nodes[0].boots).get(self._boot, ZERO) if wire.nodes else ZERO

    def _make_room(self, env_steps: int) -> bool:
        """Whether there is room for a lineage of so many steps, if need be by dropping a smaller one."""
        if len(self._lineages) < MAX_LINEAGES:
            return True
        droppable = (
            (table.total().env_steps, lineage)
            for lineage, table in self._lineages.items()
            if lineage != self._lineage and table.of_node(self._me) == ZERO
        )
        least = min(droppable, default=None)
        if least is None or least[0] >= env_steps:
            return False
        del self._lineages[least[1]]
        return True

    def _table(self, lineage: str) -> CounterTable:
        if lineage not in self._lineages:
            self._lineages[lineage] = CounterTable(self._me, self._boot)
        return self._lineages[lineage]

    def _stream(self, name: str, shape: tuple[int, ...]) -> MomentsTable:
        if name not in self._moments:
            if len(self._moments) >= MAX_STREAMS:
                raise WireError(f"there are {MAX_STREAMS} streams of moments already")
            self._moments[name] = MomentsTable(shape, self._me, self._boot)
        return self._moments[name]
