"""Cumulative moments per (node, boot), swapped between peers until all hold the same table.

Merging keeps, for each key, the entry with the greater count. That is idempotent, commutative and
associative (a state-based CRDT), so a repeated, late or reordered exchange never counts a sample twice.

Used by the exchanges: send `MomentsTable.digest`, answer with `MomentsTable.delta_since`, put what comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from p2pdrl.errors import WireError
from p2pdrl.ids import is_node_id
from p2pdrl.tensors.layout import check_rows
from p2pdrl.tensors.moments import Moments

__all__ = ["MomentsTable"]

Key = tuple[str, int]
Digest = list[list[object]]

_MAX_BOOT = 1 << 63


class MomentsTable:
    """One stream's moments of every node that was ever heard of.

    Args:
        shape: of the stream.
        capacity: entries kept; beyond it the one that changed longest ago goes.
    """

    def __init__(self, shape: tuple[int, ...], capacity: int = 4096) -> None:
        self._shape = shape
        self._capacity = capacity
        self._entries: OrderedDict[Key, Moments] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def put(self, node: str, boot: int, moments: Moments) -> bool:
        """Keep a copy of ``moments`` if they count more samples than the ones held.

        Returns:
            Whether the table changed.

        Raises:
            WireError: they are of another shape.
        """
        if moments.mean.shape != self._shape or moments.m2.shape != self._shape:
            raise WireError(
                f"moments of shape {moments.mean.shape} don't belong to a stream of {self._shape}"
            )
        held = self._entries.get((node, boot))
        if moments.count <= (held.count if held else 0):
            return False
        self._entries[node, boot] = moments.copy()
        self._entries.move_to_end((node, boot))
        if len(self._entries) > self._capacity:
            self._entries.popitem(last=False)
        return True

    def merge(self, entries: object) -> int:
        """Put what a peer's `delta_since` made; a broken answer changes nothing.

        Returns:
            How many entries were news.

        Raises:
            WireError: it isn't of that form.
        """
        checked = [
            (*_key(row[0], row[1]), Moments.from_wire(row[2]))
            for row in check_rows(entries, self._capacity, width=3, what="moments table")
        ]
        if any(moments.mean.shape != self._shape for _, _, moments in checked):
            raise WireError(f"moments table: expected a stream of shape {self._shape}")
        return sum(self.put(node, boot, moments) for node, boot, moments in checked)

    def others(self, node: str, boot: int) -> Moments:
        """Moments of all samples but those of one (node, boot): what its learner adds to its own."""
        return self._sum(key for key in self._entries if key != (node, boot))

    def total(self) -> Moments:
        """Moments of all samples."""
        return self._sum(self._entries)

    def digest(self) -> Digest:
        """Return plain JSON types that say what is held: ``[[node, boot, count], …]``."""
        return [[node, boot, moments.count] for (node, boot), moments in self._entries.items()]

    def delta_since(self, digest: object) -> list[list[object]]:
        """Return what a peer with ``digest`` lacks, in msgpack types: ``[[node, boot, moments], …]``.

        Raises:
            WireError: it isn't a digest.
        """
        held: dict[Key, float] = {}
        for node, boot, count in check_rows(digest, self._capacity, width=3, what="moments digest"):
            if type(count) not in (int, float):
                raise WireError("moments digest: expected counts")
            held[_key(node, boot)] = float(count)  # type: ignore[arg-type]
        return [
            [*key, moments.to_wire()]
            for key, moments in self._entries.items()
            if moments.count > held.get(key, 0.0)
        ]

    def _sum(self, keys: Iterable[Key]) -> Moments:
        # Sorted, so that nodes with the same table get the same bits whatever the order of arrival.
        parts = (self._entries[key] for key in sorted(keys))
        return Moments.merge((Moments.zeros(self._shape), *parts))


def _key(node: object, boot: object) -> Key:
    if (
        not isinstance(node, str)
        or not is_node_id(node)
        or type(boot) is not int
        or not 0 <= boot < _MAX_BOOT
    ):
        raise WireError("moments table: expected a node id and a boot id")
    return node, boot
