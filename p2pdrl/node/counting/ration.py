"""Cuts what a rumour carries to a number of bytes, so that nobody's table can grow it beyond a message.

Some rows go first; the others take turns, so that in time everything gets around.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

import msgspec

from p2pdrl.node.counting.counters import Counts, CountsWire, NodeCounts

__all__ = ["Ration", "by_table", "rows_of"]

BOOTS_A_ROW = 64

T = TypeVar("T")


class Ration:
    """Whose turn it is to be sent."""

    def __init__(self) -> None:
        self._turn = 0

    def take(self, first: Sequence[T], rest: Sequence[T], room: int) -> list[T]:
        """Return as many rows as ``room`` bytes hold, beginning after those that went last time.

        Args:
            first: rows that go before the others, each time, until they take half of the room.
            rest: rows that take turns.
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
    """Return the rows of each table."""
    tables: dict[str, list[T]] = {}
    for table, row in rows:
        tables.setdefault(table, []).append(row)
    return tables


def _part(node: NodeCounts, boots: tuple[tuple[int, Counts], ...]) -> NodeCounts:
    return msgspec.structs.replace(node, boots=boots)


def _nbytes(row: object) -> int:
    return len(msgspec.msgpack.encode(row))
