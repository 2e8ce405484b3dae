"""What members tell about each other: signed records, their bounds, and how they are checked.

| record | signed by | means |
|---|---|---|
| `MemberRecord` | its subject | the subject lives at this address (or left), in this incarnation |
| `Suspicion` | its accuser | the accuser couldn't reach the subject in that incarnation |
| `SwarmRecord` | its proposer: an operator, or a node | a setting of the whole swarm, last writer wins |

Signatures cover the swarm id, so a record means nothing in another swarm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

from p2pdrl.config.node import beyond
from p2pdrl.errors import UsageError
from p2pdrl.ids import is_node_id, node_id_from_public_key
from p2pdrl.membership.identity import Signer, Verify
from p2pdrl.transport.dial import METADATA_IPS, ip_of, is_loopback
from p2pdrl.transport.protocol import Address
from p2pdrl.versions import ProtocolRange

__all__ = [
    "LINEAGE_KEYS",
    "MAX_EPOCH",
    "MAX_FIRST_EPOCH",
    "MAX_TAGS",
    "RECORD_KEYS",
    "BadRecordError",
    "Incarnation",
    "MemberRecord",
    "NodeId",
    "Record",
    "Suspicion",
    "SwarmRecord",
    "Verifier",
    "approx_bytes",
    "refuse_address",
    "relays_in",
    "release_in",
    "sign_member",
    "sign_suspicion",
    "sign_swarm_record",
    "spoken_in",
    "with_relays",
    "with_release",
]

MAX_TAGS = 64
MAX_TAG_BYTES = 128
MAX_EPOCH = 2**53
MAX_FIRST_EPOCH = 2**52
"""No first record under a key has a higher one, so that there is always room for the next proposals."""

LINEAGE_KEYS = frozenset({"halt", "mode", "pause", "stop"})
"""The settings of a lineage."""
RECORD_KEYS = LINEAGE_KEYS | {"bans", "operators"}
"""The settings that a swarm has; a record under another key is passed over, whoever signed it: later releases
may have more. Those that aren't of a lineage hold for all."""

NodeId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$")]
PublicKey = Annotated[bytes, Meta(min_length=32, max_length=32)]
Signature = Annotated[bytes, Meta(max_length=64)]
Words = Annotated[str, Meta(max_length=200)]


class Incarnation(NamedTuple):
    """Orders everything a node says about itself: a later boot, then a higher counter, wins."""

    boot_ms: Annotated[int, Meta(ge=0, lt=2**53)]
    counter: Annotated[int, Meta(ge=0, lt=2**53)]


class MemberRecord(msgspec.Struct, frozen=True, array_like=True, tag="m"):
    """A node about itself.

    Attributes:
        address: ``host:port`` at which others reach it.
        state: "alive" or "left"; nobody else can say "left".
        tags: at most 64 short facts (role, device ...), each pair at most 128 bytes.
        protocol: the oldest that the node speaks; a tag has all (`spoken_in`).
    """

    id: NodeId
    public_key: PublicKey
    name: Annotated[str, Meta(max_length=64)]
    address: Annotated[str, Meta(min_length=3, max_length=260)]
    incarnation: Incarnation
    state: Literal["alive", "left"]
    tags: Annotated[dict[str, str], Meta(max_length=MAX_TAGS)]
    protocol: Annotated[int, Meta(ge=0, lt=2**31)]
    signature: Signature = b""

    def payload(self, swarm_id: str) -> bytes:
        """The bytes that the signature covers."""
        return msgspec.msgpack.encode((
            "p2pdrl member", swarm_id, self.id, self.public_key, self.name, self.address,
            self.incarnation, self.state, sorted(self.tags.items()), self.protocol,
        ))  # fmt: skip


class Suspicion(msgspec.Struct, frozen=True, array_like=True, tag="s"):
    """A node about another that it couldn't reach.

    ``verdict`` "dead" says that the accuser has given it up; to everybody else that is one more
    accusation, not a death.
    """

    subject: NodeId
    incarnation: Incarnation
    accuser: NodeId
    verdict: Literal["suspect", "dead"]
    reason: Words
    signature: Signature = b""

    def payload(self, swarm_id: str) -> bytes:
        """The bytes that the signature covers."""
        return msgspec.msgpack.encode((
            "p2pdrl suspicion", swarm_id, self.subject, self.incarnation, self.accuser,
            self.verdict, self.reason,
        ))  # fmt: skip


