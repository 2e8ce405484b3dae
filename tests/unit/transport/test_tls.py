"""Who may speak to whom over TLS: handshakes in memory."""

from __future__ import annotations

import datetime as dt
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.types import CertificateIssuerPrivateKeyTypes
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from cryptography.x509.oid import NameOID

from p2pdrl.ids import node_id_from_public_key
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.tls import SwarmTls, client_context

KEY, NEW = b"the swarm's key", b"its next key"
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)


class End:
    """One end of a TLS connection whose bytes stay in memory."""

    def __init__(self, context: ssl.SSLContext, *, server: bool) -> None:
        self.came, self.sent = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.connection = context.wrap_bio(self.came, self.sent, server_side=server)
        self.done = False

    def go_on(self) -> None:
        try:
            if not self.done:
                self.connection.do_handshake()
                self.done = True
        except ssl.SSLWantReadError:
            pass


def connected(server: ssl.SSLContext, client: ssl.SSLContext) -> tuple[End, End]:
    """Shake hands, then say a word each way; raises ``ssl.SSLError`` when either end refuses."""
    ends = End(server, server=True), End(client, server=False)
    for _ in range(4):
        for end, other in (ends[::-1], ends):
            end.go_on()
            other.came.write(end.sent.read())
    assert all(end.done for end in ends)
    for end, other in (ends, ends[::-1]):
        end.connection.write(b"word")
        other.came.write(end.sent.read())
        assert other.connection.read(10) == b"word"
    return ends


def node_id_of(connection: ssl.SSLObject | None) -> str | None:
    """Who is at the other end."""
    shown = SwarmTls.shown_by(connection)
    return None if shown is None else shown.node_id


def shown_to(context: ssl.SSLContext, server: bool) -> bytes:
    """The certificate that the other end of a connection shows."""
    theirs = BOB.tls([KEY])
    ends = connected(theirs.server, context) if server else connected(context, theirs.client)
    shown = ends[0 if server else 1].connection.getpeercert(binary_form=True)
    assert shown is not None
    return shown


def test_each_end_proves_which_node_it_is() -> None:
    server, client = connected(BOB.tls([KEY]).server, ALICE.tls([KEY]).client)
    assert node_id_of(server.connection) == ALICE.node_id
    assert node_id_of(client.connection) == BOB.node_id
    assert server.connection.version() == "TLSv1.3"
    assert ALICE.tls([KEY]).node_id == ALICE.node_id


def test_a_node_may_call_itself() -> None:
    tls = ALICE.tls([KEY])
    for end in connected(tls.server, tls.client):
        assert node_id_of(end.connection) == ALICE.node_id


def test_without_a_certificate_a_caller_is_nobody() -> None:
    server, client = connected(BOB.tls([KEY]).server, client_context([KEY]))
    assert node_id_of(server.connection) is None
    assert node_id_of(client.connection) == BOB.node_id
    assert node_id_of(None) is None


def test_another_key_is_refused_by_the_caller() -> None:
    for client in (ALICE.tls([b"another"]).client, client_context([b"another"]), client_context([b"x", NEW])):
        with pytest.raises(ssl.SSLCertVerificationError):
            connected(BOB.tls([KEY]).server, client)


def test_another_key_is_refused_by_the_callee() -> None:
    """Also when the caller believes the callee."""
    with pytest.raises(ssl.SSLCertVerificationError):
        connected(BOB.tls([KEY]).server, ALICE.tls([b"another", KEY]).client)


# Replacing a key

ROTATION = [[KEY], [KEY, NEW], [NEW, KEY], [NEW]]
"""What each node holds, one after another."""


@pytest.mark.parametrize("one", range(4))
@pytest.mark.parametrize("other", range(4))
def test_nodes_one_step_apart_believe_each_other(one: int, other: int) -> None:
    server, client = BOB.tls(ROTATION[one]).server, ALICE.tls(ROTATION[other]).client
    if abs(one - other) <= 1:
        ends = connected(server, client)
        assert [node_id_of(end.connection) for end in ends] == [ALICE.node_id, BOB.node_id]
    else:
        with pytest.raises(ssl.SSLError):
            connected(server, client)


def test_callers_of_the_api_know_either_key_too() -> None:
    for keys in ROTATION:
        connected(BOB.tls(keys).server, client_context([NEW, KEY]))


def test_using_other_keys_replaces_all() -> None:
    tls, old = BOB.tls([KEY]), ALICE.tls([KEY])
    connected(tls.server, old.client)
    tls.use([NEW, KEY])
    assert tls.node_id == BOB.node_id
    connected(tls.server, ALICE.tls([KEY, NEW]).client)
    with pytest.raises(ssl.SSLError):
        connected(tls.server, old.client)
    tls.use([NEW])
    for contexts in ((tls.server, old.client), (old.server, tls.client)):
        with pytest.raises(ssl.SSLError):
            connected(*contexts)
    connected(tls.server, ALICE.tls([NEW]).client)


# Certificates


def test_a_certificate_is_the_same_whoever_makes_it() -> None:
    shown = {shown_to(ALICE.tls([KEY]).client, True) for _ in range(2)}
    shown.add(shown_to(ALICE.tls([KEY]).server, False))
    assert len(shown) == 1
    assert shown_to(ALICE.tls([KEY, NEW]).client, True) in shown


def test_certificates_do_not_end() -> None:
    certificate = x509.load_der_x509_certificate(shown_to(ALICE.tls([KEY]).client, True))
    assert certificate.not_valid_before_utc == dt.datetime(1970, 1, 2, tzinfo=dt.UTC)
    assert certificate.not_valid_after_utc == dt.datetime(9999, 12, 31, 23, 59, 59, tzinfo=dt.UTC)


