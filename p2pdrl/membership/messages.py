"""Messages between members, and their encoding (msgpack, positional, tagged).

Each request has its own route and its own answers:

| route | request | answer |
|---|---|---|
| ``swim/ping`` | `Ping` | `Ack` |
| ``swim/ping-req`` | `PingReq` | `Ack` on behalf of the target, or `Nack` |
| ``swim/gossip`` | `GossipMessage` (a leave is the gossip of one's own ``left`` record) | `Ack` |
| ``swim/sync`` | `Sync` | `Digest` |
| ``swim/delta`` | `Delta` | `GossipMessage` |
| ``swim/join`` | `JoinRequest` | `Welcome`, or `Starting` |

``records`` ride on everything.
"""

from __future__ import annotations

from typing import Annotated, Literal, cast, get_args

import msgspec
from msgspec import Meta

from p2pdrl.errors import WireError
from p2pdrl.membership.records import Incarnation, MemberRecord, NodeId, Record, SwarmRecord, Words
from p2pdrl.transport import codec

__all__ = [
    "ROUTES",
    "Ack",
    "Delta",
    "Digest",
    "DigestEntry",
    "GossipMessage",
    "JoinRequest",
    "Message",
    "Nack",
    "Phase",
    "Ping",
    "PingReq",
    "Starting",
    "SwarmEntry",
    "Sync",
    "Welcome",
    "decode",
    "encode",
    "route_of",
    "without_settings",
]

Records = Annotated[tuple[Record, ...], Meta(max_length=4096)]
Blob = Annotated[bytes, Meta(max_length=262_144)]


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Probe of the receiver; ``incarnation`` is the sender's, ``known`` what it holds of the target."""

    incarnation: Incarnation
    known: Incarnation
    records: Records = ()


class Ack(msgspec.Struct, frozen=True, array_like=True, tag="ack"):
    """The probed member answers; ``incarnation`` is its own, also when a relay sends this.

    ``want_record`` asks the other side for its own record: we hold none, or an older one.
    """

    incarnation: Incarnation
    records: Records = ()
    want_record: bool = False


class PingReq(msgspec.Struct, frozen=True, array_like=True, tag="ping-req"):
    """Asks a relay to probe ``target``, which it does only at the address that it knows itself."""

    target: NodeId
    known: Incarnation
    records: Records = ()


class Nack(msgspec.Struct, frozen=True, array_like=True, tag="nack"):
    """The relay is well, but the target didn't answer it (so far)."""

    reason: Words
    records: Records = ()


class GossipMessage(msgspec.Struct, frozen=True, array_like=True, tag="gossip"):
    """Records alone."""

    incarnation: Incarnation
    records: Records = ()


class Sync(msgspec.Struct, frozen=True, array_like=True, tag="sync"):
    """Starts a push-pull; ``view_hash`` (16 bytes) sums up the sender's view."""

    view_hash: Annotated[bytes, Meta(min_length=16, max_length=16)]
    records: Records = ()


class DigestEntry(msgspec.Struct, frozen=True, array_like=True):
    """One member in a digest: raw id, incarnation, state (0 alive, 1 suspect, 2 dead, 3 left)."""

    id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    incarnation: Incarnation
    state: Annotated[int, Meta(ge=0, le=3)]


class SwarmEntry(msgspec.Struct, frozen=True, array_like=True):
    """One swarm record in a digest."""

    key: Annotated[str, Meta(max_length=64)]
    epoch: Annotated[int, Meta(ge=0, lt=2**53)]
    proposer: NodeId
    lineage: Annotated[str, Meta(max_length=64)] = ""


class Digest(msgspec.Struct, frozen=True, array_like=True, tag="digest"):
    """The answerer's view in short; nothing but ``same`` when the hashes agree."""

    same: bool
    members: Annotated[tuple[DigestEntry, ...], Meta(max_length=8192)] = ()
    swarm: Annotated[tuple[SwarmEntry, ...], Meta(max_length=64)] = ()


class Delta(msgspec.Struct, frozen=True, array_like=True, tag="delta"):
    """What the receiver lacks, and the names of what the sender lacks."""

    records: Records
    want_members: Annotated[tuple[NodeId, ...], Meta(max_length=8192)] = ()
    want_swarm: Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=64)] = ()


