"""The board: the one meeting point of a learner process and its daemon, in shared memory.

    learner                               daemon
    ───────                               ──────
    take()      ◄── slot ◄── flush() ◄──  post_delta(mixed - now), post_set(vector)
    publish()   ──► published ──────────► now(out) = published + what was posted and isn't in it

A slot's content has an id, and a publication says up to which id it contains; so each content is applied
exactly once, also when the learner is killed at any point and another takes its place. The slot is never
rewritten before a publication contains it. Neither side ever waits for the other.

**The delta rule.** ``now = published + everything posted that it doesn't contain yet``. An exchange reads
`DaemonBoard.now`, mixes it with the peer's and posts ``mixed - now``. With ``mixed - published`` two
exchanges between two publications would correct the same difference twice, and the swarm diverges.

What is posted goes into the one slot; while the slot is in use (until a publication contains it) more is
gathered privately and moved by `DaemonBoard.flush`. The learner's loop is ``take`` → apply → update →
``publish``: one that dies before it has published what it took leaves that to its successor.

The memory, each section from a multiple of 64 bytes on:

    header | published vector x2 | published sidecar x2 | slot vector | slot sidecar

What is published is kept twice (`SeqLock`), so a learner that is killed while it publishes leaves the
publication before whole.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.

Example:
    >>> import numpy as np
    >>> from p2pdrl.tensors.layout import Layout, TensorEntry
    >>> from p2pdrl.tensors.shared_memory import SharedRegion
    >>> spec = BoardSpec(Layout((TensorEntry("w", (2,)),)))
    >>> region = SharedRegion.create(spec.nbytes, "board")
    >>> learner, daemon = LearnerBoard(region, spec), DaemonBoard(region, spec)
    >>> learner.publish(np.array([1, 2], np.float32), None, policy_version=1)
    >>> daemon.post_delta(np.array([0.5, 0], np.float32), policy_version=4)
    True
    >>> now = np.empty(2, np.float32)
    >>> daemon.now(now).policy_version, now.tolist()
    (4, [1.5, 2.0])
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, TensorError, WireError
from p2pdrl.tensors.layout import Float32Array, Layout, check_vector
from p2pdrl.tensors.shared_memory import SeqLock, SharedRegion, fence
from p2pdrl.tensors.sidecar import AnyArray, SidecarLayout
from p2pdrl.tensors.wire import WALK, spans

__all__ = ["BoardSpec", "DaemonBoard", "InboxSlot", "LearnerBoard", "Restored", "Snapshot", "Taken"]

T = TypeVar("T")

ATTEMPTS = 2
"""Readings in which pieces are worked on at once, before they are read first."""

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
    """Everything a process needs to open a board, besides the descriptor."""

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
class _Published:
    """Facts of one publication.

    Attributes:
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


class _BoardMemory:
    """Views into the region, and the rules in which order its words are read and written.

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

    def published(self, copy: int) -> _Published:
        """Read the facts of a copy; meaningful inside `SeqLock.read` or for the writer itself."""
        return _Published(*(int(word) for word in self._facts[copy]))

    def publish(
        self, facts: _Published, vector: Float32Array, sidecar: Mapping[str, AnyArray] | None
    ) -> None:
        """Write the next publication; without a sidecar the one before stays."""
        with self.lock.write() as copy:
            self._facts[copy][:] = (facts.policy_version, facts.delta_id, facts.sidecar_number)
            np.copyto(self.vectors[copy], vector)
            if sidecar is not None:
                self.spec.sidecar.write(sidecar, self.sidecars[facts.sidecar_number % 2])

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


class _BoardState(NamedTuple):
    """The facts that decide what is in the vector as it is now.

    Args:
        slot: what was put into the slot last.
        gathered: what waits for the slot.
    """

    facts: _Published
    slot: InboxSlot
    gathered: InboxSlot

    @property
    def in_slot(self) -> int:
        """Kind of the slot's content that the publication lacks; `NOTHING` means that the slot is free."""
        return self.slot.kind if self.slot.id > self.facts.delta_id else NOTHING

    @property
    def policy_version(self) -> int:
        """Policy version of `DaemonBoard.now`: a set's replaces it, a delta's raises it."""
        version = self.facts.policy_version
        for kind, content in ((self.in_slot, self.slot), (self.gathered.kind, self.gathered)):
            if kind == SET:
                version = content.policy_version
            elif kind == DELTA:
                version = max(version, content.policy_version)
        return version


