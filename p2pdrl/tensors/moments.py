"""Running count, mean and M2 of a stream, and their merge over nodes without counting anything twice.

A normaliser's statistics can't be averaged like parameters: a merge of two merges would count the shared
past twice. So each (node, boot) keeps counters of its own samples only, which grow; peers swap those, the
one with the greater count wins, and the sum over the table is formed anew each time it is needed. Each entry
comes with a proof that its node has made it, which is opaque here.

Used by the learner's normalisers (own and others' moments) and by the exchanges that carry them.

Chan, Golub, LeVeque 1983, "Algorithms for computing the sample variance", eq. 2.1.

Shapes: a batch is (B, *X), B samples of the stream's shape X; mean and M2 are of shape X.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.ids import is_node_id
from p2pdrl.tensors.layout import check_rows, check_shape
from p2pdrl.tensors.sidecar import AnyArray

__all__ = ["Admit", "Float64Array", "Moments", "MomentsTable"]

Float64Array = npt.NDArray[np.float64]

_MAX_ELEMENTS = 1 << 20
# Bounds on what a peer may send, chosen so that no merge of admitted moments overflows a float64.
_MAX_COUNT, _MAX_MEAN, _MAX_M2 = 2.0**53, 1e100, 1e250
_PLAUSIBLE = 1e6

EPSILON = 1e-8
"""Added to the variance: a constant input gives zero, not a division by zero."""


@dataclass
class Moments:
    """Count, mean and sum of squared deviations of the samples seen.

    Args:
        m2: sum of (sample - mean)², float64, of the same shape.
    """

    count: float
    mean: Float64Array
    m2: Float64Array

    @classmethod
    def zeros(cls, shape: tuple[int, ...]) -> Moments:
        """Moments of no samples yet."""
        return cls(0.0, np.zeros(shape), np.zeros(shape))

    @property
    def var(self) -> Float64Array:
        """Population variance M2 / count; ones before the first sample, so that dividing is harmless."""
        return self.m2 / self.count if self.count > 0 else np.ones_like(self.m2)

    @property
    def standardization(self) -> tuple[Float64Array, Float64Array] | None:
        """What is subtracted from samples, and what they are multiplied by then; None before two samples."""
        return None if self.count < 2 else (self.mean, 1.0 / np.sqrt(self.var + EPSILON))

    @property
    def plausible(self) -> bool:
        """Whether means and deviations are at most 1e6, as those of any sensible stream are.

        Cumulative counters never forget, so what is beyond that had better not be counted in at all.
        """
        return bool(np.abs(self.mean).max() <= _PLAUSIBLE and self.var.max() <= _PLAUSIBLE**2)

    def copy(self) -> Moments:
        """Moments of their own memory."""
        return Moments(self.count, self.mean.copy(), self.m2.copy())

    def update(self, batch: AnyArray) -> None:
        """Count a batch of samples in, in place; those that aren't finite, or beyond 1e100, are left out.

        An environment that gives infinity or NaN once would otherwise spoil the counters for good.
        """
        if batch.ndim < 1 or batch.shape[1:] != self.mean.shape:
            raise LayoutMismatchError(f"expected samples of shape {self.mean.shape}, not {batch.shape[1:]}")
        if len(batch) == 0:
            return
        samples = np.asarray(batch, np.float64)
        if not np.abs(samples).max(initial=0.0) <= _MAX_MEAN:  # NaN isn't either
            rows = np.abs(samples.reshape(len(samples), -1))
            samples = samples[(rows <= _MAX_MEAN).all(axis=1)]
            if len(samples) == 0:
                return
        mean = np.asarray(samples.mean(axis=0))
        m2 = np.asarray(np.square(samples - mean).sum(axis=0))
        self.add(float(len(samples)), mean, m2)

    @classmethod
    def merge(cls, parts: Iterable[Moments]) -> Moments:
        """Moments of the union of disjoint sets of samples; the parts stay as they are."""
        total: Moments | None = None
        for part in parts:
            if total is None:
                total = part.copy()
                continue
            if part.mean.shape != total.mean.shape:
                raise LayoutMismatchError(
                    f"moments of shapes {part.mean.shape} and {total.mean.shape} can't merge"
                )
            total.add(part.count, part.mean, part.m2)
        if total is None:
            raise ValueError("no moments to merge")
        return total

    def to_wire(self) -> list[object]:
        """Return msgpack types: ``[count, shape, mean, m2]``, the arrays as little-endian float64 bytes."""
        return [
            self.count,
            list(self.mean.shape),
            self.mean.astype("<f8").tobytes(),
            self.m2.astype("<f8").tobytes(),
        ]

    @classmethod
    def from_wire(cls, obj: object) -> Moments:
        """Rebuild moments from what `to_wire` made.

        Raises:
            WireError: it isn't of that form, or a value is not finite or out of bounds.
        """
        if not isinstance(obj, (list, tuple)) or len(obj) != 4:
            raise WireError("moments: expected count, shape, mean and m2")
        count, raw_shape, mean_bytes, m2_bytes = obj
        shape = check_shape(raw_shape)
        elements = math.prod(shape)
        if any(n < 1 for n in shape) or elements > _MAX_ELEMENTS:
            raise WireError(f"moments: a shape of 1 to {_MAX_ELEMENTS} elements was expected, not {shape}")
        if type(count) not in (int, float) or not 0 <= count <= _MAX_COUNT:
            raise WireError("moments: the count is out of bounds")
        mean, m2 = (_array(raw, shape, elements) for raw in (mean_bytes, m2_bytes))
        if not (np.abs(mean).max() <= _MAX_MEAN and m2.min() >= 0 and m2.max() <= _MAX_M2):
            raise WireError("moments: a mean or M2 is out of bounds")
        return cls(float(count), mean, m2)

    def add(self, count: float, mean: Float64Array, m2: Float64Array) -> None:
        """Count other samples in, in place, by their own moments."""
        if count <= 0:
            return
        total = self.count + count
        delta = mean - self.mean
        self.mean += delta * (count / total)
        self.m2 += m2 + np.square(delta) * (self.count * count / total)
        self.count = total


def _array(raw: object, shape: tuple[int, ...], elements: int) -> Float64Array:
    if not isinstance(raw, bytes) or len(raw) != 8 * elements:
        raise WireError(f"moments: expected {elements} float64")
    return np.frombuffer(raw, "<f8").reshape(shape).astype(np.float64)


Admit = Callable[[str, int, Moments, bytes, bytes], bool]
"""Whether a peer's entry may be taken in: node, boot, moments, what is to be proven, and the proof."""
MAX_PROOF_BYTES = 128
Digest = list[list[object]]

