"""Pushes under way: their bytes, and when to send them again. Pure but for the buffers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from p2pdrl.strategies.judgement import Summary
from p2pdrl.strategies.push.buffers import BufferPool
from p2pdrl.strategies.push.push_sum import Parcel

__all__ = ["OPEN", "Outbox", "Unsettled"]

OPEN = 4
"""Pushes whose fate may be unknown at once: each holds its bytes, and a part of our weight."""

AGAIN_FIRST_S = 0.25
AGAIN_MAX_S = 5.0
ABSENT_S = 10.0
"""A peer that nobody counted among the living for so long is taken for dead; suspects come back sooner."""


@dataclass(slots=True)
class Unsettled:
    """A push whose fate isn't known yet.

    Attributes:
        parcel: its number, peer and mass.
        summary: what we said of ourselves when its vector was read.
        message: the vector as it travels; the same each time.
        attempts: how often it was sent.
        next_s: monotonic time before which it isn't sent again.
        missed_s: since when its peer isn't among the living; None while it is.
    """

    parcel: Parcel
    summary: Summary
    message: memoryview
    attempts: int = 0
    next_s: float = float("-inf")
    missed_s: float | None = None


class Outbox:
    """The pushes under way.

    Args:
        nbytes: length of a message.
    """

    def __init__(self, nbytes: int) -> None:
        self._pool = BufferPool(nbytes, OPEN)
        self._pushes: dict[int, Unsettled] = {}

    @property
    def room(self) -> bool:
        """Whether another may be begun."""
        return self._pool.any_free

    @property
    def peers(self) -> set[str]:
        """To whom something is under way."""
        return {push.parcel.peer for push in self._pushes.values()}

    def buffer(self) -> memoryview:
        """Borrow a buffer for a new push; only while there is `room`.

        Raises:
            RuntimeError: there is none.
        """
        buffer = self._pool.take()
        if buffer is None:
            raise RuntimeError("no push may be begun now: all buffers are under way")
        return buffer

    def give_back(self, buffer: memoryview) -> None:
        """The push that it was for isn't begun."""
        self._pool.give(buffer)

    def add(self, push: Unsettled) -> None:
        """A push begins."""
        self._pushes[push.parcel.number] = push

    def settle(self, push: Unsettled) -> None:
        """Its fate is known."""
        if self._pushes.pop(push.parcel.number, None) is not None:
            self._pool.give(push.message)

    def unknown(self, push: Unsettled, now_s: float) -> None:
        """Nothing was heard of it: it goes out again after a while that doubles."""
        push.next_s = now_s + min(AGAIN_FIRST_S * 2.0 ** min(push.attempts - 1, 16), AGAIN_MAX_S)

    def due(self, alive: Collection[str], now_s: float) -> Unsettled | None:
        """The push to send again now, if there is one."""
        for push in self._pushes.values():
            if push.attempts and push.next_s <= now_s and push.parcel.peer in alive:
                return push
        return None

    def dead(self, alive: Collection[str], now_s: float) -> list[Unsettled]:
        """Pushes whose peer has been gone for `ABSENT_S`."""
        gone = []
        for push in self._pushes.values():
            if push.parcel.peer in alive:
                push.missed_s = None
            elif push.missed_s is None:
                push.missed_s = now_s
            elif now_s - push.missed_s >= ABSENT_S:
                gone.append(push)
        return gone

    def clear(self) -> list[Unsettled]:
        """Forget all; return them."""
        pushes = list(self._pushes.values())
        for push in pushes:
            self.settle(push)
        return pushes