class Taken(NamedTuple):
    """What the daemon posted.

    Args:
        kind: ``delta`` is added to the learner's vector, ``set`` replaces it.
        vector: a view, valid until the next `LearnerBoard.publish`.
        policy_version: the learner's version becomes the greater of the two (delta), or this one (set).
        sidecar: views, valid as long, that replace the learner's sidecar; None leaves it alone.
        id: of the slot's content.
    """

    kind: Literal["delta", "set"]
    vector: Float32Array
    policy_version: int
    sidecar: dict[str, AnyArray] | None
    id: int


class Restored(NamedTuple):
    """What was last published, for a learner that starts; views, valid until the next publication."""

    vector: Float32Array
    sidecar: dict[str, AnyArray] | None
    policy_version: int


class LearnerBoard:
    """The one writer of what is published. One learner at a time opens a region.

    Raises:
        LayoutMismatchError: the region holds a board of another spec.
    """

    def __init__(self, region: SharedRegion, spec: BoardSpec) -> None:
        self._memory = _BoardMemory(region, spec)
        self._facts = _Published(policy_version=0, delta_id=0, sidecar_number=0)
        if self._memory.lock.writes:
            self._facts = self._memory.published(self._memory.lock.writes % 2)
        self._taken_id = self._facts.delta_id

    @property
    def taken_id(self) -> int:
        """Id of the last content that was taken; contents are taken in the order of their ids."""
        return self._taken_id

    def publish(
        self, flat: Float32Array, sidecar: Mapping[str, AnyArray] | None, policy_version: int
    ) -> None:
        """Copy the learner's vector out, as one that contains everything taken so far.

        The sidecar has every item of its layout; None leaves the one published before in place.

        Raises:
            LayoutMismatchError: the vector or the sidecar isn't as the spec says; nothing is published.
        """
        memory = self._memory
        check_vector(flat, memory.spec.layout.size, "the learner's vector")
        number = self._facts.sidecar_number
        if sidecar is not None:
            memory.spec.sidecar.check(sidecar)
            number += 1
        facts = _Published(policy_version, self._taken_id, number)
        memory.publish(facts, flat, sidecar)
        self._facts = facts

    def take(self) -> Taken | None:
        """Return what the daemon posted since the last one that was taken, or None."""
        slot = self._memory.slot()
        if slot.id <= self._taken_id:
            return None
        self._taken_id = slot.id
        return Taken(
            "set" if slot.kind == SET else "delta",
            self._memory.slot_vector,
            slot.policy_version,
            self._memory.slot_sidecar if slot.has_sidecar else None,
            slot.id,
        )

    def restore(self) -> Restored | None:
        """Return what was last published (or seeded), or None when nothing was.

        Call it before the first `take`: a posted content that the publication lacks is taken again.
        """
        writes, number = self._memory.lock.writes, self._facts.sidecar_number
        if writes == 0:
            return None
        return Restored(
            self._memory.vectors[writes % 2],
            self._memory.sidecars[number % 2] if number else None,
            self._facts.policy_version,
        )


_NONE_PUBLISHED = _Published(policy_version=0, delta_id=0, sidecar_number=0)
_NOTHING_GATHERED = InboxSlot(id=0, kind=NOTHING, policy_version=0, has_sidecar=False)


class Snapshot(NamedTuple):
    """What a vector that was read from the board is.

    Args:
        policy_version: of that vector.
        published_version: of the learner's last publication, without what was posted since.
        publications: how many publications there have been; a learner that works raises it.
        sets: how many sets have been posted; see `DaemonBoard.post_delta`.
    """

    policy_version: int
    published_version: int
    publications: int
    sets: int


