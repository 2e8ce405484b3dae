"""The process that holds a shard of the replay memory, as one asks it for rows."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdrl.errors import WorkerError
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.unroll_ring import UnrollSpec
from p2pdrl.workers.protocol import DrawnRows, DrawRows, Prioritize, SampleSlots

__all__ = ["DrawPort"]


class DrawPort:
    """Slots that the process draws into, and what it was asked for and hasn't answered.

    Args:
        link: the process that runs now; None while there is none.
    """

    def __init__(self, link: Callable[[], LearnerLink | None]) -> None:
        self._link = link
        self._spec: UnrollSpec | None = None
        self._region: SharedRegion | None = None
        self._free: list[int] = []
        self._open: dict[int, asyncio.Future[DrawnRows]] = {}
        self._slots: dict[int, int] = {}
        self._abandoned: set[int] = set()
        self._number = 0
        self.places = 0
        """Of rows in the shard's memory: their indices are less."""

    def open(self, spec: UnrollSpec, places: int) -> None:
        """Make the slots.

        Raises:
            TensorError: the system gives no such memory.
        """
        self._spec, self.places = spec, places
        self._region = SharedRegion.create(self._nbytes * spec.slots, "samples")
        self._free = list(range(spec.slots))

    @property
    def _nbytes(self) -> int:
        return 0 if self._spec is None else self._spec.content_nbytes(self.most_rows)

    @property
    def most_rows(self) -> int:
        """That are drawn at once."""
        return 0 if self._spec is None else self._spec.shares[0]

    def told(self) -> tuple[SampleSlots, list[SharedRegion]] | None:
        """What each process is told, and whose descriptor goes along; None where there are no slots."""
        return None if self._region is None else (SampleSlots(self._region.nbytes), [self._region])

    def take_slot(self) -> int | None:
        """Return a slot to draw into, or None while none is free."""
        return self._free.pop() if self._free else None

    def free_slot(self, slot: int) -> None:
        """Give a slot back whose content nobody reads any more."""
        self._free.append(slot)

    def abandon(self, slot: int) -> None:
        """Give a slot back once the process has answered what it was to draw into it, or is gone."""
        if slot in self._slots.values():
            self._abandoned.add(slot)
        else:
            self._free.append(slot)

    def content(self, slot: int, rows: int) -> memoryview:
        """Return where so many rows lie in a slot."""
        if self._spec is None or self._region is None:
            raise WorkerError("the shard isn't built yet")
        begin = slot * self._nbytes
        return self._region.buf[begin : begin + self._spec.content_nbytes(rows)]

    async def draw(self, slot: int, rows: int) -> DrawnRows:
        """Have rows drawn into a slot; 0 only asks how things stand.

        Raises:
            WorkerError: there is no process, or it died.
        """
        link = self._link()
        if link is None:
            raise WorkerError("the shard's process doesn't run")
        self._number += 1
        number = self._number
        answer: asyncio.Future[DrawnRows] = asyncio.get_running_loop().create_future()
        self._open[number] = answer
        if rows:
            self._slots[number] = slot
        link.answer(DrawRows(number, slot, rows))
        try:
            return await answer
        finally:
            self._open.pop(number, None)

    def heard(self, drawn: DrawnRows) -> None:
        """Take in an answer of the process."""
        slot = self._slots.pop(drawn.number, None)
        if slot in self._abandoned:
            self._abandoned.discard(slot)
            self._free.append(slot)
        answer = self._open.pop(drawn.number, None)
        if answer is not None and not answer.done():
            answer.set_result(drawn)

    def tell(self, message: Prioritize) -> None:
        """Send TD errors to the process; lost where there is none."""
        link = self._link()
        if link is not None:
            link.answer(message)

    def died(self) -> None:
        """The process is gone: it answers nothing more, and writes nowhere."""
        self._slots.clear()
        self._free += self._abandoned
        self._abandoned.clear()
        for answer in self._open.values():
            if not answer.done():
                answer.set_exception(WorkerError("the shard's process died"))

    def close(self) -> None:
        """Free the slots. Nobody may use them afterwards."""
        if self._region is not None:
            self._region.close()
            self._region = None
