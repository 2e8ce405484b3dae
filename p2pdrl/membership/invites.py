"""Invites: how a machine becomes a member without ever holding the swarm's key.

    inviter, a holder of the key                          newcomer
    `Inviter.create` ── one line, by any way ──►          reads it (`InviteLine.parse`)
                     ◄── the secret, its node's key ──    dials the inviter over TLS: node id and authority
                     ── `Grant` ──►                       keeps it, and takes part by TLS like everybody

The secret is good once, and for this inviter alone, which keeps its hash; it is shown to nobody else, for
other members could take it. A newcomer whose answer got lost asks again with the same node key. When the
swarm replaces its key, nodes that were invited ask their inviter for a certificate by the new one; who has
only stolen the old key is on no inviter's list. Revoking a used invite ends that.
"""

from __future__ import annotations

import base64
import binascii
import functools
import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdrl.atomic import storage_error, write_atomic
from p2pdrl.clock import Clock
from p2pdrl.config.node import Role
from p2pdrl.errors import StorageError, UsageError
from p2pdrl.ids import node_id_from_public_key
from p2pdrl.membership.identity import verify
from p2pdrl.transport.certificates import Authority, fingerprint
from p2pdrl.transport.protocol import Address, Refusal

__all__ = [
    "INVITES_FILE",
    "LONGEST_LINE",
    "PREFIX",
    "Grant",
    "InviteLine",
    "Inviter",
    "IssuedInvite",
    "redeem_proof",
    "renew_proof",
    "secret_hash",
]

PREFIX = "p2pdrl://"
INVITES_FILE = "invites.json"
SECRET_BYTES = 16
LONGEST_LINE = 2048
WANTED_LINE = 400
"""Seeds beyond the inviter's own are left out of a line that would be longer."""
MAX_SEEDS = 4
MAX_INVITES = 4096
LONGEST_S = 366 * 86_400.0
LONGEST_MEMBERSHIP_S = 100 * 366 * 86_400.0
_VERSION = 1
_CHECK_BYTES = 4

Raw16 = Annotated[bytes, Meta(min_length=16, max_length=16)]
Raw32 = Annotated[bytes, Meta(min_length=32, max_length=32)]
OperatorName = tuple[Raw32, Annotated[str, Meta(pattern=r"^[A-Za-z0-9_.-]{1,32}$")]]
Seed = Annotated[str, Meta(min_length=3, max_length=260)]


# The line


class InviteLine(msgspec.Struct, frozen=True, array_like=True):
    """What one line tells a newcomer. Holds a secret: show nothing of it but what isn't.

    Attributes:
        secret: good once.
        authority: SHA-256 of the certificate of the swarm's authority.
        inviter: node id of who has made it, the only one that takes the secret; 16 raw bytes.
        swarm: the swarm's id; 8 raw bytes.
        expires_s: wall time of the inviter at which it ends, which that one alone judges.
        roles: all that the newcomer may do; none for no limit.
        seeds: where the inviter listens, then where other members do.
    """

    secret: Raw16
    authority: Raw32
    inviter: Raw16
    swarm: Annotated[bytes, Meta(min_length=8, max_length=8)]
    expires_s: Annotated[int, Meta(ge=0, lt=2**53)]
    roles: Annotated[tuple[Role, ...], Meta(max_length=4)]
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=16)]

    def text(self) -> str:
        """Return it as one line to be pasted somewhere."""
        body = bytes([_VERSION]) + msgspec.msgpack.encode(self)
        text = base64.urlsafe_b64encode(body + _check(body)).rstrip(b"=")
        return PREFIX + text.decode()

    @classmethod
    def parse(cls, text: str) -> InviteLine:
        """Read a line; white space that mail or a terminal has put into it is passed over.

        Raises:
            UsageError: it isn't one, or not whole. What it says isn't repeated: there is a secret in it.
        """
        if len(text) > LONGEST_LINE:
            raise UsageError(f"an invite is one line; this is {len(text)} characters long")
        line = "".join(text.split())
        if not line.startswith(PREFIX):
            raise UsageError(f"that is no invite: copy the whole line that `p2pdrl invite` prints, {PREFIX}…")
        changed = UsageError("the invite isn't whole, or was changed on its way: copy the whole line again")
        try:
            text = line.removeprefix(PREFIX)
            raw = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            raise changed from None
        body, check = raw[:-_CHECK_BYTES], raw[-_CHECK_BYTES:]
        if len(raw) <= _CHECK_BYTES or check != _check(body):
            raise changed
        if body[0] != _VERSION:
            raise UsageError("the invite is of another release: install the same p2pdrl on both machines")
        try:
            found = msgspec.msgpack.decode(body[1:], type=cls)
        except (msgspec.MsgspecError, ValueError, RecursionError):
            raise UsageError(
                "the invite is of another release: install the same p2pdrl on both machines"
            ) from None
        if found.text() != line:
            raise changed  # bits that mean nothing were changed
        for seed in found.seeds:
            Address.parse(seed)
        return found

    def __repr__(self) -> str:
        return f"InviteLine(by {self.inviter.hex()[:8]})"