_MAX_BOOT = 1 << 63


class MomentsTable:
    """One stream's moments of every node that was ever heard of.

    One entry per node: the moments of all samples of its life, with the boot that told them. A node that
    starts again goes on from its earlier boots' entry (from its checkpoint, or as peers still have it), so
    that an entry only ever grows. Merging keeps, for each node, the entry with the greater count. That is
    idempotent, commutative and associative (a state-based CRDT), so a repeated, late or reordered exchange
    never counts a sample twice. Where a node came back with less than peers had heard of, the greater count
    stays until the node has passed it: a lower bound of what it really saw.

    An exchange sends `digest`, is answered by `delta_since`, and puts what comes. Of the owner they tell what
    `tell_own` proved last.

    Args:
        owner: id of the node that keeps this table; what others say about its present boot is ignored.
        capacity: entries kept beside the owner's; beyond it the one that changed longest ago goes.
    """

    def __init__(
        self, shape: tuple[int, ...], owner: str = "", boot: int = 0, *, capacity: int = 4096
    ) -> None:
        self._shape = shape
        self._owner = owner
        self._boot = boot
        self._capacity = capacity
        self._entries: OrderedDict[str, tuple[int, Moments, bytes]] = OrderedDict()
        """Boot, moments and proof; the owner's, if any, is that of its earlier boots."""
        self._own = Moments.zeros(shape)
        self._told: tuple[int, Moments, bytes] | None = None
        """What the owner tells of itself."""

    def __len__(self) -> int:
        return len(self._now())

    def put_own(self, moments: Moments) -> bool:
        """Keep a copy of what the owner saw in this boot if it is more than before; tell whether it is."""
        self._check(moments)
        if moments.count <= self._own.count:
            return False
        self._own = moments.copy()
        return True

    def tell_own(self, prove: Callable[[bytes], bytes]) -> None:
        """From now on tell others what the owner has seen by now, if that is more than before."""
        entry = self._now().get(self._owner)
        if entry is None or (self._told is not None and entry[1].count <= self._told[1].count):
            return
        boot, moments = entry[0], entry[1].copy()
        self._told = (boot, moments, prove(_body(boot, moments)))

    def merge(self, entries: object, admit: Admit | None = None) -> int:
        """Take in what a peer's `delta_since` made, and return how much of it was news.

        A broken answer changes nothing. ``admit`` says which entries may be taken in, asked of what is news;
        None takes all.

        Raises:
            WireError: it isn't of that form.
        """
        news = 0
        for node, boot, moments, proof in self._read(entries):
            if self._is_news(node, boot, moments) and (
                admit is None or admit(node, boot, moments, _body(boot, moments), proof)
            ):
                self._put(node, boot, moments, proof)
                news += 1
        return news

    def counts(self, entries: object = ()) -> dict[str, float]:
        """How many samples each node has counted, as far as held or told by what a peer made.

        Raises:
            WireError: ``entries`` aren't of that form.
        """
        counts = {node: entry[1].count for node, entry in self._now().items()}
        for node, _, moments, _ in self._read(entries):
            counts[node] = max(counts.get(node, 0.0), moments.count)
        return counts

    def others(self) -> Moments:
        """Moments of all samples but those of the owner's present boot: what its learner adds to its own."""
        return self._sum(self._entries)

    def total(self) -> Moments:
        """Moments of all samples."""
        return self._sum(self._now())

    def digest(self) -> Digest:
        """Return plain JSON types that say what is held: ``[[node, boot, count], …]``."""
        return [[node, boot, moments.count] for node, (boot, moments, _) in self._tellable().items()]

    def delta_since(self, digest: object) -> list[list[object]]:
        """Return what a peer with ``digest`` lacks, in msgpack types: ``[[node, boot, moments, proof], …]``.

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
            [node, boot, moments.to_wire(), proof]
            for node, (boot, moments, proof) in self._tellable().items()
            if moments.count > held.get(node, 0)
        ]

    def _read(self, entries: object) -> list[tuple[str, int, Moments, bytes]]:
        checked = []
        for row in check_rows(entries, self._capacity + 1, width=4, what="moments table"):
            if not isinstance(row[3], bytes) or len(row[3]) > MAX_PROOF_BYTES:
                raise WireError("moments table: expected a proof")
            checked.append((*_key(row[0], row[1]), Moments.from_wire(row[2]), row[3]))
            self._check(checked[-1][2])
        return checked

    def _is_news(self, node: str, boot: int, moments: Moments) -> bool:
        if node == self._owner and boot >= self._boot:
            return False
        held = self._entries.get(node)
        return moments.count > (held[1].count if held else 0)

    def _put(self, node: str, boot: int, moments: Moments, proof: bytes) -> None:
        self._entries[node] = (boot, moments, proof)
        self._entries.move_to_end(node)
        if len(self._entries) > self._capacity:
            del self._entries[next(other for other in self._entries if other != self._owner)]

    def _tellable(self) -> dict[str, tuple[int, Moments, bytes]]:
        """All entries with their proofs, the owner's as it was told last."""
        told = {node: entry for node, entry in self._entries.items() if node != self._owner}
        return told if self._told is None else {**told, self._owner: self._told}

    def _now(self) -> dict[str, tuple[int, Moments, bytes]]:
        """All entries, the owner's with what it saw in this boot."""
        if self._own.count == 0:
            return self._entries
        earlier = self._entries.get(self._owner)
        whole = self._own if earlier is None else Moments.merge((earlier[1], self._own))
        return {**self._entries, self._owner: (self._boot, whole, b"")}

    def _sum(self, entries: dict[str, tuple[int, Moments, bytes]]) -> Moments:
        # Sorted, so that nodes with the same table get the same bits whatever the order of arrival.
        parts: Iterable[Moments] = (entries[node][1] for node in sorted(entries))
        return Moments.merge((Moments.zeros(self._shape), *parts))

    def _check(self, moments: Moments) -> None:
        if moments.mean.shape != self._shape or moments.m2.shape != self._shape:
            raise WireError(
                f"moments of shape {moments.mean.shape} don't belong to a stream of {self._shape}"
            )


def _body(boot: int, moments: Moments) -> bytes:
    return msgspec.msgpack.encode((boot, moments.to_wire()))


def _key(node: object, boot: object) -> tuple[str, int]:
    if (
        not isinstance(node, str)
        or not is_node_id(node)
        or type(boot) is not int
        or not 0 <= boot < _MAX_BOOT
    ):
        raise WireError("moments table: expected a node id and a boot id")
    return node, boot
