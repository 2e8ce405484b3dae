"""Spreads each node's report, everybody's counts and moments, by push-pull gossip of bounded size."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.errors import TransportError, WireError
from p2pdrl.node.accounting.counters import Counts, CountsWire, NodeCounts
from p2pdrl.node.accounting.progress_tracker import ProgressTracker
from p2pdrl.node.accounting.report_table import FAN_OUT, PeerReport, ReportTable, period_s
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = ["MAX_META_BYTES", "ROUTE", "GossipBudget", "MetricsGossip", "by_table", "rows_of"]

ROUTE = "metrics"
MAX_META_BYTES = 1 << 20
MESSAGE_BYTES = MAX_META_BYTES // 2
REPORTS = 12
DEADLINE_S = 2.0
BOOT_AHEAD_MS = 600_000
"""A boot id further in the future isn't believed."""
BOOTS_A_ROW = 64

T = TypeVar("T")


class GossipBudget:
    """Which rows go into a message of bounded size: all in turn, over several messages."""

    def __init__(self) -> None:
        self._turn = 0

    def take(self, first: Sequence[T], rest: Sequence[T], room: int) -> list[T]:
        """Return as many rows as ``room`` bytes hold, beginning after those that went last time.

        Args:
            first: rows that go before the others, each time, until they take half of the room.
            room: bytes; a row that is longer than that never goes.
        """
        taken: list[T] = []
        left = room
        for row in first:
            size = _nbytes(row)
            if left > room // 2 and size <= left:
                taken.append(row)
                left -= size
        begin = self._turn % max(len(rest), 1)
        for place, row in enumerate((*rest[begin:], *rest[:begin])):
            size = _nbytes(row)
            if left < size <= room:
                self._turn = begin + max(place, 1)
                break
            if size <= room:
                taken.append(row)
                left -= size
        return taken


CountRows = list[tuple[str, NodeCounts]]


def rows_of(counts: dict[str, CountsWire]) -> tuple[CountRows, CountRows]:
    """Return counts as short rows (lineage, node's counts): each node's newest boots, and what remains.

    A node's counters may be told in parts: each part says of its boots what the whole says.
    """
    newest: CountRows = []
    older: CountRows = []
    for lineage, wire in counts.items():
        for node in wire.nodes:
            if len(node.boots) <= BOOTS_A_ROW:
                newest.append((lineage, node))
                continue
            newest.append((lineage, _part(node, node.boots[-BOOTS_A_ROW:])))
            earlier = node.boots[:-BOOTS_A_ROW]
            for at in range(0, len(earlier), BOOTS_A_ROW):
                older.append((lineage, _part(node, earlier[at : at + BOOTS_A_ROW])))
    return newest, older