def test_a_certificate_tells_nothing_but_key_and_id() -> None:
    certificate = x509.load_der_x509_certificate(shown_to(ALICE.tls([KEY]).client, True))
    assert [name.value for name in certificate.subject] == [ALICE.node_id]
    key = certificate.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    assert key == ALICE.public_key


def authority(swarm_key: bytes) -> Ed25519PrivateKey:
    """By hand: nodes of different releases have to agree, and whoever holds the key can do this."""
    info = b"p2pdrl v1 certificate authority"
    return Ed25519PrivateKey.from_private_bytes(HKDF(SHA256(), 32, salt=None, info=info).derive(swarm_key))


def issuer_of(swarm_key: bytes) -> x509.Name:
    (certificate,) = client_context([swarm_key]).get_ca_certs(binary_form=True)
    return x509.load_der_x509_certificate(certificate).subject


def forged(
    tmp_path: Path,
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey,
    subject: str,
    issuer: x509.Name,
    signer: CertificateIssuerPrivateKeyTypes,
    chain: bytes = b"",
) -> ssl.SSLContext:
    """A caller with a certificate that isn't made as nodes make them."""
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(issuer).public_key(key.public_key())
    builder = builder.not_valid_before(dt.datetime(1970, 1, 2, tzinfo=dt.UTC)).serial_number(7)
    builder = builder.not_valid_after(dt.datetime(9999, 1, 1, tzinfo=dt.UTC))
    algorithm = None if isinstance(signer, Ed25519PrivateKey) else SHA256()
    certificate = builder.sign(signer, algorithm)
    context = client_context([KEY])
    load(context, tmp_path, key, certificate.public_bytes(serialization.Encoding.PEM) + chain)
    return context


def load(
    context: ssl.SSLContext,
    tmp_path: Path,
    key: Ed25519PrivateKey | ec.EllipticCurvePrivateKey,
    certificates: bytes,
) -> None:
    encoding, no_password = serialization.Encoding.PEM, serialization.NoEncryption()
    secret = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, no_password)
    path = tmp_path / "chain.pem"
    path.write_bytes(secret + certificates)
    context.load_cert_chain(path)


def test_the_authority_follows_from_the_swarm_key() -> None:
    (certificate,) = client_context([KEY]).get_ca_certs(binary_form=True)
    assert x509.load_der_x509_certificate(certificate).public_key() == authority(KEY).public_key()


def test_a_certificate_is_of_no_use_without_its_key(tmp_path: Path) -> None:
    certificate = x509.load_der_x509_certificate(shown_to(ALICE.tls([KEY]).client, True))
    pem = certificate.public_bytes(serialization.Encoding.PEM)
    with pytest.raises(ssl.SSLError, match="KEY_VALUES_MISMATCH"):
        load(client_context([KEY]), tmp_path, Ed25519PrivateKey.generate(), pem)


def test_the_key_alone_tells_who_it_is(tmp_path: Path) -> None:
    """A holder of the swarm key can write any name into a certificate, and is itself all the same."""
    key = Ed25519PrivateKey.generate()
    liar = forged(tmp_path, key, ALICE.node_id, issuer_of(KEY), authority(KEY))
    server, _ = connected(BOB.tls([KEY]).server, liar)
    itself = node_id_from_public_key(key.public_key().public_bytes_raw())
    assert node_id_of(server.connection) == itself != ALICE.node_id


def test_keys_of_another_kind_are_nobodys(tmp_path: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    liar = forged(tmp_path, key, ALICE.node_id, issuer_of(KEY), authority(KEY))
    server, _ = connected(BOB.tls([KEY]).server, liar)
    assert node_id_of(server.connection) is None


def test_who_signs_itself_is_refused(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    for issuer in (issuer_of(KEY), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, ALICE.node_id)])):
        liar = forged(tmp_path, key, ALICE.node_id, issuer, key)
        with pytest.raises(ssl.SSLCertVerificationError):
            connected(BOB.tls([KEY]).server, liar)


def test_a_member_without_the_swarm_key_vouches_for_nobody(tmp_path: Path) -> None:
    members = x509.load_der_x509_certificate(shown_to(ALICE.tls([KEY]).client, True))
    signer, chain = (
        Ed25519PrivateKey.from_private_bytes(b"a" * 32),
        members.public_bytes(serialization.Encoding.PEM),
    )
    liar = forged(tmp_path, Ed25519PrivateKey.generate(), "x", members.subject, signer, chain)
    with pytest.raises(ssl.SSLCertVerificationError):
        connected(BOB.tls([KEY]).server, liar)


# Of TLS itself


@pytest.mark.parametrize("side", ["server", "client"])
def test_older_versions_are_refused(side: str) -> None:
    server, client = BOB.tls([KEY]).server, ALICE.tls([KEY]).client
    old = server if side == "server" else client
    old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        connected(server, client)
    api = client_context([KEY])
    api.minimum_version = api.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        connected(BOB.tls([KEY]).server, api)


def test_no_session_can_be_resumed() -> None:
    """A resumed one would prove nobody's key."""
    _, client = connected(BOB.tls([KEY]).server, ALICE.tls([KEY]).client)
    assert client.connection.session is None or not client.connection.session.has_ticket


def test_the_private_key_stays_in_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    ALICE.tls([KEY]).use([NEW])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shown", [b"", b"no certificate", b"\x30\x03\x02\x01\x05"])
def test_a_certificate_that_cant_be_read_is_nobodys(shown: bytes) -> None:
    """OpenSSL takes some that other libraries don't; a member could end its peers by one."""

    class Odd:
        def getpeercert(self, binary_form: bool = False) -> bytes:
            return shown

    assert node_id_of(Odd()) is None  # type: ignore[arg-type]