class JoinRequest(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """A newcomer asks to be taken in; ``meta`` (task hash ...) is the daemon's business, opaque here."""

    record: MemberRecord
    meta: Blob = b""


Phase = Literal["looking", "following", "blocked", "claiming", "decided"]


class Starting(msgspec.Struct, frozen=True, array_like=True, tag="starting"):
    """The answerer is in no swarm yet itself: what it waits for, and what its data folder remembers.

    Attributes:
        phase: "looking" (may found or resume a swarm when nobody comes before), "following" (never founds:
            waits for the seeds that it was given), "blocked" (waits for somebody who is there and
            doesn't take it in), "claiming" (about to found or resume), "decided" (has: come again soon).
        env_steps: steps of the swarm that it remembers; -1 when it remembers none.
        others: addresses of nodes that are starting as well, as far as the answerer knows. Nodes that were
            given one seed and no more learn of each other so, and one of them founds.
    """

    phase: Phase
    env_steps: Annotated[int, Meta(ge=-1, lt=2**53)] = -1
    others: Annotated[tuple[Annotated[str, Meta(min_length=3, max_length=260)], ...], Meta(max_length=8)] = ()


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The newcomer is in: the view, the swarm's records and the daemon's own ``join_info``.

    ``observed_host`` is where the request came from, for a node that doesn't know its address.
    """

    records: Records
    join_info: Blob = b""
    observed_host: Annotated[str, Meta(max_length=255)] = ""


Message = (
    Ping | Ack | PingReq | Nack | GossipMessage | Sync | Digest | Delta | JoinRequest | Welcome | Starting
)

ROUTES: dict[str, type[Message]] = {
    "swim/ping": Ping,
    "swim/ping-req": PingReq,
    "swim/gossip": GossipMessage,
    "swim/sync": Sync,
    "swim/delta": Delta,
    "swim/join": JoinRequest,
}
_ROUTE_OF: dict[type[Message], str] = {kind: route for route, kind in ROUTES.items()}
_ENCODER = msgspec.msgpack.Encoder()
_RECORD_KINDS = frozenset(kind.__struct_config__.tag for kind in get_args(Record))


def without_settings(message: Message) -> Message:
    """Return a message without the swarm's settings, told by a member that has no say in them."""
    if isinstance(message, Digest):
        return msgspec.structs.replace(message, swarm=())
    records = getattr(message, "records", ())
    if any(isinstance(record, SwarmRecord) for record in records):
        kept = tuple(record for record in records if not isinstance(record, SwarmRecord))
        return msgspec.structs.replace(message, records=kept)
    return message


def route_of(message: Message) -> str:
    """The route on which a request travels."""
    return _ROUTE_OF[type(message)]


def encode(message: Message) -> bytes:
    """Return ``message`` as bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes) -> Message:
    """Return the message in ``data``, without records of kinds that this release doesn't know.

    Raises:
        WireError: it isn't one, or breaks a bound.
    """
    try:
        message: Message = codec.decode(data, Message, "membership message")
    except WireError:
        known = _without_unknown_records(data)
        if known is None:
            raise
        message = codec.decode(known, Message, "membership message")
    return message


def _without_unknown_records(data: bytes) -> bytes | None:
    """The same message without records of unknown kinds; None when there are none in it."""
    fields: list[msgspec.Raw] = codec.decode(data, list[msgspec.Raw], "membership message")
    kinds = {cast("str", kind.__struct_config__.tag): kind for kind in get_args(Message)}
    kind = kinds.get(codec.decode(fields[0], str, "kind of a message")) if fields else None
    names = () if kind is None else kind.__struct_fields__
    place = 1 + names.index("records") if "records" in names else len(fields)
    if place >= len(fields):
        return None
    records: list[msgspec.Raw] = codec.decode(fields[place], list[msgspec.Raw], "list of records")
    known = [record for record in records if _kind_of(record) in _RECORD_KINDS]
    if len(known) == len(records):
        return None
    fields[place] = msgspec.Raw(_ENCODER.encode(known))
    return _ENCODER.encode(fields)


def _kind_of(record: msgspec.Raw) -> str:
    fields: list[msgspec.Raw] = codec.decode(record, list[msgspec.Raw], "record")
    if not fields:
        raise WireError("a record is empty")
    return codec.decode(fields[0], str, "kind of a record")
