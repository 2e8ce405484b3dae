"""Spreads each node's report, everybody's counts and moments, by push-pull gossip of bounded size.

All of them are signed by the node that they are about; who passes on what isn't is told of (`refused`).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from p2pdrl.clock import Clock
from p2pdrl.errors import TransportError, WireError
from p2pdrl.node.accounting.facts import ForgedFactError, TooManyFactsError
from p2pdrl.node.accounting.progress_tracker import LineageFacts, ProgressTracker
from p2pdrl.node.accounting.report_table import FAN_OUT, PeerReport, ReportRow, ReportTable, period_s
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = ["MAX_META_BYTES", "ROUTE", "GossipBudget", "MetricsGossip", "by_table"]

ROUTE = "metrics"
MAX_META_BYTES = 1 << 20
MESSAGE_BYTES = MAX_META_BYTES // 2
REPORTS = 12
DEADLINE_S = 2.0
BOOT_AHEAD_MS = 600_000
"""A boot id further in the future isn't believed."""

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


def by_table(rows: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Group rows by their table."""
    tables: dict[str, list[T]] = {}
    for table, row in rows:
        tables.setdefault(table, []).append(row)
    return tables


def _nbytes(row: object) -> int:
    return len(msgspec.msgpack.encode(row))


class MetricsExchange(msgspec.Struct, frozen=True):
    """One side's part of a round."""

    reports: Annotated[list[ReportRow], Meta(max_length=4 * REPORTS)]
    counts: LineageFacts
    """Some 150 bytes for every node ever heard of and lineage, at a period that grows with them."""
    moments: dict[str, list[object]]
    holds: dict[str, object]
    """Which moments the sender holds, so that the answer brings only newer ones."""


MOST_CHECKS = 1000.0
CHECKS_PER_S = 200.0
"""Signatures that one peer may have us check at once, and a second; one takes some 0.3 ms."""


class MetricsGossip:
    """The table of reports and the loop that spreads it.

    Args:
        on_round: called after each round of ours.
        refused: told who passed on what isn't signed by the node that it is about, and what that was.
    """

    def __init__(
        self,
        *,
        transport: Transport,
        progress_tracker: ProgressTracker,
        clock: Clock,
        rng: random.Random,
        alive: Callable[[], dict[str, Address]],
        make_report: Callable[[], PeerReport],
        on_round: Callable[[], None],
        refused: Callable[[str, str], None] = lambda peer, why: None,
    ) -> None:
        self._transport = transport
        self._progress_tracker = progress_tracker
        self._clock = clock
        self._rng = rng
        self._alive = alive
        self._make_report = make_report
        self._on_round = on_round
        self._refused = refused
        self._me = progress_tracker.signer.node_id
        self._counts_budget = GossipBudget()
        self._moments_budget = GossipBudget()
        self._holds_budget = GossipBudget()
        self._checks: dict[str, tuple[float, float]] = {}
        """By peer: how many signatures it might have us check, and when that was."""
        self.table = ReportTable(progress_tracker.signer)

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
        """Sign what is so of ourselves by now, and put our own newest report into the table; return it."""
        report, now_s = self._make_report(), self._clock.monotonic()
        self.table.put(report, now_s)
        self._progress_tracker.sign()
        self._look(now_s)
        return report

    async def tell(self, peer: str, address: Address) -> bool:
        """Do one round with ``peer``; return whether it answered."""
        meta = msgspec.msgpack.encode(self._compose(None))
        try:
            answer = await self._transport.call(address, peer, ROUTE, meta, deadline_s=DEADLINE_S)
            self._merge(answer.meta, peer)
        except TransportError:
            return False
        return True

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's round.

        Raises:
            Refusal: it can't be read (400), or holds what isn't signed by whom it is about (403).
        """
        try:
            said = self._compose(self._merge(incoming.meta, incoming.sender).holds)
        except ForgedFactError as error:
            raise Refusal(403, str(error)) from error
        except WireError as error:
            raise Refusal(400, str(error)) from error
        return Reply(msgspec.msgpack.encode(said))

    def _compose(self, peer_holds: dict[str, object] | None) -> MetricsExchange:
        reports = self.table.outgoing(self._clock.monotonic(), REPORTS)
        rows = [row for _, row in reports]
        room = MESSAGE_BYTES - len(msgspec.msgpack.encode(rows))
        first = {node: place for place, (node, _) in enumerate(reports, 1)} | {self._me: 0}
        counts = self._counts(first, room // 3)
        holds = _share(self._holds_budget, self._progress_tracker.moments_digest(), first, room // 3)
        room -= len(msgspec.msgpack.encode((counts, holds)))
        lacks = {} if peer_holds is None else self._progress_tracker.moments_since(peer_holds)
        moments = _share(self._moments_budget, lacks, first, room)
        return MetricsExchange(reports=rows, counts=counts, moments=moments, holds=dict(holds))

    def _counts(self, first: dict[str, int], room: int) -> LineageFacts:
        rows = [
            (lineage, node, fact)
            for lineage, by_node in self._progress_tracker.facts().items()
            for node, facts in by_node.items()
            for fact in facts
        ]
        ahead = sorted((row for row in rows if row[1] in first), key=lambda row: first[row[1]])
        others = [row for row in rows if row[1] not in first]
        taken = self._counts_budget.take(ahead, others, room)
        return by_table((lineage, fact) for lineage, _, fact in taken)

    def _merge(self, meta: bytes, peer: str) -> MetricsExchange:
        heard: MetricsExchange = decode(meta, MetricsExchange, "metrics gossip")
        now_s = self._clock.monotonic()
        latest_boot = int(self._clock.wall() * 1000) + BOOT_AHEAD_MS
        self._look(now_s)
        tracker = self._progress_tracker
        with tracker.signer.at_most(self._checks_of(peer, now_s)) as left:
            try:
                self.table.merge(heard.reports, now_s, latest_boot=latest_boot)
                tracker.merge_counts(heard.counts, teller=peer, now_s=now_s, latest_boot=latest_boot)
                tracker.merge_moments(heard.moments, latest_boot=latest_boot)
            except ForgedFactError as error:
                self._refused(peer, str(error))
                raise
            except TooManyFactsError:
                pass  # the rest comes again: whoever has it tells it in turn
            finally:
                self._checks[peer] = left(), now_s
        return heard

    def _checks_of(self, peer: str, now_s: float) -> float:
        """How many signatures a peer may have us check now: checking is what costs."""
        full_s = now_s - MOST_CHECKS / CHECKS_PER_S  # who has had us check nothing since may have all again
        self._checks = {one: held for one, held in self._checks.items() if held[1] > full_s}
        left, since_s = self._checks.get(peer, (MOST_CHECKS, now_s))
        return min(MOST_CHECKS, left + CHECKS_PER_S * (now_s - since_s))

    def _look(self, now_s: float) -> None:
        bounds, alive = self._progress_tracker.bounds, self._alive()
        self.table.living = alive.keys()
        if bounds is not None:
            bounds.made(self._progress_tracker.made(), now_s)
            bounds.look(alive, now_s)


def _share(
    budget: GossipBudget, tables: dict[str, list[Any]], first: dict[str, int], room: int
) -> dict[str, list[Any]]:
    """Return what ``room`` bytes hold of rows that begin with their node's id."""
    rows = [(name, row) for name, rows in tables.items() for row in rows]
    ahead = sorted((row for row in rows if row[1][0] in first), key=lambda row: first[row[1][0]])
    others = [row for row in rows if row[1][0] not in first]
    return by_table(budget.take(ahead, others, room))
