"""Mutual TLS 1.3 between the nodes of a swarm: who is certified is in, and each is who it says.

A certificate proves membership (see `certificates`), and the handshake proves the node's Ed25519 key, whose
hash is the node id. So the id on a connection needn't be believed; `SwarmTls.shown_by` tells it, and the
roles that the node may have. While a swarm replaces its key (`p2pdrl key rotate`), certificates by both are
good.

    tls = SwarmTls(private_key, [swarm_key])
    Listener(…).listen(app, …, tls=tls)      HttpTransport(…, tls=tls)
"""

from __future__ import annotations

import os
import ssl
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from p2pdrl.ids import node_id_from_public_key
from p2pdrl.transport.certificates import Authority, Credentials, NodeCertificate, read_certificate, to_pem

__all__ = ["SwarmTls", "authority_context", "client_context", "unproven_context"]


class SwarmTls:
    """One node's half of every TLS connection.

    Args:
        private_key: 32 raw bytes of its Ed25519 key.
        credentials: the swarm's keys, of which certificates by any are good, and ours is by the first; or
            what a node that holds none was given.

    Attributes:
        node_id: that of the private key.
        server: context for connections that come in. Callers without a certificate come through, too, for
            the API has credentials of its own: `shown_by` is None for them.
        client: context for connections to peers.
    """

    def __init__(self, private_key: bytes, credentials: Sequence[bytes] | Credentials) -> None:
        self._key = Ed25519PrivateKey.from_private_bytes(private_key)
        self._public_key = self._key.public_key().public_bytes_raw()
        self.node_id = node_id_from_public_key(self._public_key)
        self.use(credentials)

    def use(self, credentials: Sequence[bytes] | Credentials) -> None:
        """Take these keys or certificates, and no others, from the next connection on.

        Raises:
            OSError: they can't be handed to OpenSSL; those before stay.
        """
        if not isinstance(credentials, Credentials):
            credentials = Credentials.of_keys(self._public_key, credentials)
        mine = to_pem(credentials.certificate)
        good = "".join(map(to_pem, credentials.authorities))
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
    def shown_by(connection: ssl.SSLObject | ssl.SSLSocket | None) -> NodeCertificate | None:
        """Return what the certificate at the other end says; None without TLS, or where it shows none."""
        shown = connection.getpeercert(binary_form=True) if connection is not None else None
        return read_certificate(shown) if shown is not None else None


def client_context(swarm_keys: Sequence[bytes]) -> ssl.SSLContext:
    """Return a context for callers of the API that hold a swarm key: it believes members of the swarm."""
    return authority_context([Authority(key).certificate for key in swarm_keys])


def authority_context(authorities: Sequence[bytes]) -> ssl.SSLContext:
    """Return a context for callers without a certificate: it believes whom these (DER) have certified."""
    context = unproven_context()
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata="".join(map(to_pem, authorities)))
    return context


def unproven_context() -> ssl.SSLContext:
    """Return a context for callers who know of no authority yet.

    What the other end shows proves that it holds that certificate's key, so its node id, and no membership.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context


def _load(context: ssl.SSLContext, certificate: str, key: Ed25519PrivateKey) -> None:
    """Give a context its certificate and key, which the ssl module takes from a file alone."""
    secret = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    content = secret + certificate.encode()
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