def _check(body: bytes) -> bytes:
    return hashlib.sha256(b"p2pdrl invite\0" + body).digest()[:_CHECK_BYTES]


def secret_hash(secret: bytes) -> bytes:
    """Return what is kept of a secret."""
    return hashlib.sha256(b"p2pdrl invite secret\0" + secret).digest()


# What a newcomer gets


class Grant(msgspec.Struct, frozen=True):
    """What makes a node a member.

    Attributes:
        swarm: id of the swarm, 16 hex digits.
        certificate: the node's, in DER.
        authorities: certificates of the swarm's authorities (DER) that are good now.
        operators: public keys of those who may command the swarm, and what people call them.
        members: where the inviter and other members listen.
    """

    swarm: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    certificate: Annotated[bytes, Meta(max_length=4096)]
    authorities: Annotated[
        tuple[Annotated[bytes, Meta(max_length=4096)], ...], Meta(min_length=1, max_length=8)
    ]
    operators: Annotated[tuple[OperatorName, ...], Meta(max_length=64)] = ()
    members: Annotated[tuple[Seed, ...], Meta(max_length=16)] = ()


def redeem_proof(inviter_id: str, secret: bytes) -> bytes:
    """The bytes that a newcomer's node signs, to show that the key is its own."""
    return b"p2pdrl redeem\0" + inviter_id.encode() + secret_hash(secret)


def renew_proof(inviter_id: str) -> bytes:
    """The bytes that a node which was invited signs when it asks for a new certificate."""
    return b"p2pdrl renew\0" + inviter_id.encode()


# The inviter


@functools.lru_cache(maxsize=4)
def _authority(key: bytes) -> Authority:
    """Made once: strangers may ask for its certificate."""
    return Authority(key)


class IssuedInvite(msgspec.Struct, frozen=True):
    """One invite as its inviter keeps it; times are its wall times.

    Attributes:
        id: what people call it; no part of the secret.
        secret_hash: of the secret, hex.
        membership_s: how long the certificate is good, from the redemption on; None for ever.
        node_key: public key of the node that has redeemed it, hex; empty before.
        until_s: when that one's certificate ends; None for never.
    """

    id: str
    secret_hash: str
    roles: tuple[Role, ...]
    created_s: float
    expires_s: float
    membership_s: float | None = None
    revoked_s: float | None = None
    node_key: str = ""
    node_name: str = ""
    used_s: float | None = None
    until_s: float | None = None

    def state(self, wall_s: float) -> Literal["open", "used", "expired", "revoked"]:
        """What has become of it."""
        if self.revoked_s is not None:
            return "revoked"
        if self.node_key:
            return "used"
        return "open" if wall_s < self.expires_s else "expired"


class _InvitesFile(msgspec.Struct, frozen=True):
    invites: list[IssuedInvite]


