"""One round with one's neighbours: the messages, the graph, whose edge has counted, whose not and why."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

from p2pdrl.config.strategy import Content, DsgdConfig, MixingChoice
from p2pdrl.group.compatibility import Natural, Short, Summary
from p2pdrl.group.view import GroupView, ViewKey
from p2pdrl.strategies.gossip.pair_average import WireName
from p2pdrl.strategies.neighbours.mixing import Edge, NeighbourContribution
from p2pdrl.strategies.protocol import Merged, RoundReport
from p2pdrl.strategies.topology import matrix, metropolis, spectral_gap
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.transport.protocol import Reply

__all__ = [
    "PAST",
    "ROUTE",
    "EdgeBuffer",
    "Met",
    "NeighbourHead",
    "NeighbourRound",
    "Neighbourhood",
    "Position",
    "SentMessage",
    "SentMessages",
    "position_of",
    "round_report",
]

ROUTE = "neighbour"
PAST = "past"
"""Verdict in an answer: that round is over here; ``number`` is the next one."""


class Position(NamedTuple):
    """Where a node is within a view; of two, the greater is later.

    Args:
        phase: 0 for its gradients, 1 for its parameters.
    """

    number: int
    phase: int


def position_of(number: int, content: Content) -> Position:
    """Return where a round that mixes ``content`` is in its view."""
    return Position(number, int(content == "parameters"))


class NeighbourHead(msgspec.Struct, frozen=True):
    """What goes before the vector, in both directions."""

    view: ViewKey
    number: Natural
    """Of the round, within the view."""
    content: Content
    wire: WireName
    summary: Summary
    wait_s: Annotated[float, Meta(ge=0, le=86400)] = 0.0
    """In a call: how long the caller waits for its answer."""
    verdict: Short = "mix"
    """In an answer: `PAST`, or what is done (`group.compatibility.Verdict`); only ``mix`` brings a vector."""
    call: Natural = 0
    """In a call: its number (see `group.calls`)."""

    @property
    def position(self) -> Position:
        """Where its sender is."""
        return position_of(self.number, self.content)


class EdgeBuffer:
    """What an edge keeps from round to round.

    Args:
        max_nbytes: of the longest message.

    Attributes:
        theirs: what the neighbour sent last, decoded.
        lock: held while the buffer is filled and read.
        newest: the latest position that the neighbour called with.
    """

    def __init__(self, size: int, max_nbytes: int) -> None:
        self._buffer = memoryview(bytearray(max_nbytes))
        self.theirs: Float32Array = np.zeros(size, np.float32)
        self.lock = asyncio.Lock()
        self.newest = Position(-1, 0)

    def room(self, nbytes: int) -> memoryview | None:
        """Where ``nbytes`` go; None when they can't be right."""
        return self._buffer[:nbytes] if 0 < nbytes <= len(self._buffer) else None


class Neighbourhood:
    """Neighbours in a view.

    Args:
        first: number of the view's first round.
    """

    def __init__(self, config: DsgdConfig, me: str, view: GroupView, first: int) -> None:
        self.view, self.key, self.first = view, view.key, first
        row = metropolis(config.topology, view.members, degree=config.degree, seed=str(view.key))[me]
        self.weights = {peer: weight for peer, weight in row.items() if peer != me}
        W_NN = matrix(config.topology, view.members, degree=config.degree, seed=str(view.key))
        self.spectral_gap = spectral_gap(W_NN)
        self.buffers: dict[str, EdgeBuffer] = {}

    def buffer(self, peer: str, size: int, max_nbytes: int) -> EdgeBuffer:
        """The edge to a neighbour."""
        buffer = self.buffers.get(peer)
        if buffer is None:
            buffer = self.buffers[peer] = EdgeBuffer(size, max_nbytes)
        return buffer

    def inherit(self, before: Neighbourhood) -> None:
        """Keep the buffers of those who were neighbours before."""
        for peer, buffer in before.buffers.items():
            if peer in self.weights:
                buffer.newest = Position(-1, 0)
                self.buffers[peer] = buffer


@dataclass(eq=False)
class SentMessage:
    """Our message of one round.

    Attributes:
        room: where it is; longer than it.
        key: view that the round is of.
        answers: what went before it to those neighbours who called and whose edges count.
        writing: answers under way that show it.
    """

    room: bytearray
    nbytes: int
    key: ViewKey
    position: Position
    answers: dict[str, bytes] = field(default_factory=dict)
    writing: int = 0

    @property
    def view(self) -> memoryview:
        """The message; it stays as it is while ``writing``, and for one more round."""
        return memoryview(self.room)[: self.nbytes]

    def reply(self, meta: bytes, ended: Callable[[bool], None] = lambda _: None) -> Reply:
        """An answer that shows it; ``ended`` is told whether that was written."""
        self.writing += 1

        def done(sent: bool) -> None:
            self.writing -= 1
            ended(sent)

        return Reply(meta, vector=self.view, on_end=done)