def by_table(rows: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Group rows by their table."""
    tables: dict[str, list[T]] = {}
    for table, row in rows:
        tables.setdefault(table, []).append(row)
    return tables


def _part(node: NodeCounts, boots: tuple[tuple[int, Counts], ...]) -> NodeCounts:
    return msgspec.structs.replace(node, boots=boots)


def _nbytes(row: object) -> int:
    return len(msgspec.msgpack.encode(row))


class MetricsExchange(msgspec.Struct, frozen=True):
    """One side's part of a round."""

    reports: list[PeerReport]
    counts: dict[str, CountsWire]
    """By lineage: some 60 bytes for every node ever heard of, at a period that grows with them."""
    moments: dict[str, list[object]]
    holds: dict[str, object]
    """Which moments the sender holds, so that the answer brings only newer ones."""


class MetricsGossip:
    """The table of reports and the loop that spreads it; ``on_round`` is called after each round of ours."""

    def __init__(
        self,
        *,
        me: str,
        transport: Transport,
        progress_tracker: ProgressTracker,
        clock: Clock,
        rng: random.Random,
        alive: Callable[[], dict[str, Address]],
        make_report: Callable[[], PeerReport],
        on_round: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._progress_tracker = progress_tracker
        self._clock = clock
        self._rng = rng
        self._alive = alive
        self._make_report = make_report
        self._on_round = on_round
        self._me = me
        self._counts_budget = GossipBudget()
        self._moments_budget = GossipBudget()
        self._holds_budget = GossipBudget()
        self.table = ReportTable(me)

    async def run(self) -> None:
        """Gossip for ever."""
        while True:
            own = self.refresh()
            alive = self._alive()
            chosen = self._rng.sample(sorted(alive), min(FAN_OUT, len(alive)))
            await asyncio.gather(*(self.tell(peer, alive[peer]) for peer in chosen))
            self._on_round()
            seconds = period_s(len(alive) + 1, paused=own.state == "paused")
            await asyncio.sleep(seconds * self._rng.uniform(0.9, 1.1))

    def refresh(self) -> PeerReport:
        """Put our own newest report into the table; return it."""
        report = self._make_report()
        self.table.put(report, self._clock.monotonic())
        return report

    async def tell(self, peer: str, address: Address) -> bool:
        """Do one round with ``peer``; return whether it answered."""
        meta = msgspec.msgpack.encode(self._compose(None))
        try:
            answer = await self._transport.call(address, peer, ROUTE, meta, deadline_s=DEADLINE_S)
            self._merge(answer.meta)
        except TransportError:
            return False
        return True

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's round."""
        try:
            said = self._compose(self._merge(incoming.meta).holds)
        except WireError as error:
            raise Refusal(400, str(error)) from error
        return Reply(msgspec.msgpack.encode(said))

    def _compose(self, peer_holds: dict[str, object] | None) -> MetricsExchange:
        reports = self.table.outgoing(self._clock.monotonic(), REPORTS)
        room = MESSAGE_BYTES - len(msgspec.msgpack.encode(reports))
        first = {report.id: place for place, report in enumerate(reports, 1)} | {self._me: 0}
        counts = self._counts(first, room // 3)
        holds = _share(self._holds_budget, self._progress_tracker.moments_digest(), first, room // 3)
        room -= len(msgspec.msgpack.encode((counts, holds)))
        lacks = {} if peer_holds is None else self._progress_tracker.moments_since(peer_holds)
        moments = _share(self._moments_budget, lacks, first, room)
        return MetricsExchange(reports=reports, counts=counts, moments=moments, holds=dict(holds))

    def _counts(self, first: dict[str, int], room: int) -> dict[str, CountsWire]:
        newest, older = rows_of(self._progress_tracker.counts())
        ahead = sorted((row for row in newest if row[1].node in first), key=lambda row: first[row[1].node])
        others = [row for row in newest if row[1].node not in first]
        rows = by_table(self._counts_budget.take(ahead, others + older, room))
        return {lineage: CountsWire(tuple(nodes)) for lineage, nodes in rows.items()}

    def _merge(self, meta: bytes) -> MetricsExchange:
        heard: MetricsExchange = decode(meta, MetricsExchange, "metrics gossip")
        latest_boot = int(self._clock.wall() * 1000) + BOOT_AHEAD_MS
        self.table.merge(heard.reports, self._clock.monotonic(), latest_boot=latest_boot)
        self._progress_tracker.merge_counts(heard.counts, latest_boot=latest_boot)
        self._progress_tracker.merge_moments(heard.moments, latest_boot=latest_boot)
        return heard


def _share(
    budget: GossipBudget, tables: dict[str, list[Any]], first: dict[str, int], room: int
) -> dict[str, list[Any]]:
    """Return what ``room`` bytes hold of rows that begin with their node's id."""
    rows = [(name, row) for name, rows in tables.items() for row in rows]
    ahead = sorted((row for row in rows if row[1][0] in first), key=lambda row: first[row[1][0]])
    others = [row for row in rows if row[1][0] not in first]
    return by_table(budget.take(ahead, others, room))
