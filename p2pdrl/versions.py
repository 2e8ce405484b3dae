"""Versions of the protocol between nodes: a node speaks a range of them, so that a swarm can be upgraded.

| protocol | is told by |
|---|---|
| 6 | releases that speak no other, and tell no range |
| 7 | those that tell which they speak: in each request and answer, and in their member record |

What a release adds without a new number is passed over by those that don't know it: fields at the end of a
message that travels as an array, keys of one that travels as a map, settings and records of other kinds,
tags, routes (404). A new number is for what can't be passed over; a release speaks the number before it for
as long as swarms are upgraded from there. Of options, see `config.fields`.
"""

from __future__ import annotations

import functools
import re
from typing import NamedTuple

__all__ = ["BEFORE_RANGES", "SPOKEN", "ProtocolRange", "refuse_protocol"]

_RANGE = re.compile(r"([1-9][0-9]{0,5})(?:-([1-9][0-9]{0,5}))?")


class ProtocolRange(NamedTuple):
    """The protocols that a node speaks, both ends included.

    Example:
        >>> ProtocolRange.parse("6-7").common(ProtocolRange(7, 9))
        7
    """

    oldest: int
    newest: int

    @classmethod
    @functools.lru_cache(256)
    def parse(cls, text: str) -> ProtocolRange | None:
        """Read what `wire` wrote; None when it isn't a range."""
        found = _RANGE.fullmatch(text)
        if found is None:
            return None
        spoken = cls(int(found[1]), int(found[2] or found[1]))
        return spoken if spoken.oldest <= spoken.newest else None

    @property
    def wire(self) -> str:
        """As it travels: ``6-7``, or ``6``."""
        return str(self.oldest) if self.oldest == self.newest else f"{self.oldest}-{self.newest}"

    @property
    def words(self) -> str:
        """For people: ``6–7``."""
        return self.wire.replace("-", "–")

    def has(self, protocol: int) -> bool:
        """Whether it is one of them."""
        return self.oldest <= protocol <= self.newest

    def common(self, other: ProtocolRange) -> int | None:
        """The newest that both speak; None when there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None


SPOKEN = ProtocolRange(6, 7)
"""What this release speaks."""

BEFORE_RANGES = ProtocolRange(6, 6)
"""What a node speaks that says nothing of it in its answers."""


def refuse_protocol(
    mine: ProtocolRange, theirs: ProtocolRange, me: str = "this node", them: str = "that one"
) -> str | None:
    """Say why two nodes can't talk, as ``mine`` tells it; None when they can."""
    if mine.common(theirs) is not None:
        return None
    where = f"where {them} runs" if theirs.newest < mine.oldest else f"where {me} runs"
    return f"{me} speaks protocol {mine.words}, {them} {theirs.words}: install a newer p2pdrl {where}"
