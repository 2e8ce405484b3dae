"""Spreads each node's report, everybody's counts and normaliser moments, by push-pull gossip.

Apart from membership: a round goes to two random members, and rounds grow rarer as the swarm
grows, so the bytes a node sends a second stay about flat. A message is cut to half of what a peer
takes, whatever others have put into our tables: we and the nodes of the reports that go with it
come first, the others take turns.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.errors import TransportError, WireError
from p2pdrl.node.counting.counters import CountsWire
from p2pdrl.node.counting.digest import FAN_OUT, DigestTable, PeerReport, period_s
from p2pdrl.node.counting.ledger import Ledger
from p2pdrl.node.counting.ration import Ration, by_table, rows_of
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = ["MAX_META_BYTES", "ROUTE", "Rumours"]

ROUTE = "rumours"
MAX_META_BYTES = 1 << 20
SPOKEN_BYTES = MAX_META_BYTES // 2
REPORTS = 12
DEADLINE_S = 2.0
BOOT_AHEAD_MS = 600_000


class Gossip(msgspec.Struct, frozen=True):
    """One side's part of a round."""

    reports: list[PeerReport]
    counts: dict[str, CountsWire]
    """By lineage: some 60 bytes for every node ever heard of, at a period that grows with them."""
    moments: dict[str, list[object]]
    holds: dict[str, object]
    """Which moments the sender holds, so that the answer brings only newer ones."""


class Rumours:
    """The table of reports and the loop that spreads it.

    Args:
        me: own node id.
        transport: how peers are reached; the node routes `ROUTE` to `answer`.
        ledger: counts and moments.
        clock: time.
        rng: source of the random choices.
        alive: the living members, without ourselves.
        make_report: makes our own report.
        on_round: called after each change of the tables.
    """

    def __init__(
        self,
        *,
        me: str,
        transport: Transport,
        ledger: Ledger,
        clock: Clock,
        rng: random.Random,
        alive: Callable[[], dict[str, Address]],
        make_report: Callable[[], PeerReport],
        on_round: Callable[[], None],
    ) -> None:
        self._transport = transport
        self._ledger = ledger
        self._clock = clock
        self._rng = rng
        self._alive = alive
        self._make_report = make_report
        self._on_round = on_round
        self._me = me
        self._counts_ration, self._moments_ration, self._holds_ration = Ration(), Ration(), Ration()
        self.table = DigestTable(me)

    async def run(self) -> None:
        """Go round for ever."""
        while True:
            self.refresh()
            alive = self._alive()
            chosen = self._rng.sample(sorted(alive), min(FAN_OUT, len(alive)))
            await asyncio.gather(*(self.tell(peer, alive[peer]) for peer in chosen))
            self._on_round()
            await asyncio.sleep(period_s(len(alive) + 1) * self._rng.uniform(0.9, 1.1))

    def refresh(self) -> None:
        """Put our own newest report into the table."""
        self.table.put(self._make_report(), self._clock.monotonic())

    async def tell(self, peer: str, address: Address) -> bool:
        """Do one round with ``peer``; return whether it answered."""
        meta = msgspec.msgpack.encode(self._speak(None))
        try:
            answer = await self._transport.call(address, peer, ROUTE, meta, deadline_s=DEADLINE_S)
            self._listen(answer.meta)
        except TransportError:
            return False
        return True

    async def answer(self, incoming: Incoming) -> Reply:
        """Serve a peer's round.

        Raises:
            Refusal: 400 when it can't be read.
        """
        try:
            said = self._speak(self._listen(incoming.meta).holds)
        except WireError as error:
            raise Refusal(400, str(error)) from error
        return Reply(msgspec.msgpack.encode(said))

    def _speak(self, they_hold: dict[str, object] | None) -> Gossip:
        reports = self.table.outgoing(self._clock.monotonic(), REPORTS)
        room = SPOKEN_BYTES - len(msgspec.msgpack.encode(reports))
        first = {report.id: place for place, report in enumerate(reports, 1)} | {self._me: 0}
        counts = self._counts(first, room // 3)
        holds = _share(self._holds_ration, self._ledger.moments_digest(), first, room // 3)
        room -= len(msgspec.msgpack.encode((counts, holds)))
        lacks = {} if they_hold is None else self._ledger.moments_since(they_hold)
        moments = _share(self._moments_ration, lacks, first, room)
        return Gossip(reports=reports, counts=counts, moments=moments, holds=dict(holds))

    def _counts(self, first: dict[str, int], room: int) -> dict[str, CountsWire]:
        newest, older = rows_of(self._ledger.counts())
        ahead = sorted((row for row in newest if row[1].node in first), key=lambda row: first[row[1].node])
        others = [row for row in newest if row[1].node not in first]
        rows = by_table(self._counts_ration.take(ahead, others + older, room))
        return {lineage: CountsWire(tuple(nodes)) for lineage, nodes in rows.items()}

    def _listen(self, meta: bytes) -> Gossip:
        heard: Gossip = decode(meta, Gossip, "rumour")
        latest_boot = int(self._clock.wall() * 1000) + BOOT_AHEAD_MS
        self.table.merge(heard.reports, self._clock.monotonic(), latest_boot=latest_boot)
        self._ledger.merge_counts(heard.counts, latest_boot=latest_boot)
        self._ledger.merge_moments(heard.moments, latest_boot=latest_boot)
        return heard


def _share(
    ration: Ration, tables: dict[str, list[Any]], first: dict[str, int], room: int
) -> dict[str, list[Any]]:
    """Return what ``room`` bytes hold of rows that begin with their node's id."""
    rows = [(name, row) for name, rows in tables.items() for row in rows]
    ahead = sorted((row for row in rows if row[1][0] in first), key=lambda row: first[row[1][0]])
    others = [row for row in rows if row[1][0] not in first]
    return by_table(ration.take(ahead, others, room))
