"""What a board's shared memory holds and where; both ends of the board see it through this one map.

    header | published vector x2 | published sidecar x2 | slot vector | slot sidecar

Every section starts at a multiple of 64 bytes. What is published is kept twice (`shared_memory`), so a
learner that is killed while it publishes leaves the publication before whole. The slot is written by the
daemon only while the learner has no use for it, and its id is written last.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, WireError
from p2pdrl.tensors.layout import Float32Array, Layout
from p2pdrl.tensors.shared_memory import SeqLock, SharedRegion, fence
from p2pdrl.tensors.sidecar import AnyArray, SidecarLayout

__all__ = ["DELTA", "NOTHING", "SET", "BoardMemory", "BoardSpec", "InboxSlot", "Published"]

NOTHING, DELTA, SET = 0, 1, 2
"""Kinds of what a slot holds."""

_MAGIC = 0x70327064_726C3031  # "p2pdrl01"; the last two digits are the version of this map
_HEADER_BYTES = 256
_SECTION_BYTES = 64
# Header words (uint64): identity, the sequence lock, two copies of the publication's facts, the slot's.
_IDENTITY = slice(0, 7)
_LOCK = slice(8, 10)
_FACTS = (slice(16, 19), slice(20, 23))
_SLOT = slice(24, 28)


@dataclass(frozen=True)
class BoardSpec:
    """Everything a process needs to open a board, besides the descriptor.

    Args:
        layout: of the parameter vector.
        sidecar: of the state beside it; empty when there is none.
    """

    layout: Layout
    sidecar: SidecarLayout = field(default_factory=SidecarLayout)

    @property
    def nbytes(self) -> int:
        """Bytes of shared memory that a board of this kind takes."""
        return _HEADER_BYTES + 3 * (_section(4 * self.layout.size) + _section(self.sidecar.nbytes))

    def to_wire(self) -> dict[str, object]:
        """Return plain JSON types."""
        return {"layout": self.layout.to_wire(), "sidecar": self.sidecar.to_wire()}

    @classmethod
    def from_wire(cls, obj: object) -> BoardSpec:
        """Rebuild a spec from what `to_wire` made.

        Raises:
            WireError: it isn't of that form.
            LayoutMismatchError: it is, and breaks a bound.
        """
        if not isinstance(obj, dict) or obj.keys() != {"layout", "sidecar"}:
            raise WireError("a board's spec holds a layout and a sidecar layout")
        return cls(Layout.from_wire(obj["layout"]), SidecarLayout.from_wire(obj["sidecar"]))


@dataclass(frozen=True)
class Published:
    """Facts of one publication.

    Args:
        policy_version: of the published vector.
        delta_id: id of the last slot content that the vector contains.
        sidecar_number: how many sidecars have been published; 0 means none, else it lies in copy
            ``sidecar_number % 2``.
    """

    policy_version: int
    delta_id: int
    sidecar_number: int


@dataclass(frozen=True)
class InboxSlot:
    """Facts of what the daemon last put into the slot.

    Args:
        id: grows by one with each content; 0 means that there never was one.
        kind: `DELTA` or `SET`.
        policy_version: the learner's clock rises to it (delta) or is replaced by it (set).
        has_sidecar: whether a set brings the sidecar too.
    """

    id: int
    kind: int
    policy_version: int
    has_sidecar: bool


class BoardMemory:
    """Views into the region, and the rules in which order its words are read and written.

    Args:
        region: at least ``spec.nbytes`` long; its header is written when it is still blank.
        spec: what the region holds.

    Raises:
        LayoutMismatchError: the region is too small, or holds a board of another spec.
    """

    def __init__(self, region: SharedRegion, spec: BoardSpec) -> None:
        if region.nbytes < spec.nbytes:
            raise LayoutMismatchError(f"the board takes {spec.nbytes} bytes, the region has {region.nbytes}")
        self.spec = spec
        words: npt.NDArray[np.uint64] = np.frombuffer(region.buf, np.uint64, _HEADER_BYTES // 8)
        _identify(words[_IDENTITY], spec)
        self.lock = SeqLock(words[_LOCK])
        self._facts = tuple(words[part] for part in _FACTS)
        self._slot = words[_SLOT]
        vectors, sidecars = _cut(region.buf, spec)
        self.vectors: tuple[Float32Array, ...] = vectors[:2]
        self.sidecars: tuple[dict[str, AnyArray], ...] = sidecars[:2]
        self.slot_vector = vectors[2]
        self.slot_sidecar = sidecars[2]

    def published(self, copy: int) -> Published:
        """Read the facts of a copy; meaningful inside `SeqLock.read` or for the writer itself."""
        return Published(*(int(word) for word in self._facts[copy]))

    def write_published(self, copy: int, facts: Published) -> None:
        """Write the facts of the copy that `SeqLock.write` gave."""
        self._facts[copy][:] = (facts.policy_version, facts.delta_id, facts.sidecar_number)

    def slot(self) -> InboxSlot:
        """Read the slot's facts: the id first, then what it promises."""
        slot_id = int(self._slot[0])
        fence()
        kind, policy_version, has_sidecar = (int(word) for word in self._slot[1:])
        return InboxSlot(slot_id, kind, policy_version, bool(has_sidecar))

    def write_slot(self, slot: InboxSlot) -> None:
        """Write the slot's facts, after its vector and sidecar: the id last."""
        self._slot[1:] = (slot.kind, slot.policy_version, int(slot.has_sidecar))
        fence()
        self._slot[0] = slot.id


def _identify(words: npt.NDArray[np.uint64], spec: BoardSpec) -> None:
    """Write who this board is into a blank header, or check that a written one is of the same spec."""
    digest = bytes.fromhex(spec.layout.hash + spec.sidecar.hash)
    expected = np.array([_MAGIC, spec.layout.size, spec.sidecar.nbytes, 0, 0, 0, 0], np.uint64)
    expected[3:] = np.frombuffer(digest, np.uint64)
    if words[0] == 0:
        words[1:] = expected[1:]
        fence()
        words[0] = expected[0]
    elif not np.array_equal(words, expected):
        raise LayoutMismatchError(
            f"the shared memory holds another board than one of {spec.layout.size} floats, "
            f"layout {spec.layout.hash}"
        )


def _cut(
    buffer: memoryview, spec: BoardSpec
) -> tuple[tuple[Float32Array, ...], tuple[dict[str, AnyArray], ...]]:
    """Return the three vectors and the three sidecars: two published copies each, then the slot's."""
    vector_bytes, sidecar_bytes = _section(4 * spec.layout.size), _section(spec.sidecar.nbytes)
    slot_at = _HEADER_BYTES + 2 * (vector_bytes + sidecar_bytes)
    vectors_at = (_HEADER_BYTES, _HEADER_BYTES + vector_bytes, slot_at)
    sidecars_at = [_HEADER_BYTES + 2 * vector_bytes + n * sidecar_bytes for n in (0, 1)] + [
        slot_at + vector_bytes
    ]
    vectors = tuple(np.frombuffer(buffer, np.float32, spec.layout.size, at) for at in vectors_at)
    sidecars = tuple(spec.sidecar.views(buffer[at : at + spec.sidecar.nbytes]) for at in sidecars_at)
    return vectors, sidecars


def _section(nbytes: int) -> int:
    return -(-nbytes // _SECTION_BYTES) * _SECTION_BYTES