class SwarmRecord(msgspec.Struct, frozen=True, array_like=True, tag="r"):
    """A setting of the whole swarm; the greater (epoch, proposer) wins within its lineage.

    Attributes:
        key: one of `RECORD_KEYS`.
        proposer: what follows from the public key: a node's id, or an operator's.
        value: msgpack of whatever the setting is, at most 8 KiB.
        lineage: id of the founding that it belongs to. A lineage has one task, so when swarms meet, the
            settings of the lineage that stays, stay. Empty for the keys that hold for all.
        at_ms: wall time at which it was signed, milliseconds since the Unix epoch.
    """

    key: Annotated[str, Meta(pattern="^[a-z0-9_.-]{1,64}$")]
    epoch: Annotated[int, Meta(ge=1, lt=MAX_EPOCH)]
    proposer: NodeId
    value: Annotated[bytes, Meta(max_length=8192)]
    public_key: PublicKey
    signature: Signature = b""
    lineage: Annotated[str, Meta(max_length=64)] = ""
    at_ms: Annotated[int, Meta(ge=0, lt=2**53)] = 0

    def payload(self, swarm_id: str) -> bytes:
        """The bytes that the signature covers."""
        return msgspec.msgpack.encode((
            "p2pdrl swarm record", swarm_id, self.key, self.epoch, self.proposer, self.value, self.lineage,
            self.at_ms,
        ))  # fmt: skip


Record = MemberRecord | Suspicion | SwarmRecord


class BadRecordError(ValueError):
    """A record that no honest member would pass on.

    Attributes:
        status: what a peer that sent it is answered: 403 forged, 400 out of bounds.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Verifier:
    """Checks records against their bounds and signatures.

    Args:
        swarm_id: the swarm for which they must be signed.
        future_s: how far ahead of our wall clock a boot time may be, in seconds.
        allowed: the roles that a node's certificate allows it, by id; None for no limit.
    """

    def __init__(
        self,
        swarm_id: str,
        verify: Verify,
        future_s: float = 600.0,
        allowed: Callable[[str], Collection[str] | None] = lambda node_id: None,
    ) -> None:
        self.swarm_id = swarm_id
        self._verify = verify
        self._future_s = future_s
        self._allowed = allowed

    def check_member(self, record: MemberRecord, wall_s: float) -> None:
        """Accept ``record``, or raise.

        Raises:
            BadRecordError: forged, out of bounds, born too far in the future, or with roles that the node's
                certificate doesn't allow.
        """
        ahead_s = record.incarnation.boot_ms / 1000 - wall_s
        if ahead_s > self._future_s:
            who = record.name if record.name.isprintable() else record.id[:8]
            raise BadRecordError(
                400, f"{who} started {round(ahead_s / 60)} minutes in the future; set the clocks right"
            )
        if not record.name.isprintable():
            raise BadRecordError(400, "a name holds characters that can't be printed")
        if any(len(key.encode()) + len(value.encode()) > MAX_TAG_BYTES for key, value in record.tags.items()):
            raise BadRecordError(400, f"a tag is longer than {MAX_TAG_BYTES} bytes")
        allowed = self._allowed(record.id)
        if refused := beyond(record.tags, allowed):
            may = " and ".join(sorted(allowed or ()))
            raise BadRecordError(
                403,
                f"{record.name} is certified for {may} alone, and wants to be {' and '.join(refused)}, too",
            )
        self._check_owner(record.id, record.public_key, record.signature, record.payload(self.swarm_id))

    def check_suspicion(self, suspicion: Suspicion, accuser_key: bytes) -> None:
        """Accept ``suspicion`` when the owner of ``accuser_key`` signed it.

        Raises:
            BadRecordError: forged.
        """
        if not suspicion.reason.isprintable():
            raise BadRecordError(400, "a reason holds characters that can't be printed")
        self._check_owner(
            suspicion.accuser, accuser_key, suspicion.signature, suspicion.payload(self.swarm_id)
        )

    def check_swarm_record(self, record: SwarmRecord) -> None:
        """Accept ``record`` when its proposer signed it.

        Raises:
            BadRecordError: forged.
        """
        self._check_owner(record.proposer, record.public_key, record.signature, record.payload(self.swarm_id))

    def _check_owner(self, node_id: str, public_key: bytes, signature: bytes, payload: bytes) -> None:
        if node_id_from_public_key(public_key) != node_id or not self._verify(public_key, signature, payload):
            raise BadRecordError(403, f"a record in the name of {node_id[:8]} isn't signed by it")


def sign_member(signer: Signer, swarm_id: str, record: MemberRecord) -> MemberRecord:
    """Return ``record`` with its subject's signature."""
    return msgspec.structs.replace(record, signature=signer.sign(record.payload(swarm_id)))


