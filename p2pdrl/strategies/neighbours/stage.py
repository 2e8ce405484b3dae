"""One round with one's neighbours: whose edge has counted, whose hasn't and why.

A round ends when all its edges are settled, or is cut off: by time, by a new view, or when the strategy
stops. An edge at which a call or an answer is under way is settled by that one's end, not by the cut.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field

from p2pdrl.config.strategy import Content
from p2pdrl.strategies.group.view import ViewKey
from p2pdrl.strategies.neighbours.messages import Position
from p2pdrl.strategies.neighbours.mixing import Edge
from p2pdrl.strategies.neighbours.sent import Message
from p2pdrl.tensors.layout import Float32Array

__all__ = ["Met", "Stage"]


@dataclass(frozen=True, slots=True)
class Met:
    """An edge that counts.

    Args:
        edge: how.
        policy_version: the neighbour's.
        theirs: what it sent; of the edge's buffer.
    """

    edge: Edge
    policy_version: int
    theirs: Float32Array


@dataclass(eq=False)
class Stage:
    """A round, or one of the two of a round of gradients.

    Attributes:
        key: of the view.
        number: of the round in the view.
        content: what is mixed.
        weights: W_ij of each neighbour j.
        began_s: monotonic.
        until_s: when it is cut off.
        message: ours.
        met: edges that count.
        missing: why the others don't, in a word.
        busy: neighbours to whom a call or an answer is under way.
        half: neighbours who called, and to whom our answer couldn't be written: they may have moved.
        cut_off: it waits for nobody any more who isn't busy.
        regrouped: it was cut off by the end of the view.
        closed: it has ended; whatever comes now doesn't count.
    """

    key: ViewKey
    number: int
    content: Content
    weights: Mapping[str, float]
    began_s: float
    until_s: float
    message: Message
    bytes_out: int = 0
    bytes_in: int = 0
    round_trips: int = 0
    met: dict[str, Met] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    busy: set[str] = field(default_factory=set)
    half: set[str] = field(default_factory=set)
    cut_off: bool = False
    regrouped: bool = False
    closed: bool = False

    def __post_init__(self) -> None:
        self._open = set(self.weights)
        self._cut, self._settled = asyncio.Event(), asyncio.Event()
        self._check()

    @property
    def position(self) -> Position:
        """Where it is in the view."""
        return Position(self.number, int(self.content == "parameters"))

    def awaits(self, peer: str) -> bool:
        """Whether the edge to ``peer`` isn't settled, and nobody works at it."""
        return peer in self._open and peer not in self.busy and not self.closed

    def settle(self, peer: str, met: Met) -> bool:
        """The edge counts; False when it is too late for that."""
        if self.closed or peer not in self._open:
            return False
        self.met[peer] = met
        self._end(peer)
        return True

    def miss(self, peer: str, why: str) -> None:
        """The edge doesn't count."""
        if peer in self._open:
            self.missing[peer] = "unsure" if peer in self.half else why
            self._end(peer)

    def broke(self, peer: str) -> None:
        """Our answer couldn't be written: while the round lasts, the neighbour may call again."""
        if peer in self._open:
            self.half.add(peer)
            self.busy.discard(peer)
            if self.cut_off:
                self.miss(peer, "unsure")

    def cut(self, why: str, *, regrouped: bool = False) -> None:
        """Wait no longer for those who haven't come."""
        self.regrouped |= regrouped and not self._settled.is_set()
        self.cut_off = True
        for peer in sorted(self._open - self.busy):
            self.miss(peer, why)
        self._cut.set()

    def close(self) -> None:
        """Leave out what isn't settled."""
        self.closed = self.cut_off = True
        for peer in sorted(self._open):
            self.miss(peer, "timeout")

    async def wait(self, seconds: float) -> None:
        """Wait until it is cut off or settled, at most so long."""
        await _within(self._cut, seconds)

    async def wait_settled(self, seconds: float) -> None:
        """Wait until all edges are settled, at most so long."""
        await _within(self._settled, seconds)

    def _end(self, peer: str) -> None:
        self._open.discard(peer)
        self.busy.discard(peer)
        self._check()

    def _check(self) -> None:
        if not self._open:
            self._cut.set()
            self._settled.set()


async def _within(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(max(seconds, 0.0)):
            await event.wait()
    except TimeoutError:
        return
