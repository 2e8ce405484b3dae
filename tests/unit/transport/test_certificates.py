"""What certificates say, who has signed them, and what TLS makes of it."""

from __future__ import annotations

import datetime as dt
import ssl

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID

from p2pdrl.membership.identity import Identity
from p2pdrl.transport.certificates import (
    Authority,
    CertifiedRoles,
    Credentials,
    NodeCertificate,
    fingerprint,
    is_issued_by,
    read_certificate,
)
from p2pdrl.transport.tls import SwarmTls, authority_context, unproven_context

from .test_tls import connected

KEY, NEW = b"the swarm's key", b"its next key"
ALICE, BOB = Identity(b"a" * 32), Identity(b"b" * 32)
ACTOR = frozenset({"actor"})


def invited(
    who: Identity, key: bytes = KEY, roles: frozenset[str] | None = ACTOR, until_s: float | None = None
) -> Credentials:
    """What a node holds that was invited by a holder of ``key``."""
    authority = Authority(key)
    return Credentials(authority.certify(who.public_key, roles, until_s), (authority.certificate,))


@pytest.mark.parametrize("roles", [None, ACTOR, frozenset({"learner", "server", "actor"})])
@pytest.mark.parametrize("until_s", [None, 4_000_000_000.0])
def test_a_certificate_says_what_was_put_into_it(roles: frozenset[str] | None, until_s: float | None) -> None:
    found = read_certificate(Authority(KEY).certify(ALICE.public_key, roles, until_s))
    assert found == NodeCertificate(ALICE.node_id, ALICE.public_key, roles, until_s)


def test_a_certificate_that_allows_nothing_is_not_made() -> None:
    with pytest.raises(ValueError, match="no role"):
        Authority(KEY).certify(ALICE.public_key, ())


def test_one_content_one_certificate_and_one_serial_number() -> None:
    """OpenSSL and people tell certificates of one issuer apart by their serial numbers."""
    contents = [(None, None), (ACTOR, None), ({"learner"}, None), (ACTOR, 4e9), (None, 4e9)]
    made = [Authority(KEY).certify(ALICE.public_key, *content) for content in contents]
    assert made == [Authority(KEY).certify(ALICE.public_key, *content) for content in contents]
    assert len({x509.load_der_x509_certificate(one).serial_number for one in made}) == len(contents)


def test_who_has_signed_can_be_told() -> None:
    old, new = Authority(KEY).certificate, Authority(NEW).certificate
    certificate = invited(ALICE).certificate
    assert is_issued_by(certificate, old)
    assert not is_issued_by(certificate, new)
    assert not is_issued_by(certificate, certificate)
    for junk in (b"", b"junk", certificate[:-1], certificate + b"\0"):
        assert not is_issued_by(junk, old)
        assert not is_issued_by(certificate, junk)


def test_a_member_cannot_vouch_by_its_own_key() -> None:
    """Its certificate isn't one of an authority, so what it signs is issued by nobody."""
    theirs = x509.load_der_x509_certificate(invited(ALICE, roles=None).certificate)
    key = Ed25519PrivateKey.from_private_bytes(b"a" * 32)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    builder = x509.CertificateBuilder().subject_name(name).issuer_name(theirs.subject).serial_number(7)
    builder = builder.public_key(Ed25519PrivateKey.from_private_bytes(b"c" * 32).public_key())
    builder = builder.not_valid_before(dt.datetime(2000, 1, 1, tzinfo=dt.UTC))
    signed = builder.not_valid_after(dt.datetime(9999, 1, 1, tzinfo=dt.UTC)).sign(key, None)
    assert not is_issued_by(signed.public_bytes(Encoding.DER), invited(ALICE, roles=None).certificate)


def test_fingerprints_are_of_the_authority_alone() -> None:
    assert fingerprint(Authority(KEY).certificate) == fingerprint(Authority(KEY).certificate)
    assert fingerprint(Authority(KEY).certificate) != fingerprint(Authority(NEW).certificate)


