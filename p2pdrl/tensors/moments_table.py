"""Cumulative moments of every node, swapped between peers until all hold the same table.

There is one entry per node: the moments of all samples of its life, with the boot that told them. A
node that starts again goes on from its earlier boots' entry (from its checkpoint, or as peers still
have it), so boots don't pile up, and an entry only ever grows.

Merging keeps, for each node, the entry with the greater count. That is idempotent, commutative and
associative (a state-based CRDT), so a repeated, late or reordered exchange never counts a sample
twice. Where a node came back with less than peers had heard of, the greater count stays until the
node has passed it: a lower bound of what it really saw.

Used by the exchanges: send `MomentsTable.digest`, answer with `MomentsTable.delta_since`, put what comes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable

from p2pdrl.errors import WireError
from p2pdrl.ids import is_node_id
from p2pdrl.tensors.layout import check_rows
from p2pdrl.tensors.moments import Moments

__all__ = ["Admit", "MomentsTable"]

Admit = Callable[[str, int, Moments], bool]
"""Whether a peer's entry (node, boot, moments) may be taken in."""
Digest = list[list[object]]

_MAX_BOOT = 1 << 63


class MomentsTable:
    """One stream's moments of every node that was ever heard of.

    Args:
        shape: of the stream.
        owner: id of the node that keeps this table; what others say about its present boot is ignored.
        boot: the owner's present boot.
        capacity: entries kept beside the owner's; beyond it the one that changed longest ago goes.
    """

    def __init__(
        self, shape: tuple[int, ...], owner: str = "", boot: int = 0, *, capacity: int = 4096
    ) -> None:
        self._shape = shape
        self._owner = owner
        self._boot = boot
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[int, Moments]] = OrderedDict()
        """The owner's, if any, is that of its earlier boots."""
        self._own = Moments.zeros(shape)

    def __len__(self) -> int:
        return len(self._now())

    def put_own(self, moments: Moments) -> bool:
        """Keep a copy of what the owner saw in this boot, if it is more than before.

        Returns:
            Whether the table changed.

        Raises:
            WireError: the moments are of another shape.
        """
        self._check(moments)
        if moments.count <= self._own.count:
            return False
        self._own = moments.copy()
        return True

    def merge(self, entries: object, admit: Admit | None = None) -> int:
        """Put what a peer's `delta_since` made; a broken answer changes nothing.

        Args:
            entries: as they came.
            admit: says which of them may be taken in; None takes all.

        Returns:
            How many entries were news.

        Raises:
            WireError: it isn't of that form.
        """
        checked = [
            (*_key(row[0], row[1]), Moments.from_wire(row[2]))
            for row in check_rows(entries, self._capacity + 1, width=3, what="moments table")
        ]
        for _, _, moments in checked:
            self._check(moments)
        return sum(self._put(*entry) for entry in checked if admit is None or admit(*entry))

    def others(self) -> Moments:
        """Moments of all samples but those of the owner's present boot: what its learner adds to its own."""
        return self._sum(self._entries)

    def total(self) -> Moments:
        """Moments of all samples."""
        return self._sum(self._now())

    def digest(self) -> Digest:
        """Return plain JSON types that say what is held: ``[[node, boot, count], …]``."""
        return [[node, boot, moments.count] for node, (boot, moments) in self._now().items()]

    def delta_since(self, digest: object) -> list[list[object]]:
        """Return what a peer with ``digest`` lacks, in msgpack types: ``[[node, boot, moments], …]``.

        Raises:
            WireError: it isn't a digest.
        """
        held: dict[str, float] = {}
        for row in check_rows(digest, self._capacity + 1, width=3, what="moments digest"):
            node, _ = _key(row[0], row[1])
            count = row[2]
            if not isinstance(count, int | float) or isinstance(count, bool):
                raise WireError("moments digest: expected counts")
            held[node] = max(held.get(node, 0), count)
        return [
            [node, boot, moments.to_wire()]
            for node, (boot, moments) in self._now().items()
            if moments.count > held.get(node, 0)
        ]

    def _put(self, node: str, boot: int, moments: Moments) -> bool:
        if node == self._owner and boot >= self._boot:
            return False
        held = self._entries.get(node)
        if moments.count <= (held[1].count if held else 0):
            return False
        self._entries[node] = (boot, moments)
        self._entries.move_to_end(node)
        if len(self._entries) > self._capacity:
            del self._entries[next(other for other in self._entries if other != self._owner)]
        return True

    def _now(self) -> dict[str, tuple[int, Moments]]:
        """All entries, the owner's with what it saw in this boot."""
        if self._own.count == 0:
            return self._entries
        earlier = self._entries.get(self._owner)
        whole = self._own if earlier is None else Moments.merge((earlier[1], self._own))
        return {**self._entries, self._owner: (self._boot, whole)}

    def _sum(self, entries: dict[str, tuple[int, Moments]]) -> Moments:
        # Sorted, so that nodes with the same table get the same bits whatever the order of arrival.
        parts: Iterable[Moments] = (entries[node][1] for node in sorted(entries))
        return Moments.merge((Moments.zeros(self._shape), *parts))

    def _check(self, moments: Moments) -> None:
        if moments.mean.shape != self._shape or moments.m2.shape != self._shape:
            raise WireError(
                f"moments of shape {moments.mean.shape} don't belong to a stream of {self._shape}"
            )


def _key(node: object, boot: object) -> tuple[str, int]:
    if (
        not isinstance(node, str)
        or not is_node_id(node)
        or type(boot) is not int
        or not 0 <= boot < _MAX_BOOT
    ):
        raise WireError("moments table: expected a node id and a boot id")
    return node, boot
