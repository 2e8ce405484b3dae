"""Mutual TLS 1.3 between the nodes of a swarm: who holds the key is in, and each is who it says.

The swarm key yields the key of a certificate authority (HKDF-SHA256, RFC 5869), and every node signs its own
certificate with it: that proves membership, and the handshake proves the node's Ed25519 key, whose hash is
the node id. So the id on a connection needn't be believed; `SwarmTls.node_id_of` tells it. Certificates don't
expire: clocks of home machines can't be trusted, and what a swarm replaces is its key. While it does
(`p2pdrl key rotate`), certificates of both are good.

    tls = SwarmTls(private_key, [swarm_key])
    Listener(…).listen(app, …, tls=tls)      HttpTransport(…, tls=tls)
"""

from __future__ import annotations

import datetime as dt
import functools
import hashlib
import os
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from p2pdrl.ids import node_id_from_public_key

__all__ = ["SwarmTls", "client_context"]

_BEGIN = dt.datetime(1970, 1, 2, tzinfo=dt.UTC)
_END = dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)  # RFC 5280, 4.1.2.5: no end


class _Authority:
    """The certificate authority that follows from a swarm key; whoever has the key is it."""

    def __init__(self, swarm_key: bytes) -> None:
        derived = HKDF(SHA256(), 32, salt=None, info=b"p2pdrl v1 certificate authority").derive(swarm_key)
        self._key = Ed25519PrivateKey.from_private_bytes(derived)
        # Authorities of other keys have other names, or OpenSSL tries one of several with the same.
        public = self._key.public_key().public_bytes_raw()
        self._name = _name(f"p2pdrl swarm {hashlib.sha256(public).hexdigest()[:16]}")
        own = x509.KeyUsage(False, False, False, False, False, True, False, False, False)
        builder = _builder(self._name, self._name, self._key.public_key())
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        self.certificate = builder.add_extension(own, critical=True).sign(self._key, None)

    def certify(self, public_key: Ed25519PublicKey) -> x509.Certificate:
        """Return the certificate of the node with this key."""
        node_id = node_id_from_public_key(public_key.public_bytes_raw())
        own = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        both = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH])
        builder = _builder(_name(node_id), self._name, public_key)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(own, critical=True).add_extension(both, critical=False)
        identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        return builder.add_extension(identifier, critical=False).sign(self._key, None)


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(subject: x509.Name, issuer: x509.Name, public_key: Ed25519PublicKey) -> x509.CertificateBuilder:
    """A certificate that is the same whoever makes it: its serial number follows from its key."""
    raw = public_key.public_bytes_raw()
    serial = int.from_bytes(hashlib.sha256(raw + issuer.public_bytes()).digest()[:16], "big") | 1
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public_key)
    builder = builder.serial_number(serial).not_valid_before(_BEGIN).not_valid_after(_END)
    identifier = x509.SubjectKeyIdentifier.from_public_key(public_key)
    return builder.add_extension(identifier, critical=False)


class SwarmTls:
    """One node's half of every TLS connection.

    Args:
        private_key: 32 raw bytes of its Ed25519 key.
        swarm_keys: the swarm's; certificates by any of them are good, and ours is by the first.

    Attributes:
        node_id: that of the private key.
        server: context for connections that come in. Callers without a certificate come through, too, for
            the API has credentials of its own: `node_id_of` is None for them.
        client: context for connections to peers.
    """

    def __init__(self, private_key: bytes, swarm_keys: Sequence[bytes]) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self.node_id = node_id_from_public_key(self._key.public_key().public_bytes_raw())
        self.use(swarm_keys)

    def use(self, swarm_keys: Sequence[bytes]) -> None:
        """Take these keys, and no others, from the next connection on.

        Raises:
            OSError: they can't be handed to OpenSSL; those before stay.
        """
        authorities = [_Authority(key) for key in swarm_keys]
        mine = authorities[0].certify(self._key.public_key())
        good = "".join(_pem(authority.certificate) for authority in authorities)
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.verify_mode = ssl.CERT_OPTIONAL
        server.num_tickets = 0  # a resumed session would prove nobody's key
        client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False  # ids are what is checked
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_verify_locations(cadata=good)
            _load(context, mine, self._key)
        self.server, self.client = server, client

    @staticmethod
    def node_id_of(connection: ssl.SSLObject | None) -> str | None:
        """Return the id of the node at the other end; None without TLS, or where it shows no certificate."""
        shown = connection.getpeercert(binary_form=True) if connection is not None else None
        return _node_id(shown) if shown is not None else None


@functools.lru_cache(maxsize=4096)
def _node_id(certificate: bytes) -> str | None:
    try:
        key = x509.load_der_x509_certificate(certificate).public_key()
    except Exception:  # noqa: BLE001 - the library has several; OpenSSL took it, and it is nobody's that we know
        return None
    return node_id_from_public_key(key.public_bytes_raw()) if isinstance(key, Ed25519PublicKey) else None


def client_context(swarm_keys: Sequence[bytes]) -> ssl.SSLContext:
    """Return a context for callers of the API that hold a swarm key: it believes members of the swarm."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_verify_locations(cadata="".join(_pem(_Authority(key).certificate) for key in swarm_keys))
    return context


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _load(context: ssl.SSLContext, certificate: x509.Certificate, key: Ed25519PrivateKey) -> None:
    """Give a context its certificate and key, which the ssl module takes from a file alone."""
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    content = secret + _pem(certificate).encode()
    if hasattr(os, "memfd_create"):  # never on a disk
        descriptor = os.memfd_create("p2pdrl", os.MFD_CLOEXEC)
        with os.fdopen(descriptor, "wb", buffering=0) as memory:
            memory.write(content)
            context.load_cert_chain(f"/proc/self/fd/{descriptor}")
        return
    descriptor, path = tempfile.mkstemp(prefix="p2pdrl-")  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        context.load_cert_chain(path)
    finally:
        Path(path).unlink()