# Over TLS


def test_an_invited_node_and_a_holder_of_the_key_believe_each_other() -> None:
    newcomer, holder = ALICE.tls(invited(ALICE)), BOB.tls([KEY])
    for server, client in ((holder, newcomer), (newcomer, holder)):
        ends = connected(server.server, client.client)
        seen = [SwarmTls.shown_by(end.connection) for end in ends]
        roles = {one.node_id: one.roles for one in seen if one is not None}
        assert roles == {ALICE.node_id: ACTOR, BOB.node_id: None}


def test_two_invited_nodes_believe_each_other() -> None:
    ends = connected(ALICE.tls(invited(ALICE)).server, BOB.tls(invited(BOB, roles=None)).client)
    seen = [SwarmTls.shown_by(end.connection) for end in ends]
    assert [one.roles if one else ... for one in seen] == [None, ACTOR]


def test_a_certificate_that_has_ended_is_refused() -> None:
    ended = ALICE.tls(invited(ALICE, until_s=1_000_000_000.0))
    for server, client in ((BOB.tls([KEY]), ended), (ended, BOB.tls([KEY]))):
        with pytest.raises(ssl.SSLCertVerificationError):
            connected(server.server, client.client)


def test_the_certificate_of_another_node_is_of_no_use() -> None:
    with pytest.raises(ssl.SSLError):
        ALICE.tls(invited(BOB))


def test_an_invited_node_follows_a_replaced_key() -> None:
    old, new = Authority(KEY), Authority(NEW)
    newcomer = ALICE.tls(invited(ALICE))
    for holder_keys, credentials in [
        ([KEY, NEW], Credentials(old.certify(ALICE.public_key, ACTOR), (old.certificate, new.certificate))),
        ([NEW, KEY], Credentials(new.certify(ALICE.public_key, ACTOR), (new.certificate, old.certificate))),
        ([NEW], Credentials(new.certify(ALICE.public_key, ACTOR), (new.certificate,))),
    ]:
        newcomer.use(credentials)
        connected(BOB.tls(holder_keys).server, newcomer.client)
        connected(newcomer.server, BOB.tls(holder_keys).client)
    with pytest.raises(ssl.SSLError):
        connected(BOB.tls([KEY]).server, newcomer.client)


def test_callers_who_know_the_authority_alone_believe_its_nodes() -> None:
    known = authority_context([Authority(KEY).certificate])
    connected(ALICE.tls(invited(ALICE)).server, known)
    with pytest.raises(ssl.SSLCertVerificationError):
        connected(BOB.tls([NEW]).server, authority_context([Authority(KEY).certificate]))


def test_callers_who_know_nothing_learn_the_node_id_alone() -> None:
    _, client = connected(BOB.tls([NEW]).server, unproven_context())
    shown = SwarmTls.shown_by(client.connection)
    assert shown is not None
    assert shown.node_id == BOB.node_id


# What is kept of it


def shown(name: str, roles: frozenset[str] | None) -> NodeCertificate:
    return NodeCertificate(name, b"", roles, None)


def test_limits_are_kept_until_another_certificate_is_shown() -> None:
    kept = CertifiedRoles()
    assert kept.get("a") is None
    kept.note(shown("a", ACTOR))
    assert kept.get("a") == ACTOR
    kept.note(shown("a", None))
    assert kept.get("a") is None


def test_nodes_without_limits_push_nobody_out() -> None:
    kept = CertifiedRoles(capacity=2)
    kept.note(shown("a", ACTOR))
    for number in range(100):
        kept.note(shown(f"full {number}", None))
    assert kept.get("a") == ACTOR
    kept.note(shown("b", ACTOR))
    kept.note(shown("a", ACTOR))  # seen again
    kept.note(shown("c", ACTOR))
    assert [kept.get(name) for name in "abc"] == [ACTOR, None, ACTOR]
