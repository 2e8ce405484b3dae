"""What the swarm has done so far: counts by lineage, and everyone's normaliser moments.

Counts are kept apart by lineage, because the lineage with more environment steps is the one
that stays when two meet; the swarm's total is the sum over all of them, so no step is lost by
an adoption. All merging is idempotent: a message that comes twice changes nothing.

Called by `training` (our own counts), `metrics_gossip` (others') and `checkpoints` (checkpoints).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from p2pdrl.errors import WireError
from p2pdrl.ids import founded_by
from p2pdrl.node.accounting.claims import ClaimBounds
from p2pdrl.node.accounting.counters import MAX_ENTRIES, ZERO, CounterTable, Counts, CountsRow, NodeCounts
from p2pdrl.node.accounting.facts import FactSigner, ForgedFactError, SignedFact
from p2pdrl.tensors.moments import Moments, MomentsTable
from p2pdrl.tensors.sidecar import SidecarLayout
from p2pdrl.transport.codec import decode

__all__ = ["MOST_PRIOR_SAMPLES", "LineageFacts", "LineageRank", "ProgressTracker"]

MAX_LINEAGES = 64
MAX_NAME_CHARS = 64
MAX_STREAMS = 8
SAMPLES_PER_STEP = 2
"""A normaliser counts one sample a step; a learner that was killed may have counted more than it told."""

MOST_PRIOR_SAMPLES = 10_000
"""A node whose run began from a checkpoint counts the samples behind that one's normalisers as so many, at
most: what it sees itself soon counts more. Of who founded their lineage others take so many more than it can
have seen."""

SUBSTANTIAL = 0.05
"""A member's steps are a word for its lineage if they are this part of the greatest one's: a node that has
only just come to it shows nothing."""


@functools.total_ordering
@dataclass(frozen=True, slots=True)
class LineageRank:
    """What decides between lineages: the word of several living members, then steps, then the lower id.

    So no member alone makes those adopt its state who train together, whatever it says it has done.
    """

    several: bool
    env_steps: int
    lineage: str

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, LineageRank):
            return NotImplemented
        mine, theirs = ((rank.several, rank.env_steps) for rank in (self, other))
        return mine < theirs or (mine == theirs and self.lineage > other.lineage)


LineageFacts = dict[str, list[SignedFact]]
"""Counts by lineage, of each node in its own words."""


class ProgressTracker:
    """Counts and moments, as far as known to this node.

    Args:
        signer: of this node's facts.
        bounds: what others say is believed within; None believes all that is signed.
    """

    def __init__(self, signer: FactSigner, boot: int, bounds: ClaimBounds | None = None) -> None:
        self.signer = signer
        self._me = signer.node_id
        self._boot = boot
        self.bounds = bounds
        self._lineages: dict[str, CounterTable] = {}
        self._said: dict[str, tuple[NodeCounts, SignedFact]] = {}
        """What we said of ourselves last, by lineage."""
        self._elsewhere = ZERO
        self._lineage = ""
        self._moments: dict[str, MomentsTable] = {}

    def scratch(self) -> ProgressTracker:
        """An empty one of this node, to try with whether something can be read."""
        return ProgressTracker(self.signer, self._boot)

    def follow(self, lineage: str) -> None:
        """From now on our own counts belong to ``lineage``."""
        self._lineage = lineage
        self._table(lineage)
        others = (table for name, table in self._lineages.items() if name != lineage)
        self._elsewhere = sum((table.own_in_this_boot for table in others), ZERO)

    def credit(self, totals: Counts) -> None:
        """Raise our own counts of this boot to ``totals``."""
        self._table(self._lineage).raise_own(totals - self._elsewhere)

    def fold_own(self) -> None:
        """Fold our earlier boots, once peers have had time to tell what they know of them."""
        for table in self._lineages.values():
            table.fold_own()

    def steps(self, lineage: str) -> int:
        """Environment steps made within ``lineage``, as far as believed."""
        table = self._lineages.get(lineage)
        return 0 if table is None else table.total().env_steps

    def steps_of(self, lineage: str, node: str) -> int:
        """Environment steps that one node has made within ``lineage``, as far as believed."""
        table = self._lineages.get(lineage)
        return 0 if table is None else table.of_node(node).env_steps

    def rank(self, lineage: str, living: Iterable[str]) -> LineageRank:
        """How a lineage stands when it meets another: the greater one stays.

        Args:
            living: members that live now, ourselves included.
        """
        parts = [self.steps_of(lineage, node) for node in living]
        least = SUBSTANTIAL * max(parts, default=0)
        return LineageRank(sum(0 < part >= least for part in parts) >= 2, self.steps(lineage), lineage)

    def total(self) -> Counts:
        """All that the swarm has done."""
        return sum((table.total() for table in self._lineages.values()), ZERO)

    def of_node(self, node: str) -> Counts:
        """All that one node has done, over all its boots and lineages."""
        return sum((table.of_node(node) for table in self._lineages.values()), ZERO)

    def made(self) -> int:
        """Environment steps that this node has made in this boot, in all lineages."""
        return sum(table.own_in_this_boot.env_steps for table in self._lineages.values())

    def sign(self) -> None:
        """Say of ourselves what is so by now. Others hear nothing newer until the next call."""
        for lineage, table in self._lineages.items():
            counts = table.own()
            if counts == NodeCounts() or (lineage in self._said and self._said[lineage][0] == counts):
                continue
            fact = self.signer.sign("counts", lineage, msgspec.msgpack.encode(counts))
            self._said[lineage] = (counts, fact)
        for name, moments in self._moments.items():
            moments.tell_own(functools.partial(self._prove, name))

    def facts(self) -> dict[str, dict[str, list[SignedFact]]]:
        """Return the counts of all nodes, by lineage and node, to be sent or saved: ours as of `sign`."""
        found = {lineage: table.facts() for lineage, table in self._lineages.items()}
        for lineage, (_, fact) in self._said.items():
            if lineage in found:
                found[lineage][self._me] = [fact]
        return {lineage: by_node for lineage, by_node in found.items() if by_node}

    def counts(self) -> LineageFacts:
        """Return the same by lineage."""
        return {
            lineage: [fact for node in sorted(by_node) for fact in by_node[node]]
            for lineage, by_node in self.facts().items()
        }

    def merge_counts(
        self,
        counts: LineageFacts,
        *,
        teller: str | None = None,
        now_s: float = 0.0,
        latest_boot: int | None = None,
    ) -> None:
        """Take in what a peer sent or a checkpoint held.

        Of lineages that we don't know yet, those in which nothing was done are passed over. When there
        is no room, a lineage makes room for one with more steps, unless it is or was our own. All lineages
        but ours share the room of one table: a member can make up any number of nodes, in each of them. Half
        of a table's room is for nodes that were seen alive.

        Args:
            teller: the peer, by which claims are bounded; None for our own disk.
            now_s: monotonic time.
            latest_boot: rows that tell of later boots (the far future) are passed over; None takes all.

        Raises:
            ForgedFactError: a row isn't signed by its node; what came before it is taken in.
            WireError: a row can't be read.
        """
        for lineage, facts in counts.items():
            if len(lineage) > MAX_NAME_CHARS:
                continue
            known = self._lineages.get(lineage)
            table = CounterTable(self._me, self._boot) if known is None else known
            room = MAX_ENTRIES if known is None else self._room_of(lineage)
            refused = table.refused
            for fact in facts:
                row = self._news(table, lineage, fact, latest_boot)
                if row is not None and self._believed(table, lineage, row, teller, now_s):
                    seen = teller is None or self.bounds is None or self.bounds.saw(fact.node)
                    table.put(fact.node, row, room if seen else room // 2)
            if known is not None and lineage != self._lineage and table.refused > refused:
                self._make_room(lineage, table, len(table) + 1)  # for when it comes again
            fits = known is None and table.total() != ZERO
            if fits and self._make_room(lineage, table, len(table)):
                self._lineages[lineage] = table

    def _news(
        self, table: CounterTable, lineage: str, fact: SignedFact, latest_boot: int | None
    ) -> CountsRow | None:
        """Return a row of another node if it says anything new, and its signature is good."""
        node = fact.node
        if table.holds(node, fact) or (lineage in self._said and self._said[lineage][1] == fact):
            return None
        said: NodeCounts = decode(fact.body, NodeCounts, "counts of a node")
        if node == self._me:
            self.signer.check("counts", lineage, fact)
            table.recall_own(said)
            return None
        if latest_boot is not None and said.newest_boot > latest_boot:
            return None
        if table.gain(node, said) is None:
            return None
        self.signer.check("counts", lineage, fact)
        return CountsRow(said, fact)

    def _believed(
        self, table: CounterTable, lineage: str, row: CountsRow, teller: str | None, now_s: float
    ) -> bool:
        node = row.fact.node
        gain = table.gain(node, row.counts)
        if teller is None or self.bounds is None or gain is None:
            return True
        total = table.of_node(node) + gain
        return self.bounds.admit(
            (lineage, node),
            node,
            total=max(total.env_steps, total.episodes, total.updates),
            gain=max(gain.env_steps, gain.episodes, gain.updates),
            teller=teller,
            now_s=now_s,
        )

    def recall_unsigned(self, lineage: str, said: NodeCounts) -> None:
        """Take in what a checkpoint of an earlier release holds of ourselves, without a signature."""
        self._table(lineage).recall_own(said)

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

    def moments_since(self, digest: dict[str, object]) -> dict[str, list[list[object]]]:
        """Return the signed entries that a peer with ``digest`` lacks; ours as of `sign`.

        Raises:
            WireError: if the digest can't be read.
        """
        return {name: table.delta_since(digest.get(name, [])) for name, table in self._moments.items()}

    def merge_moments(self, entries: dict[str, list[object]], *, latest_boot: int | None = None) -> int:
        """Take in a peer's entries of the streams that we have; return how many were new.

        Cumulative moments never forget, so an entry is put aside (it may come again) unless it is
        plausible in size and counts no more samples than that node can have seen: those of its own steps,
        and of the steps of others who haven't counted them themselves, as a learner counts what other
        nodes' actors make; of who founded our lineage also `MOST_PRIOR_SAMPLES`. Merge the counts of the
        same message first.

        Boots beyond ``latest_boot`` are ignored.

        Raises:
            ForgedFactError: an entry isn't signed by its node; what came before it is taken in.
            WireError: if they can't be read or are of another shape.
        """
        return sum(
            self._merge_stream(name, rows, latest_boot)
            for name, rows in entries.items()
            if name in self._moments
        )

    def restore_moments(self, entries: dict[str, list[object]]) -> None:
        """Take back what a checkpoint held; streams that we don't have yet are made.

        Of rows without a valid signature only our own are taken.

        Raises:
            WireError: if the entries can't be read.
        """
        for name, rows in entries.items():
            for row in rows:
                if not isinstance(row, list | tuple) or len(row) not in (3, 4):
                    raise WireError("moments of a checkpoint: expected node, boot, moments and their proof")
                self._stream(name, Moments.from_wire(row[2]).mean.shape)
            whole = [[*row, b""] if len(row) == 3 else row for row in rows if isinstance(row, list | tuple)]
            if whole:

                def admit(node: str, _boot: int, _moments: Moments, body: bytes, proof: bytes) -> bool:
                    try:
                        self._check_moments(name, node, body, proof)  # noqa: B023 (called at once)
                    except ForgedFactError:
                        return node == self._me
                    return True

                self._moments[name].merge(whole, admit)

    def begin_moments(self, moments: dict[str, Moments]) -> None:
        """Begin with what the normalisers of a checkpoint had counted, as if we had seen it before.

        Each counts as `MOST_PRIOR_SAMPLES` at most, of the same mean and deviation.

        Raises:
            WireError: a stream is of another shape.
        """
        for name, found in moments.items():
            weight = min(1.0, MOST_PRIOR_SAMPLES / max(found.count, 1.0))
            prior = Moments(found.count * weight, found.mean, found.m2 * weight)
            self.restore_moments({name: [[self._me, self._boot - 1, prior.to_wire(), b""]]})

    def _merge_stream(self, name: str, rows: list[object], latest_boot: int | None) -> int:
        table = self._moments[name]
        counted, made = table.counts(rows), self._steps_by_node()
        left = {node: max(0.0, steps - counted.get(node, 0.0)) for node, steps in made.items()}
        all_left = sum(left.values())

        def admit(node: str, boot: int, moments: Moments, body: bytes, proof: bytes) -> bool:
            if (latest_boot is not None and boot > latest_boot) or not moments.plausible:
                return False
            seen = made.get(node, 0) + all_left - left.get(node, 0.0)
            prior = MOST_PRIOR_SAMPLES if founded_by(self._lineage, proof[:32]) else 0
            if node != self._me and moments.count > SAMPLES_PER_STEP * seen + prior:
                return False
            self._check_moments(name, node, body, proof)
            return True

        return table.merge(rows, admit)

    def _steps_by_node(self) -> dict[str, int]:
        made: dict[str, int] = {}
        for table in self._lineages.values():
            for node in table.nodes():
                made[node] = made.get(node, 0) + table.of_node(node).env_steps
        return made

    def _prove(self, stream: str, body: bytes) -> bytes:
        fact = self.signer.sign("moments", stream, body)
        return fact.public_key + fact.signature

    def _check_moments(self, stream: str, node: str, body: bytes, proof: bytes) -> None:
        fact = SignedFact(proof[:32], body, proof[32:])
        if len(proof) < 32 or fact.node != node:
            self.signer.forged += 1
            raise ForgedFactError(f"moments in the name of {node[:8]} aren't signed by it")
        self.signer.check("moments", stream, fact)

    def _room_of(self, lineage: str) -> int:
        """Bases and boots that the table of a lineage may hold beside the others as they are."""
        if lineage == self._lineage:
            return MAX_ENTRIES
        others = (table for name, table in self._lineages.items() if name not in (lineage, self._lineage))
        return MAX_ENTRIES - sum(map(len, others))

    def _make_room(self, lineage: str, table: CounterTable, entries: int) -> bool:
        """Whether there is room for ``entries`` of a lineage, once those with fewer steps are dropped."""
        if entries > MAX_ENTRIES:
            return False
        env_steps = table.total().env_steps
        others = sorted(
            (other.total().env_steps, name)
            for name, other in self._lineages.items()
            if name not in (lineage, self._lineage) and other.of_node(self._me) == ZERO
        )
        known = lineage in self._lineages
        while self._room_of(lineage) < entries or (not known and len(self._lineages) >= MAX_LINEAGES):
            if not others or others[0][0] >= env_steps:
                return False
            del self._lineages[others.pop(0)[1]]
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
