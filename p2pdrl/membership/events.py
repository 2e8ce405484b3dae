"""What goes into the membership core and what comes out of it.

The service turns transport calls, answers and the passing of time into inputs and carries out the
effects; the simulator does the same over a queue. Times are monotonic seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from p2pdrl.membership.messages import Message, Welcome
from p2pdrl.membership.records import Incarnation, SwarmRecord
from p2pdrl.versions import ProtocolRange

__all__ = [
    "NOT_ITSELF",
    "Answered",
    "Effect",
    "EventKind",
    "FailureKind",
    "Input",
    "MemberEvent",
    "MemberView",
    "Notified",
    "Reject",
    "Request",
    "Respond",
    "Send",
    "SendFailed",
    "State",
    "SwarmChanged",
    "Tick",
    "TwinFound",
    "Welcomed",
    "proves_absence",
    "shows_life",
]

State = Literal["alive", "suspect", "dead", "left", "banned"]
EventKind = Literal["joined", "updated", "suspect", "alive", "dead", "left", "banned"]
FailureKind = Literal["unreachable", "timeout", "refused", "local"]


class MemberView(msgspec.Struct, frozen=True):
    """One member as this node sees it.

    Attributes:
        state_reason: plain words for why it is in that state, with the age of the news.
        rtt_s: smoothed round trip of direct probes; None before the first.
        last_seen_s: seconds since it last spoke to us directly; None if it never did.
        spoken: the protocols that it speaks.
        suspected_by: ids of its accusers, while suspect.
        is_self: True for this node.
    """

    id: str
    name: str
    address: str
    state: State
    state_reason: str
    incarnation: Incarnation
    rtt_s: float | None
    last_seen_s: float | None
    tags: dict[str, str]
    suspected_by: tuple[str, ...]
    spoken: ProtocolRange
    public_key: bytes
    is_self: bool = False


@dataclass(frozen=True, slots=True)
class MemberEvent:
    """A change of one member, with the reason in plain words."""

    kind: EventKind
    member: MemberView
    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; due timers run with every input, this one only lets them."""


@dataclass(frozen=True, slots=True)
class Request:
    """A peer asks; the core answers by `Respond` or `Reject` with the same token, maybe later.

    Attributes:
        told_by: IP address of the peer, against which claimed addresses are judged; "" for unknown.
    """

    token: int
    sender: str
    message: Message
    told_by: str = ""


@dataclass(frozen=True, slots=True)
class Answered:
    """A `Send` was answered."""

    call_id: int
    message: Message
    told_by: str = ""


@dataclass(frozen=True, slots=True)
class SendFailed:
    """A `Send` failed.

    Attributes:
        kind: "unreachable" (nothing listens there), "timeout" (ambiguous), "refused" (it said
            no), "local" (this node's own trouble: out of file descriptors, no network, lag).
        reason: plain words.
        status: the HTTP status of a refusal.
    """

    call_id: int
    kind: FailureKind
    reason: str
    status: int = 0


@dataclass(frozen=True, slots=True)
class Welcomed:
    """The service joined through ``sender`` at ``address``."""

    sender: str
    address: str
    message: Welcome
    told_by: str = ""


Input = Tick | Request | Answered | SendFailed | Welcomed


@dataclass(frozen=True, slots=True)
class Send:
    """Call a peer; give back `Answered` or `SendFailed` with the same id, once."""

    call_id: int
    to: str
    target_id: str
    message: Message
    deadline_s: float


@dataclass(frozen=True, slots=True)
class Respond:
    """Answer a request."""

    token: int
    message: Message


@dataclass(frozen=True, slots=True)
class Reject:
    """Refuse a request, with an HTTP status and plain words."""

    token: int
    status: int
    reason: str


@dataclass(frozen=True, slots=True)
class Notified:
    """Tell the subscribers."""

    event: MemberEvent


@dataclass(frozen=True, slots=True)
class SwarmChanged:
    """A swarm record was replaced, by us or by another member."""

    record: SwarmRecord


@dataclass(frozen=True, slots=True)
class TwinFound:
    """Another node runs with our key: it booted later, at ``address``."""

    address: str


Effect = Send | Respond | Reject | Notified | SwarmChanged | TwinFound

NOT_ITSELF = frozenset({401, 403, 404})
"""Statuses of somebody who isn't the member that we expect: another key, swarm or program."""


def shows_life(result: Answered | SendFailed) -> bool:
    """True when the member itself answered, be it with a refusal (busy, too many requests)."""
    if isinstance(result, Answered):
        return True
    return result.kind == "refused" and result.status not in NOT_ITSELF and result.status < 500


def proves_absence(failure: SendFailed) -> bool:
    """True when the member surely isn't at that address now: fast evidence."""
    return failure.kind == "unreachable" or (failure.kind == "refused" and failure.status in NOT_ITSELF)
