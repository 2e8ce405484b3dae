"""What neighbours on a graph say before their vectors, on the route ``neighbour``."""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from p2pdrl.config.strategy import Content
from p2pdrl.errors import WireError
from p2pdrl.group.compatibility import Natural, Short, Summary
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.gossip.pair_average import WireName
from p2pdrl.transport import codec

__all__ = ["PAST", "ROUTE", "NeighbourHead", "Position", "decode_neighbour_head"]

ROUTE = "neighbour"
PAST = "past"
"""Verdict in an answer: that round is over here; ``number`` is the next one."""


class Position(NamedTuple):
    """Where a node is within a view; of two, the greater is later.

    Args:
        number: of the round.
        stage: 0 for its gradients, 1 for its parameters.
    """

    number: int
    stage: int


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
    """In a call: its number (see `group.held_calls`)."""

    @property
    def position(self) -> Position:
        """Where its sender is."""
        return Position(self.number, int(self.content == "parameters"))


def decode_neighbour_head(meta: bytes) -> NeighbourHead | None:
    """Read what a peer put before its vector; None when it can't be read."""
    try:
        head: NeighbourHead = codec.decode(meta, NeighbourHead)
    except WireError:
        return None
    return head