def sign_suspicion(signer: Signer, swarm_id: str, suspicion: Suspicion) -> Suspicion:
    """Return ``suspicion`` with its accuser's signature."""
    return msgspec.structs.replace(suspicion, signature=signer.sign(suspicion.payload(swarm_id)))


def sign_swarm_record(signer: Signer, swarm_id: str, record: SwarmRecord) -> SwarmRecord:
    """Return ``record`` with its proposer's signature."""
    return msgspec.structs.replace(record, signature=signer.sign(record.payload(swarm_id)))


def approx_bytes(record: Record) -> int:
    """Roughly how many bytes ``record`` takes on the wire."""
    if isinstance(record, MemberRecord):
        return (
            220
            + len(record.name)
            + len(record.address)
            + sum(len(key) + len(value) + 4 for key, value in record.tags.items())
        )
    if isinstance(record, SwarmRecord):
        return 190 + len(record.value)
    return 180 + len(record.reason)


_REACH_TAG, _RELAYS_TAG = "reach", "relays"
_OUTBOUND_ONLY = "outbound-only"
_MAX_RELAYS = 3


def with_relays(tags: Mapping[str, str], relays: Sequence[str] | None) -> dict[str, str]:
    """Return a member's tags with those that tell how it is reached.

    Args:
        tags: all others.
        relays: ids of members that relay calls to it, since nobody can dial it; None when others can.
    """
    own = {key: value for key, value in tags.items() if key not in (_REACH_TAG, _RELAYS_TAG)}
    if relays is None:
        return own
    return own | {_REACH_TAG: _OUTBOUND_ONLY, _RELAYS_TAG: ",".join(relays[:_MAX_RELAYS])}


def relays_in(tags: Mapping[str, str]) -> tuple[str, ...] | None:
    """Ids of the members that relay calls to a member with these tags; None for one that can be dialled."""
    if tags.get(_REACH_TAG) != _OUTBOUND_ONLY:
        return None
    told = tags.get(_RELAYS_TAG, "").split(",", _MAX_RELAYS)[:_MAX_RELAYS]
    return tuple(dict.fromkeys(filter(is_node_id, told)))


_RELEASE_TAG, _SPOKEN_TAG = "release", "protocols"


def with_release(tags: Mapping[str, str], release: str, spoken: ProtocolRange) -> dict[str, str]:
    """Return a member's tags with those that tell what it runs."""
    return dict(tags) | {_SPOKEN_TAG: spoken.wire} | ({_RELEASE_TAG: release[:64]} if release else {})


def release_in(tags: Mapping[str, str]) -> str:
    """The release of p2pdrl that a member says it runs; empty where it says nothing."""
    return tags.get(_RELEASE_TAG, "")


def spoken_in(tags: Mapping[str, str], protocol: int) -> ProtocolRange:
    """The protocols that a member with these tags speaks, whose record has ``protocol``."""
    return ProtocolRange.parse(tags.get(_SPOKEN_TAG, "")) or ProtocolRange(protocol, protocol)


_METADATA_NAMES = frozenset({"metadata", "metadata.google.internal"})


def refuse_address(address: str, told_by: str) -> str | None:
    """Say in plain words why an address that a member claims isn't dialled, or return None.

    A record can name any address, and every member would dial it: so the cloud's metadata service,
    unspecified and multicast addresses are never dialled, and loopback only when it was told over loopback.

    Args:
        address: ``host:port`` as claimed.
        told_by: IP address of the member that sent it; "" for unknown, which is trusted.
    """
    try:
        parsed = Address.parse(address)
    except UsageError:
        return f"{address[:80]!r} isn't an address"
    if not 1 <= parsed.port <= 65535:
        return f"{address} has no port"
    host = parsed.host.lower()
    ip = ip_of(host)
    if host in _METADATA_NAMES or ip in METADATA_IPS:
        return f"{address} is a metadata address"
    loopback = host == "localhost" or is_loopback(host)
    if loopback and told_by and not is_loopback(told_by):
        return f"{address} is loopback, told by {told_by}"
    if ip is not None and (ip.is_unspecified or ip.is_multicast or ip.is_link_local):
        return f"{address} can't be dialled: it is unspecified, multicast or link-local"
    return None
