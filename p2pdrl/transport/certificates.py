"""Membership certificates: a swarm's authority vouches for a node's key, and for the roles it may have.

The swarm key yields the key of a certificate authority (HKDF-SHA256, RFC 5869), so whoever holds the swarm
key is the authority. A holder's node certifies itself, without limits. A node that was invited is certified
by the holder that has invited it; the roles that its invite allows are the organizational units of the
certificate's subject, and with none of them there is no limit. Certificates don't end unless the invite says
so: clocks of home machines can't be trusted, and what a swarm replaces is its key.
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2pdrl.ids import node_id_from_public_key

__all__ = [
    "Authority",
    "CertifiedRoles",
    "Credentials",
    "NodeCertificate",
    "fingerprint",
    "is_issued_by",
    "read_certificate",
    "to_pem",
]

_BEGIN = dt.datetime(1970, 1, 2, tzinfo=dt.UTC)
_END = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)  # RFC 5280, 4.1.2.5: no end


class Authority:
    """The certificate authority that follows from a swarm key; whoever has the key is it.

    Attributes:
        certificate: its own, in DER; the same whoever makes it.
    """

    def __init__(self, swarm_key: bytes) -> None:
        derived = HKDF(SHA256(), 32, salt=None, info=b"p2pdrl v1 certificate authority").derive(swarm_key)
        self._key = Ed25519PrivateKey.from_private_bytes(derived)
        # Authorities of other keys have other names, or OpenSSL tries one of several with the same.
        public = self._key.public_key().public_bytes_raw()
        self._name = x509.Name([_common(f"p2pdrl swarm {hashlib.sha256(public).hexdigest()[:16]}")])
        own = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
        builder = _builder(self._name, self._name, self._key.public_key(), _END)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        signed = builder.add_extension(own, critical=True).sign(self._key, None)
        self.certificate = signed.public_bytes(serialization.Encoding.DER)

    def certify(
        self, public_key: bytes, roles: Collection[str] | None = None, until_s: float | None = None
    ) -> bytes:
        """Return the certificate (DER) of the node with this key.

        Args:
            public_key: 32 raw bytes of its Ed25519 key.
            roles: all that it may have; None for no limit.
            until_s: wall time at which it ends; None for no end.

        Raises:
            ValueError: no role is left, the key is none, or the time is beyond all calendars.
        """
        if roles is not None and not roles:
            raise ValueError("a certificate that allows no role is of no use")
        node_id = node_id_from_public_key(public_key)
        units = [x509.NameAttribute(NameOID.ORGANIZATIONAL_UNIT_NAME, role) for role in sorted(roles or ())]
        end = _END if until_s is None else dt.datetime.fromtimestamp(int(until_s), dt.UTC)
        key = Ed25519PublicKey.from_public_bytes(public_key)
        own = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _builder(x509.Name([_common(node_id), *units]), self._name, key, end)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(own, critical=True).add_extension(both, critical=False)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        signed = builder.add_extension(identifier, critical=False).sign(self._key, None)
        return signed.public_bytes(serialization.Encoding.DER)


def _common(name: str) -> x509.NameAttribute[str]:
    return x509.NameAttribute(NameOID.COMMON_NAME, name)


def _builder(
    subject: x509.Name, issuer: x509.Name, public_key: Ed25519PublicKey, end: dt.datetime
) -> x509.CertificateBuilder:
    """A certificate that is the same whoever makes it: its serial number follows from what it says."""
    content = public_key.public_bytes_raw() + issuer.public_bytes()
    if len(list(subject)) > 1 or end != _END:
        content += subject.public_bytes() + end.isoformat().encode()
    serial = int.from_bytes(hashlib.sha256(content).digest()[:16], "big") | 1
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
    builder = builder.serial_number(serial).not_valid_before(_BEGIN).not_valid_after(end)
    identifier = x509.SubjectKeyIdentifier.from_public_key(public_key)
    return builder.add_extension(identifier, critical=False)


class NodeCertificate(NamedTuple):
    """What a node's certificate says.

    Args:
        public_key: 32 raw bytes.
        roles: all that the node may have; None for no limit.
        until_s: wall time at which it ends; None for no end.
    """

    node_id: str
    public_key: bytes
    roles: frozenset[str] | None
    until_s: float | None

    def has_ended(self, wall_s: float) -> bool:
        """Whether its time is over; a handshake sees that, and connections outlive it."""
        return self.until_s is not None and wall_s >= self.until_s


@functools.lru_cache(maxsize=4096)
def read_certificate(certificate: bytes) -> NodeCertificate | None:
    """Read a node's certificate (DER) that its authority's signature was found on; None where it is none."""
    try:
        read = x509.load_der_x509_certificate(certificate)
        key = read.public_key()
        units = read.subject.get_attributes_for_oid(NameOID.ORGANIZATIONAL_UNIT_NAME)
        roles = frozenset(str(unit.value) for unit in units) if units else None
        end = read.not_valid_after_utc
    except Exception:  # noqa: BLE001 - the library has several; OpenSSL took it, and it is nobody's that we know
        return None
    if not isinstance(key, Ed25519PublicKey):
        return None
    raw = key.public_bytes_raw()
    until_s = None if end == _END else end.timestamp()
    return NodeCertificate(node_id_from_public_key(raw), raw, roles, until_s)


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a node shows, and whom it believes; certificates in DER.

    Attributes:
        certificate: its own.
        authorities: those whose certificates are good.
    """

    certificate: bytes
    authorities: tuple[bytes, ...]

    @classmethod
    def of_keys(cls, public_key: bytes, swarm_keys: Sequence[bytes]) -> Credentials:
        """Return those of a holder of the swarm's keys, of which the first certifies it."""
        authorities = [Authority(key) for key in swarm_keys]
        return cls(
            authorities[0].certify(public_key), tuple(authority.certificate for authority in authorities)
        )


class CertifiedRoles:
    """Roles to which certificates limit nodes, as connections have shown; nodes without limits aren't kept.

    Args:
        capacity: nodes kept; the one seen longest ago goes first.
    """

    def __init__(self, capacity: int = 8192) -> None:
        self._capacity = capacity
        self._roles: OrderedDict[str, frozenset[str]] = OrderedDict()

    def note(self, shown: NodeCertificate) -> None:
        """Keep what a node has shown, in place of what it showed before."""
        self._roles.pop(shown.node_id, None)
        if shown.roles is not None:
            self._roles[shown.node_id] = shown.roles
            if len(self._roles) > self._capacity:
                self._roles.popitem(last=False)

    def get(self, node_id: str) -> frozenset[str] | None:
        """Return all roles that a node may have; None without a limit, or while it has shown nothing."""
        return self._roles.get(node_id)


def is_issued_by(certificate: bytes, authority: bytes) -> bool:
    """Tell whether a certificate is signed by the authority of another (DER)."""
    try:
        issuer = x509.load_der_x509_certificate(authority)
        x509.load_der_x509_certificate(certificate).verify_directly_issued_by(issuer)
        return issuer.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    except Exception:  # noqa: BLE001 - the library has several for what is malformed or badly signed
        return False


def fingerprint(certificate: bytes) -> bytes:
    """Return the SHA-256 of a certificate (DER)."""
    return hashlib.sha256(certificate).digest()


def to_pem(certificate: bytes) -> str:
    """Return a certificate (DER) as OpenSSL takes it.

    Raises:
        ValueError: it isn't one.
    """
    return (
        x509.load_der_x509_certificate(certificate).public_bytes(serialization.Encoding.PEM).decode("ascii")
    )
