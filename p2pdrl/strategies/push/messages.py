"""What goes before a pushed vector, and what comes back."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdrl.config.strategy import Content
from p2pdrl.errors import WireError
from p2pdrl.strategies.judgement import Natural, Short, Summary
from p2pdrl.strategies.pairwise.pair import WireName
from p2pdrl.transport import codec

__all__ = ["PushAnswer", "PushHead", "decode_push_answer", "decode_push_head"]


class PushHead(msgspec.Struct, frozen=True):
    """Goes before a pushed vector."""

    boot: Short
    """Drawn anew by each strategy that starts: numbers begin again with it."""
    number: Natural
    """Grows by one with each push of a boot."""
    wire: WireName
    summary: Summary
    content: Content = "parameters"
    mass: Annotated[float, Meta(ge=0)] = 0.0
    """Weight that goes along; see `push_sum`."""
    asks: bool = False
    """No vector follows: the sender gets nothing, and asks to be pushed to; see `lending`."""


class PushAnswer(msgspec.Struct, frozen=True):
    """What became of it, now and for ever."""

    number: Natural
    result: Literal["taken", "void"]
    summary: Summary
    verdict: Short = "mix"
    """A `judgement.Verdict`: why it is void, if one side is to adopt the other's state."""
    more: bool = False
    """Nobody else pushes to us: go on; see `lending`."""


def decode_push_head(meta: bytes) -> PushHead | None:
    """Read a head; None when it can't be read."""
    try:
        head: PushHead = codec.decode(meta, PushHead)
    except WireError:
        return None
    return head


def decode_push_answer(meta: bytes) -> PushAnswer | None:
    """Read an answer; None when it can't be read."""
    try:
        answer: PushAnswer = codec.decode(meta, PushAnswer)
    except WireError:
        return None
    return answer
