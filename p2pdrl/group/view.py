"""Group views: one agreed list of members for the strategies that need one, and how it is talked about.

Membership is a weak view: two nodes may differ for seconds. Strategies whose arithmetic needs one list
(who holds which shard, which weights sum to one) act in a *group view*: the mode epoch, a generation, the
proposer, and the members in order. Views are ordered by those three; a member acknowledges only a greater
one than any before, and from then on acts in none until all have acknowledged and the new one is in force
(virtual synchrony without its message guarantees: Birman and Joseph 1987).

`agreement` decides, purely: whose turn it is to propose, what is acknowledged, who answers, what is proposed.
`service` does the I/O.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, NamedTuple, Self

import msgspec
from msgspec import Meta

from p2pdrl.errors import WireError
from p2pdrl.group.compatibility import Natural, Short
from p2pdrl.transport import codec

__all__ = [
    "MAX_GENERATION",
    "MAX_MEMBERS",
    "MAX_NOTE_BYTES",
    "Accept",
    "Acknowledged",
    "Activate",
    "ActiveView",
    "Doubt",
    "GroupNote",
    "GroupPing",
    "GroupPong",
    "GroupView",
    "Held",
    "Holding",
    "Invite",
    "Refuse",
    "Request",
    "Response",
    "Timing",
    "ViewKey",
]

MAX_MEMBERS = 200
"""So that all notes fit in one message's metadata; of more, the first in rendezvous order are in."""
MAX_NOTE_BYTES = 256
MAX_GENERATION = 2**52
"""A greater one is nobody's honest count, and nothing could follow it."""

Note = Annotated[bytes, Meta(max_length=MAX_NOTE_BYTES)]


class ViewKey(msgspec.Struct, frozen=True, order=True):
    """Which view; of two, the greater counts.

    Attributes:
        generation: grows with each view.
    """

    epoch: Natural
    generation: Natural
    proposer: Short

    def __str__(self) -> str:
        return f"{self.epoch}/{self.generation}/{self.proposer[:8]}"


class GroupView(msgspec.Struct, frozen=True):
    """Who acts together.

    Attributes:
        members: node ids, ascending.
    """

    key: ViewKey
    members: Annotated[tuple[Short, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]


class ActiveView(NamedTuple):
    """A view in force.

    Args:
        notes: what each member noted when it acknowledged, at most 256 bytes each.
    """

    view: GroupView
    notes: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Timing:
    """How long things take; all in seconds.

    Attributes:
        poll_s: how often membership is looked at.
        ping_s: how often a proposer asks each member how it stands.
        again_s: a message that isn't answered is sent again after this at least; on a slow network later.
        acknowledge_s: who hasn't acknowledged a view by then is left out of the next.
        silence_s: a proposer that wasn't heard for so long is passed over, and a member that didn't
            answer for so long is left out. More: slower when membership doesn't notice. Less: long
            pauses of a process cost a new view.
        gather_s: how long a proposer waits for those it doesn't know yet, and for more newcomers.
        follow_s: how long the first view of an epoch waits for the living who are still in another: a
            mode that begins with everybody's mean shall begin with everybody. More: one that can't follow
            holds all up for longer. Less: who hears late of a new mode comes when it has begun.
        rest_s: how long somebody left out stays out at least; doubles with each time within a minute.
        rest_silent_s: greatest rest of somebody who didn't answer.
        rest_doubted_s: greatest rest of somebody others doubted although it answers.
    """

    poll_s: float = 0.1
    ping_s: float = 1.0
    answer_s: float = 0.5
    again_s: float = 0.1
    acknowledge_s: float = 2.0
    silence_s: float = 3.5
    gather_s: float = 0.25
    follow_s: float = 2.0
    rest_s: float = 0.5
    rest_silent_s: float = 2.0
    rest_doubted_s: float = 30.0


class GroupPing(msgspec.Struct, frozen=True, tag="ping"):
    """How do you stand?

    Attributes:
        proposes: whether the sender takes itself for the proposer.
        active: the view in force there, if it does.
    """

    epoch: Natural
    proposes: bool
    active: ViewKey | None


class GroupPong(msgspec.Struct, frozen=True, tag="pong"):
    """How a member stands.

    Attributes:
        acknowledged: the greatest view that it acknowledged.
        active: the view in force there.
        follows: whom it heard propose of late; empty for nobody.
        takes: whether it would acknowledge a view of the asker now, if it was great enough.
    """

    acknowledged: ViewKey | None
    active: ViewKey | None
    follows: Short
    takes: bool


class Invite(msgspec.Struct, frozen=True, tag="invite"):
    """A proposal: be in this view."""

    view: GroupView


class Accept(msgspec.Struct, frozen=True, tag="accept"):
    """An acknowledgement: from now on the sender acts in no older view."""

    key: ViewKey
    note: Note


class Refuse(msgspec.Struct, frozen=True, tag="refuse"):
    """No: a greater view was acknowledged here, or another proposer is followed.

    Attributes:
        takes: as in `GroupPong`.
    """

    acknowledged: ViewKey | None
    takes: bool


class Activate(msgspec.Struct, frozen=True, tag="activate"):
    """All have acknowledged: the view is in force."""

    key: ViewKey
    notes: Annotated[dict[Short, Note], Meta(max_length=MAX_MEMBERS)]


class Doubt(msgspec.Struct, frozen=True, tag="doubt"):
    """A member didn't do its part; about itself: it leaves.

    Attributes:
        key: the view in which it was seen.
        peer: who; empty for nobody, to ask for a new view of all who are fit.
    """

    epoch: Natural
    key: ViewKey | None
    peer: Short
    why: Annotated[str, Meta(max_length=200)]


class Acknowledged(msgspec.Struct, frozen=True, tag="done"):
    """Heard."""


class Holding(msgspec.Struct, frozen=True, tag="holding"):
    """Do you work at a call of mine? Of no interest to the core, see `calls`."""

    epoch: Natural
    call: Natural


class Held(msgspec.Struct, frozen=True, tag="held"):
    """The answer."""

    yes: bool


Request = GroupPing | Invite | Activate | Doubt
Response = GroupPong | Accept | Refuse | Acknowledged


class GroupNote(msgspec.Struct, frozen=True, array_like=True):
    """A note; every field has a default, which says nothing."""

    def encode(self) -> bytes:
        """As bytes for the group."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def read(cls, data: bytes | None) -> Self:
        """Read a member's note; an empty one when there is none, or it can't be read."""
        try:
            note: Self = codec.decode(data or b"", cls)
        except WireError:
            return cls()
        return note