class DaemonBoard:
    """The one writer of the slot. All methods may be called from any thread.

    Vectors are copied under a lock, which may take long. Properties never wait for it, so they may be read
    on an event loop while a thread copies; they tell what holds before that copy or after it.

    Raises:
        LayoutMismatchError: the region holds a board of another spec.
    """

    def __init__(self, region: SharedRegion, spec: BoardSpec) -> None:
        self._memory, self.spec = _BoardMemory(region, spec), spec
        self._lock = threading.Lock()
        self._sets = 0
        self._content_id = self._memory.slot().id
        # What waits for the slot to become free; the system gives it memory once it is first touched.
        self._gathered = _NOTHING_GATHERED
        self._gathered_vector: Float32Array = np.empty(spec.layout.size, np.float32)
        self._gathered_sidecar: dict[str, AnyArray] | None = None

    @property
    def published_once(self) -> bool:
        """Whether there is a vector to read at all."""
        return self._memory.lock.writes > 0

    @property
    def policy_version(self) -> int:
        """Policy version of the vector that `now` would give."""
        return self._state().policy_version

    @property
    def sets(self) -> int:
        """How many sets have been posted; see `Snapshot`."""
        return self._sets

    @property
    def pending(self) -> bool:
        """Whether something waits for `flush`."""
        return self._gathered.kind != NOTHING

    @property
    def content_id(self) -> int:
        """Id that the newest posted content has, or will have once it is flushed; 0 when there was none."""
        return self._content_id

    @property
    def absorbed(self) -> bool:
        """Whether the learner's last publication contains everything that was posted."""
        state = self._state()
        return state.gathered.kind == NOTHING and state.in_slot == NOTHING

    def now(self, out: Float32Array, each: Callable[[slice], None] | None = None) -> Snapshot:
        """Write the vector as it is now into ``out``: published, and what was posted and isn't in it.

        ``each`` is called with each piece that was written, while it is in the processor's cache; it may
        change that piece of ``out``. A learner that publishes meanwhile may have it all done again, and one
        that does so again and again has the pieces read first, for that is faster.

        Raises:
            TensorError: nothing has been published, seeded or set yet.
        """
        memory = self._memory
        check_vector(out, memory.spec.layout.size, "the output")
        with self._lock:
            state = self._state()
            if state.gathered.kind == SET:
                _write_sum(out, [self._gathered_vector], each)
                return self._snapshot(state.policy_version, state.facts)
            later = [self._gathered_vector] if state.gathered.kind == DELTA else []
            if state.in_slot == SET:
                _write_sum(out, [memory.slot_vector, *later], each)
                return self._snapshot(state.policy_version, state.facts)

            def sum_up(copy: int, each: Callable[[slice], None] | None = None) -> _BoardState:
                seen = state._replace(facts=memory.published(copy))
                posted = [memory.slot_vector] if seen.in_slot == DELTA else []
                _write_sum(out, [memory.vectors[copy], *posted, *later], each)
                return seen

            seen = None
            if each is not None:
                seen = memory.lock.read(lambda copy: sum_up(copy, each), ATTEMPTS)
            if seen is None:
                seen = _readable(memory.lock.read(sum_up))
                if each is not None:
                    for span in spans(out.size, WALK):
                        each(span)
            return self._snapshot(seen.policy_version, seen.facts)

    def published(self, out: Float32Array) -> Snapshot:
        """Write what the learner last published into ``out``.

        Raises:
            TensorError: nothing has been published or seeded yet.
        """
        check_vector(out, self._memory.spec.layout.size, "the output")
        with self._lock:
            facts = self._read_published(out)
            return self._snapshot(facts.policy_version, facts)

    def sidecar(self) -> dict[str, AnyArray] | None:
        """Return copies of the sidecar that belongs to `now`; None when there never was one."""
        memory = self._memory
        with self._lock:
            if self._gathered_sidecar is not None:
                return _copies(self._gathered_sidecar)
            state = self._state()
            if state.in_slot and state.slot.has_sidecar:
                return _copies(memory.slot_sidecar)

            def copy_of(copy: int) -> dict[str, AnyArray] | None:
                number = memory.published(copy).sidecar_number
                return _copies(memory.sidecars[number % 2]) if number else None

            return memory.lock.read(copy_of)

    def seed(self, vector: Float32Array, sidecar: Mapping[str, AnyArray] | None, policy_version: int) -> None:
        """Publish in the learner's place, before there is a learner; it then starts from this.

        Raises:
            TensorError: something has been published already; use `post_set`.
            LayoutMismatchError: the vector or the sidecar isn't as the spec says.
        """
        memory = self._memory
        check_vector(vector, memory.spec.layout.size, "the seed")
        if sidecar is not None:
            memory.spec.sidecar.check(sidecar)
        with self._lock:
            if memory.lock.writes:
                raise TensorError("the board has a publication already; post a set instead of seeding it")
            number = 0 if sidecar is None else 1
            memory.publish(_Published(policy_version, delta_id=0, sidecar_number=number), vector, sidecar)

    def post_delta(self, delta: Float32Array, policy_version: int, *, sets: int | None = None) -> bool:
        """Give the learner ``mixed - now`` to add; tell whether it was, or was dropped.

        Args:
            delta: copied before this returns.
            policy_version: the greater of the two peers' versions.
            sets: ``Snapshot.sets`` of the `now` that was mixed. When a set has been posted since, the
                delta belongs to a vector that is gone, and is dropped.
        """
        check_vector(delta, self._memory.spec.layout.size, "the delta")
        with self._lock:
            if sets is not None and sets != self._sets:
                return False
            if self._gathered.kind == NOTHING:
                self._post(InboxSlot(0, DELTA, policy_version, has_sidecar=False), delta, None)
            else:
                np.add(self._gathered_vector, delta, out=self._gathered_vector)
                version = max(self._gathered.policy_version, policy_version)
                self._gathered = replace(self._gathered, policy_version=version)
                self._flush()
            self._count()
            return True

    def post_set(
        self, vector: Float32Array, sidecar: Mapping[str, AnyArray] | None, policy_version: int
    ) -> None:
        """Give the learner a vector that replaces its own and everything posted before.

        Args:
            vector: copied before this returns.
            sidecar: replaces the learner's; None leaves it alone.
            policy_version: becomes the learner's, also when it is lower.
        """
        check_vector(vector, self._memory.spec.layout.size, "the vector to set")
        if sidecar is not None:
            self._memory.spec.sidecar.check(sidecar)
        with self._lock:
            self._sets += 1
            self._post(InboxSlot(0, SET, policy_version, sidecar is not None), vector, sidecar)
            self._count()

    def flush(self) -> bool:
        """Move what was gathered privately into the slot, if the slot is free."""
        if not self.pending:
            return False
        with self._lock:
            return self._flush()

    def _post(self, what: InboxSlot, vector: Float32Array, sidecar: Mapping[str, AnyArray] | None) -> None:
        """Put a content into the slot if that is free, else in place of what was gathered."""
        if not self._state().in_slot:
            self._fill(what, vector, sidecar)
            return
        np.copyto(self._gathered_vector, vector)
        self._gathered_sidecar = None if sidecar is None else _copies(sidecar)
        self._gathered = what

    def _flush(self) -> bool:
        if self._gathered.kind == NOTHING or self._state().in_slot:
            return False
        self._fill(self._gathered, self._gathered_vector, self._gathered_sidecar)
        return True

    def _fill(self, what: InboxSlot, vector: Float32Array, sidecar: Mapping[str, AnyArray] | None) -> None:
        """Write the free slot; nothing is gathered any more then."""
        memory = self._memory
        np.copyto(memory.slot_vector, vector)
        if sidecar is not None:
            memory.spec.sidecar.write(sidecar, memory.slot_sidecar)
        memory.write_slot(InboxSlot(memory.slot().id + 1, what.kind, what.policy_version, what.has_sidecar))
        self._gathered = _NOTHING_GATHERED
        self._gathered_sidecar = None

    def _count(self) -> None:
        self._content_id = self._memory.slot().id + int(self.pending)

    def _state(self) -> _BoardState:
        """What is published, in the slot and gathered; right also while another thread posts or flushes.

        What was gathered may reach the slot meanwhile, and is then seen twice, which changes nothing. A slot
        that no publication contained after it was read was in use all the time, so its words belong
        together. Where both were filled anew meanwhile, it is all read again.
        """
        while True:
            gathered, slot = self._gathered, self._memory.slot()
            facts = self._facts()
            if self._gathered is gathered and self._memory.slot().id == slot.id:
                return _BoardState(facts, slot, gathered)

    def _facts(self) -> _Published:
        if not self.published_once:
            return _NONE_PUBLISHED
        facts = self._memory.lock.read(self._memory.published)
        if facts is None:
            raise TensorError("the learner publishes faster than the board's header can be read")
        return facts

    def _read_published(self, out: Float32Array) -> _Published:
        memory = self._memory

        def copy_to_out(copy: int) -> _Published:
            np.copyto(out, memory.vectors[copy])
            return memory.published(copy)

        return _readable(memory.lock.read(copy_to_out))

    def _snapshot(self, policy_version: int, facts: _Published) -> Snapshot:
        return Snapshot(policy_version, facts.policy_version, self._memory.lock.writes, self._sets)


def _readable(found: T | None) -> T:
    if found is None:
        raise TensorError(
            "nothing can be read from the board: the learner hasn't published yet (wait for it or seed "
            "the board), or publishes faster than its vector can be copied"
        )
    return found


def _write_sum(out: Float32Array, terms: list[Float32Array], each: Callable[[slice], None] | None) -> None:
    """Write the sum of ``terms`` into ``out``: piece by piece where there is more to do with each."""
    first, *others = terms
    for span in spans(out.size, out.size if each is None else WALK):
        piece = out[span]
        np.copyto(piece, first[span])
        for other in others:
            np.add(piece, other[span], out=piece)
        if each is not None:
            each(span)


def _copies(sidecar: Mapping[str, AnyArray]) -> dict[str, AnyArray]:
    return {name: value.copy() for name, value in sidecar.items()}
