"""The learner's end of the board: publish, take what the daemon posted, and start again after a crash.

Its loop is ``take`` → apply → update → ``publish``. What was taken counts as contained only with the next
publication, so a learner that dies in between is given it again by its successor: exactly once.

Shapes: every vector is flat, of D elements (all parameters); names carry no suffix.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

import numpy as np

from p2pdrl.tensors.board_memory import SET, BoardMemory, BoardSpec, Published
from p2pdrl.tensors.layout import Float32Array, check_vector
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.sidecar import AnyArray

__all__ = ["LearnerBoard", "Restored", "Taken"]


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

    Args:
        region: shared with the daemon.
        spec: the same as the daemon's.

    Raises:
        LayoutMismatchError: the region holds a board of another spec.
    """

    def __init__(self, region: SharedRegion, spec: BoardSpec) -> None:
        self._memory = BoardMemory(region, spec)
        self._facts = Published(policy_version=0, delta_id=0, sidecar_number=0)
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

        Args:
            flat: all parameters.
            sidecar: every item of the sidecar layout; None leaves the one published before in place.
            policy_version: of ``flat``.

        Raises:
            LayoutMismatchError: the vector or the sidecar isn't as the spec says; nothing is published.
        """
        memory = self._memory
        check_vector(flat, memory.spec.layout.size, "the learner's vector")
        number = self._facts.sidecar_number
        if sidecar is not None:
            memory.spec.sidecar.check(sidecar)
            number += 1
        facts = Published(policy_version, self._taken_id, number)
        with memory.lock.write() as copy:
            memory.write_published(copy, facts)
            np.copyto(memory.vectors[copy], flat)
            if sidecar is not None:
                memory.spec.sidecar.write(sidecar, memory.sidecars[number % 2])
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
