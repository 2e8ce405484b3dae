"""The daemon's end of the board: the vector as it is now, and what exchanges post to the learner.

**The delta rule.** ``now = published + everything posted that it doesn't contain yet``. An exchange reads
`DaemonBoard.now`, mixes it with the peer's and posts ``mixed - now``. With ``mixed - published`` two
exchanges between two publications would correct the same difference twice, and the swarm diverges.

What is posted goes into the one slot; while the slot is in use (until a publication contains it) more is
gathered privately and moved by `DaemonBoard.flush`.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import NamedTuple, TypeVar

import numpy as np

from p2pdrl.errors import TensorError
from p2pdrl.tensors.board_memory import DELTA, NOTHING, SET, BoardMemory, BoardSpec, InboxSlot, Published
from p2pdrl.tensors.board_state import BoardState
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.sidecar import AnyArray
from p2pdrl.tensors.wire import WALK, spans

__all__ = ["DaemonBoard", "Snapshot"]

T = TypeVar("T")

ATTEMPTS = 2
"""Readings in which pieces are worked on at once, before they are read first."""

_NONE_PUBLISHED = Published(policy_version=0, delta_id=0, sidecar_number=0)
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

    Args:
        region: shared with the learner, and with the learner's successor after a crash.
        spec: the same as the learner's.

    Raises:
        LayoutMismatchError: the region holds a board of another spec.
    """

    def __init__(self, region: SharedRegion, spec: BoardSpec) -> None:
        self._memory, self.spec = BoardMemory(region, spec), spec
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

        Args:
            out: D float32.
            each: called with each piece that was written, while it is in the processor's cache; it may
                change that piece of ``out``. A learner that publishes meanwhile may have it all done again,
                and one that does so again and again has the pieces read first, for that is faster.

        Raises:
            TensorError: nothing has been published, seeded or set yet.
            LayoutMismatchError: ``out`` isn't a float32 vector of D elements.
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

            def sum_up(copy: int, each: Callable[[slice], None] | None = None) -> BoardState:
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
            LayoutMismatchError: ``out`` isn't a float32 vector of D elements.
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
            with memory.lock.write() as copy:
                memory.write_published(copy, Published(policy_version, delta_id=0, sidecar_number=number))
                np.copyto(memory.vectors[copy], vector)
                if sidecar is not None:
                    memory.spec.sidecar.write(sidecar, memory.sidecars[number % 2])

    def post_delta(self, delta: Float32Array, policy_version: int, *, sets: int | None = None) -> bool:
        """Give the learner ``mixed - now`` to add.

        Args:
            delta: copied before this returns.
            policy_version: the greater of the two peers' versions.
            sets: ``Snapshot.sets`` of the `now` that was mixed. When a set has been posted since, the
                delta belongs to a vector that is gone, and is dropped.

        Returns:
            False when the delta was dropped.

        Raises:
            LayoutMismatchError: ``delta`` isn't a float32 vector of D elements.
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

        Raises:
            LayoutMismatchError: the vector or the sidecar isn't as the spec says.
        """
        check_vector(vector, self._memory.spec.layout.size, "the vector to set")
        if sidecar is not None:
            self._memory.spec.sidecar.check(sidecar)
        with self._lock:
            self._sets += 1
            self._post(InboxSlot(0, SET, policy_version, sidecar is not None), vector, sidecar)
            self._count()

    def flush(self) -> bool:
        """Move what was gathered privately into the slot, if the slot is free.

        Returns:
            Whether something was moved.
        """
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

    def _state(self) -> BoardState:
        """What is published, in the slot and gathered; right also while another thread posts or flushes.

        What was gathered may reach the slot meanwhile, and is then seen twice, which changes nothing. A slot
        that no publication contained after it was read was in use all the time, so its words belong
        together. Where both were filled anew meanwhile, it is all read again.
        """
        while True:
            gathered, slot = self._gathered, self._memory.slot()
            facts = self._facts()
            if self._gathered is gathered and self._memory.slot().id == slot.id:
                return BoardState(facts, slot, gathered)

    def _facts(self) -> Published:
        if not self.published_once:
            return _NONE_PUBLISHED
        facts = self._memory.lock.read(self._memory.published)
        if facts is None:
            raise TensorError("the learner publishes faster than the board's header can be read")
        return facts

    def _read_published(self, out: Float32Array) -> Published:
        memory = self._memory

        def copy_to_out(copy: int) -> Published:
            np.copyto(out, memory.vectors[copy])
            return memory.published(copy)

        return _readable(memory.lock.read(copy_to_out))

    def _snapshot(self, policy_version: int, facts: Published) -> Snapshot:
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