class SentMessages:
    """The messages of this round and of the one before."""

    def __init__(self, max_nbytes: int) -> None:
        self._max_nbytes = max_nbytes
        self._last: list[SentMessage] = []

    def begin(self, key: ViewKey, position: Position, message: memoryview) -> SentMessage:
        """Return a copy of a round's message."""
        oldest = self._last.pop(0) if len(self._last) > 1 else None
        room = bytearray(self._max_nbytes) if oldest is None or oldest.writing else oldest.room
        made = SentMessage(room, len(message), key, position)
        made.view[:] = message
        self._last.append(made)
        return made

    def again(self, key: ViewKey, position: Position, peer: str) -> Reply | None:
        """The answer that a neighbour got, or should have got; None where its edge doesn't count."""
        for message in self._last:
            if (message.key, message.position) == (key, position) and peer in message.answers:
                return message.reply(message.answers[peer])
        return None


@dataclass(frozen=True, slots=True)
class Met:
    """An edge that counts.

    Args:
        theirs: what it sent; of the edge's buffer.
    """

    edge: Edge
    policy_version: int
    theirs: Float32Array


@dataclass(eq=False)
class NeighbourRound:
    """A round, or one of the two of a round of gradients.

    It ends when all its edges are settled, or is cut off: by time, by a new view, or when the strategy stops.
    An edge at which a call or an answer is under way is settled by that one's end, not by the cut.

    Attributes:
        part: what we give to it.
        began_s: monotonic.
        until_s: when it is cut off.
        message: ours.
        missing: why edges don't count, in a word.
        busy: neighbours to whom a call or an answer is under way.
        half: neighbours who called, and to whom our answer couldn't be written: they may have moved.
        cut_off: it waits for nobody any more who isn't busy.
        regrouped: it was cut off by the end of the view.
        closed: it has ended; whatever comes now doesn't count.
    """

    hood: Neighbourhood
    number: int
    part: NeighbourContribution
    began_s: float
    until_s: float
    message: SentMessage
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
        self._open = set(self.hood.weights)
        self._cut, self._settled = asyncio.Event(), asyncio.Event()
        self._check()

    @property
    def position(self) -> Position:
        """Where it is in the view."""
        return position_of(self.number, self.part.content)

    def head(self, mine: Summary, *, wait_s: float = 0.0, verdict: str = "mix") -> NeighbourHead:
        """What goes before our message."""
        return NeighbourHead(
            self.hood.key, self.number, self.part.content, self.part.wire, mine, wait_s, verdict
        )

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


def round_report(
    round_: NeighbourRound, mixing: MixingChoice, me: str, policy_version: int, changed: float | None
) -> RoundReport:
    """Say how a round went.

    Args:
        changed: norm of what was added to ours; None when ours was replaced meanwhile.
    """
    met = sorted(round_.met.items())
    weights = {peer: edge.edge.weight for peer, edge in met}
    if mixing == "trimmed":
        weights = dict.fromkeys(weights, 1.0 / (len(met) + 1))
    merged = [Merged(me, 1.0 - math.fsum(weights.values()))] if met else []
    merged += [Merged(peer, weights[peer], policy_version - edge.policy_version) for peer, edge in met]
    pulls = [0.0, *(weights[peer] * edge.edge.distance for peer, edge in met)] if met else []
    square = sum(edge.edge.distance**2 for _, edge in met)
    outcome, error = "ok", ""
    if not met:
        outcome = "regrouped" if round_.regrouped else _commonest(round_)
        error = f"no neighbour came: {outcome}"
    elif changed is None:
        outcome, error = "unsure", "our vector was replaced meanwhile"
    elif changed == 0 and square > 0:
        outcome, error = "unchanged", "the vectors differ, but the step rounds or clips to nothing"
    return RoundReport(
        outcome,
        merged=tuple(merged),
        pulls=tuple(pulls),
        missing=tuple(sorted(round_.missing)),
        bytes_out=round_.bytes_out,
        bytes_in=round_.bytes_in,
        round_trips=round_.round_trips,
        changed=changed or 0.0,
        distance=math.sqrt(square / len(met)) if met else None,
        error=error,
    )


def _commonest(round_: NeighbourRound) -> str:
    counts = Counter(round_.missing.values()).most_common(1)
    return counts[0][0] if counts else "timeout"