class Inviter:
    """Makes invites, and redeems them; each change is on disk before it counts. Safe in threads.

    Args:
        folder: the node's data folder.
        node_id: ours.
        swarm_id: the swarm's.
        keys: the swarm's keys that are good now, the one that we show first; none where we hold none.
        members: addresses of members, ours first; to be asked in the event loop.
        clock: wall time.
        operators: public keys and names of those who may command the swarm.
        refuse: says why a node isn't let in, by id; None for all others.

    Raises:
        StorageError: the file can't be read.
    """

    def __init__(
        self,
        folder: Path,
        *,
        node_id: str,
        swarm_id: str,
        keys: Callable[[], Sequence[bytes]],
        members: Callable[[], Sequence[str]],
        clock: Clock,
        operators: Callable[[], Sequence[OperatorName]] = tuple,
        refuse: Callable[[str], str | None] = lambda node_id: None,
    ) -> None:
        self._path = folder / INVITES_FILE
        self._node_id = node_id
        self._swarm_id = swarm_id
        self._keys = keys
        self.members = members
        self._clock = clock
        self._operators = operators
        self._refuse = refuse
        self._lock = threading.Lock()
        self._invites = _read(self._path)

    def authorities(self) -> tuple[bytes, ...]:
        """Certificates (DER) of the authorities that are good now, ours first.

        Raises:
            Refusal: 409, this node holds no swarm key.
        """
        keys = self._keys()
        if not keys:
            raise Refusal(409, "this node holds no swarm key, so it can't invite: ask one that does")
        return tuple(_authority(key).certificate for key in keys)

    def create(
        self,
        roles: Collection[Role],
        expires_s: float,
        membership_s: float | None = None,
        *,
        members: Sequence[str],
    ) -> tuple[IssuedInvite, InviteLine]:
        """Make an invite.

        Args:
            roles: all that the newcomer may do; none for no limit.
            expires_s: how long it can be redeemed.
            membership_s: how long the newcomer's certificate is good; None for ever.
            members: addresses to dial, ours first.

        Raises:
            Refusal: this node can't invite (409), or a bad argument (400).
            StorageError: it can't be kept.
        """
        if not 0 < expires_s <= LONGEST_S:
            raise Refusal(400, f"an invite is good for more than 0 s and at most {LONGEST_S:.0f} s")
        if membership_s is not None and not 0 < membership_s <= LONGEST_MEMBERSHIP_S:
            raise Refusal(400, "a membership lasts for more than 0 s and at most a hundred years")
        authority = self.authorities()[0]
        secret, wall_s = secrets.token_bytes(SECRET_BYTES), self._clock.wall()
        hashed = secret_hash(secret)
        kept = IssuedInvite(
            hashlib.sha256(b"p2pdrl invite id\0" + hashed).hexdigest()[:8],
            hashed.hex(),
            tuple(sorted(set(roles))),
            wall_s,
            wall_s + expires_s,
            membership_s,
        )
        with self._lock:
            self._make_room(wall_s)
            self._put(kept)
        seeds = tuple(dict.fromkeys(members))[:MAX_SEEDS]
        while True:
            invite = InviteLine(
                secret,
                fingerprint(authority),
                bytes.fromhex(self._node_id),
                bytes.fromhex(self._swarm_id),
                int(kept.expires_s),
                kept.roles,
                seeds,
            )
            if len(seeds) == 1 or len(invite.text()) < WANTED_LINE:
                return kept, invite
            seeds = seeds[:-1]

    def all(self) -> list[IssuedInvite]:
        """Every invite that is remembered, the oldest first."""
        with self._lock:
            return sorted(self._invites.values(), key=lambda kept: kept.created_s)

    def revoke(self, name: str) -> IssuedInvite:
        """Let an invite be redeemed no more, nor its node's certificate renewed; return what it was before.

        Raises:
            Refusal: 404, there is none with this id.
            StorageError: it can't be kept.
        """
        with self._lock:
            found = next((kept for kept in self._invites.values() if kept.id == name), None)
            if found is None:
                raise Refusal(404, f"there is no invite {name[:40]!r}: see `p2pdrl invite list`")
            if found.revoked_s is None:
                self._put(msgspec.structs.replace(found, revoked_s=self._clock.wall()))
            return found

    def redeem(
        self, secret: bytes, public_key: bytes, name: str, proof: bytes, *, members: Sequence[str]
    ) -> Grant:
        """Make a newcomer a member.

        Args:
            public_key: of its node, 32 raw bytes.
            name: what people call it.
            proof: its signature of `redeem_proof`.
            members: addresses to dial, ours first.

        Raises:
            Refusal: 403, 409 or 410 with the reason; 400 for a bad proof.
            StorageError: it can't be kept, so it isn't done.
        """
        if not verify(public_key, proof, redeem_proof(self._node_id, secret)):
            raise Refusal(400, "the request isn't signed by the key that it names")
        node_key, wall_s = public_key.hex(), self._clock.wall()
        with self._lock:
            kept = self._invites.get(secret_hash(secret).hex())
            if kept is None:
                raise Refusal(403, "this node has given no such invite: ask for another")
            if kept.revoked_s is not None:
                raise Refusal(410, "the invite was revoked: ask for another")
            if kept.node_key not in ("", node_key):
                raise Refusal(409, "the invite was used already, by another node: ask for one of your own")
            if not kept.node_key and wall_s >= kept.expires_s:
                raise Refusal(410, "the invite has expired: ask for another")
            self._check_node(public_key)
            if not kept.node_key:
                until_s = None if kept.membership_s is None else wall_s + kept.membership_s
                kept = msgspec.structs.replace(
                    kept, node_key=node_key, node_name=name[:64], used_s=wall_s, until_s=until_s
                )
                self.authorities()  # before it counts as used
                self._put(kept)
        return self._grant(public_key, kept, members)

    def renew(self, public_key: bytes, proof: bytes, *, members: Sequence[str]) -> Grant:
        """Return what a node that was invited here needs now.

        Raises:
            Refusal: 400 for a bad proof; 403 or 410 for a node that isn't a member by an invite of ours.
        """
        if not verify(public_key, proof, renew_proof(self._node_id)):
            raise Refusal(400, "the request isn't signed by the key that it names")
        with self._lock:
            used = [kept for kept in self._invites.values() if kept.node_key == public_key.hex()]
        if not used:
            raise Refusal(403, "this node hasn't invited yours")
        good = [kept for kept in used if kept.revoked_s is None]
        if not good:
            raise Refusal(410, "the invite of your node was revoked")
        self._check_node(public_key)
        kept = max(good, key=lambda kept: kept.used_s or 0.0)
        if kept.until_s is not None and self._clock.wall() >= kept.until_s:
            raise Refusal(410, "the membership of your node has ended")
        return self._grant(public_key, kept, members)

    def _check_node(self, public_key: bytes) -> None:
        why = self._refuse(node_id_from_public_key(public_key))
        if why is not None:
            raise Refusal(403, why)

    def _grant(self, public_key: bytes, kept: IssuedInvite, members: Sequence[str]) -> Grant:
        authorities = self.authorities()
        certificate = _authority(self._keys()[0]).certify(public_key, kept.roles or None, kept.until_s)
        addresses = tuple(dict.fromkeys(members))[:MAX_SEEDS]
        return Grant(self._swarm_id, certificate, authorities, tuple(self._operators()), addresses)

    def _make_room(self, wall_s: float) -> None:
        """Forget the oldest that is good for nothing any more, where there are too many."""
        if len(self._invites) < MAX_INVITES:
            return
        idle = [kept for kept in self._invites.values() if kept.state(wall_s) in ("expired", "revoked")]
        if not idle:
            raise Refusal(409, f"{len(self._invites)} invites are open or in use: revoke some")
        del self._invites[min(idle, key=lambda kept: kept.created_s).secret_hash]

    def _put(self, kept: IssuedInvite) -> None:
        """Keep one, on disk first.

        Raises:
            StorageError: the disk doesn't take it; nothing has changed.
        """
        wanted = {**self._invites, kept.secret_hash: kept}
        content = msgspec.json.format(msgspec.json.encode(_InvitesFile(list(wanted.values()))))
        try:
            write_atomic(self._path, content)
        except OSError as error:
            raise storage_error("write", self._path, error) from error
        self._invites = wanted


def _read(path: Path) -> dict[str, IssuedInvite]:
    try:
        content = path.read_bytes() if path.exists() else b'{"invites": []}'
        kept = msgspec.json.decode(content, type=_InvitesFile).invites
    except OSError as error:
        raise storage_error("read", path, error) from error
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise StorageError(
            f"{path} is damaged: move it away; open invites and those in use are forgotten then"
        ) from None
    return {one.secret_hash: one for one in kept[:MAX_INVITES]}
