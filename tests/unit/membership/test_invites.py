"""Lines of invites, and what an inviter keeps of them."""

from __future__ import annotations

import base64
import hashlib
import random
import stat
from pathlib import Path

import msgspec
import pytest

from p2pdrl.atomic import write_atomic
from p2pdrl.errors import StorageError, UsageError
from p2pdrl.membership import invites
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.invites import PREFIX, Grant, InviteLine, Inviter, redeem_proof, renew_proof
from p2pdrl.transport.certificates import Authority, fingerprint, is_issued_by, read_certificate
from p2pdrl.transport.protocol import Refusal

KEY, NEW = b"the swarm's key", b"its next key"
OWNER, ALICE, BOB = (Identity(name * 32) for name in (b"o", b"a", b"b"))
SWARM = "0123456789abcdef"
HERE = ["10.0.0.1:7700", "10.0.0.2:7700", "box.example:7701"]


class Clock:
    """Set by tests."""

    def __init__(self) -> None:
        self.wall_s = 1_000_000.0

    def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.wall_s


class Rig:
    """An inviter whose clock, keys and folder a test holds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Clock()
        self.keys: list[bytes] = [KEY]
        self.barred: dict[str, str] = {}
        self.restart()

    def restart(self) -> None:
        self.inviter = Inviter(
            self.folder,
            node_id=OWNER.node_id,
            swarm_id=SWARM,
            keys=lambda: self.keys,
            members=lambda: HERE,
            clock=self.clock,
            operators=lambda: [(b"p" * 32, "olga")],
            refuse=self.barred.get,
        )

    def invite(self, *roles: str, expires_s: float = 60.0, membership_s: float | None = None) -> InviteLine:
        return self.inviter.create(roles, expires_s, membership_s, members=HERE)[1]  # type: ignore[arg-type]

    def redeem(self, invite: InviteLine, who: Identity = ALICE, name: str = "alice") -> Grant:
        proof = who.sign(redeem_proof(OWNER.node_id, invite.secret))
        return self.inviter.redeem(invite.secret, who.public_key, name, proof, members=HERE)

    def renew(self, who: Identity = ALICE) -> Grant:
        return self.inviter.renew(who.public_key, who.sign(renew_proof(OWNER.node_id)), members=HERE)

    def states(self) -> list[str]:
        return [kept.state(self.clock.wall()) for kept in self.inviter.all()]


@pytest.fixture
def rig(tmp_path: Path) -> Rig:
    return Rig(tmp_path)


# The line


def test_a_line_comes_back_as_it_was_and_is_short(rig: Rig) -> None:
    invite = rig.invite("actor", "replay")
    line = invite.text()
    assert InviteLine.parse(line) == invite
    assert len(line) < 400
    assert "\n" not in line
    assert invite.authority == fingerprint(Authority(KEY).certificate)
    assert (invite.inviter.hex(), invite.swarm.hex()) == (OWNER.node_id, SWARM)
    assert invite.roles == ("actor", "replay")
    assert list(invite.seeds) == HERE
    assert invite.expires_s == 1_000_060


def test_mail_may_break_a_line(rig: Rig) -> None:
    invite = rig.invite()
    line = invite.text()
    assert InviteLine.parse(f"  {line[:40]}\r\n {line[40:90]}\n{line[90:]}\n\n") == invite


def test_long_addresses_of_others_are_left_out(rig: Rig) -> None:
    far = [f"{'x' * 60}.{'y' * 60}.example:7700", f"{'z' * 60}.{'w' * 60}.example:7700"]
    _, invite = rig.inviter.create((), 60.0, members=["10.0.0.1:7700", *far])
    assert list(invite.seeds) == ["10.0.0.1:7700", far[0]]
    assert len(invite.text()) < 400


def test_secrets_differ_and_are_shown_by_nothing(rig: Rig) -> None:
    one, other = rig.invite(), rig.invite()
    assert one.secret != other.secret
    assert len(one.secret) == 16
    kept = (rig.folder / "invites.json").read_text()
    for secret in (one.secret, other.secret):
        assert secret.hex() not in kept + repr(one) + repr(other)
        assert base64.b64encode(secret).decode().rstrip("=") not in kept


def test_no_mangled_line_is_taken(rig: Rig) -> None:
    """One character changed, lost, doubled or swapped; cut off; two lines in one."""
    line = rig.invite("actor").text()
    rng = random.Random(3)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_+/=.:,é\0"
    mangled = {line[:end] for end in range(len(line))} | {line + line, line + "=", line + "A"}
    for at in range(len(line)):
        mangled |= {line[:at] + rng.choice(alphabet) + line[at + 1 :] for _ in range(4)}
        mangled |= {line[:at] + line[at + 1 :], line[:at] + line[at] + line[at:]}
        mangled.add(line[:at] + line[at : at + 2][::-1] + line[at + 2 :])
    for bad in mangled - {line}:
        with pytest.raises(UsageError, match="invite") as told:
            InviteLine.parse(bad)
        assert line[20:60] not in str(told.value)
    assert len(mangled) > 1000


def test_no_bytes_are_taken_that_only_look_whole() -> None:
    rng = random.Random(5)
    for _ in range(300):
        body = bytes([rng.choice((1, 1, 1, 2))]) + rng.randbytes(rng.randrange(120))
        raw = body + hashlib.sha256(b"p2pdrl invite\0" + body).digest()[:4]
        line = PREFIX + base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
        with pytest.raises(UsageError, match="another release"):
            InviteLine.parse(line)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("secret", b"short"),
        ("authority", b"x" * 31),
        ("inviter", b""),
        ("swarm", b"x" * 9),
        ("expires_s", -1),
        ("roles", ("king",)),
        ("seeds", ()),
        ("seeds", ("no address, really",)),
    ],
)
def test_fields_out_of_bounds_are_refused(rig: Rig, field: str, value: object) -> None:
    bad = msgspec.structs.replace(rig.invite(), **{field: value})
    with pytest.raises(UsageError):
        InviteLine.parse(bad.text())


@pytest.mark.parametrize("text", ["", "swarm.key", "https://example.org/x", "p2pdrl:/x", "x" * 3000])
def test_what_is_no_invite_is_told_from_one_that_isnt_whole(text: str) -> None:
    with pytest.raises(UsageError, match=r"no invite|one line"):
        InviteLine.parse(text)


# Redeeming


def test_a_newcomer_becomes_a_member(rig: Rig) -> None:
    grant = rig.redeem(rig.invite("actor"))
    assert grant.swarm == SWARM
    assert grant.authorities == (Authority(KEY).certificate,)
    assert is_issued_by(grant.certificate, grant.authorities[0])
    certificate = read_certificate(grant.certificate)
    assert certificate is not None
    assert (certificate.node_id, certificate.roles, certificate.until_s) == (
        ALICE.node_id,
        {"actor"},
        None,
    )
    assert grant.operators == ((b"p" * 32, "olga"),)
    assert list(grant.members) == HERE
    (kept,) = rig.inviter.all()
    assert (kept.node_name, kept.node_key, kept.used_s) == ("alice", ALICE.public_key.hex(), 1_000_000.0)


def test_without_limits_it_is_a_member_like_any_other(rig: Rig) -> None:
    certificate = read_certificate(rig.redeem(rig.invite()).certificate)
    assert certificate is not None
    assert certificate.roles is None


def test_a_membership_may_end(rig: Rig) -> None:
    certificate = read_certificate(rig.redeem(rig.invite(membership_s=100.0)).certificate)
    assert certificate is not None
    assert certificate.until_s == 1_000_100.0
    rig.clock.wall_s += 50
    again = read_certificate(rig.renew().certificate)
    assert again is not None
    assert again.until_s == 1_000_100.0, "a renewal makes it no longer"
    rig.clock.wall_s += 50
    with pytest.raises(Refusal, match=r"410.*has ended"):
        rig.renew()


def refused(status: int, words: str, rig: Rig, invite: InviteLine, who: Identity = ALICE) -> None:
    with pytest.raises(Refusal, match=words) as told:
        rig.redeem(invite, who)
    assert told.value.status == status


def test_an_invite_is_good_once(rig: Rig) -> None:
    invite = rig.invite()
    rig.redeem(invite)
    refused(409, "used already", rig, invite, BOB)
    assert rig.states() == ["used"]


def test_the_same_node_may_ask_again(rig: Rig) -> None:
    """Its answer may have got lost; also after the invite has expired, and after a restart."""
    invite = rig.invite("actor")
    first = rig.redeem(invite)
    rig.clock.wall_s += 1000
    assert rig.redeem(invite) == first
    rig.restart()
    assert rig.redeem(invite) == first
    assert [kept.used_s for kept in rig.inviter.all()] == [1_000_000.0]


def test_expired_revoked_and_unknown_invites_are_refused(rig: Rig) -> None:
    expired, revoked = rig.invite(expires_s=10.0), rig.invite(expires_s=1000.0)
    rig.inviter.revoke(rig.inviter.all()[1].id)
    rig.clock.wall_s += 10.0
    assert rig.states() == ["expired", "revoked"]
    refused(410, "expired", rig, expired)
    refused(410, "revoked", rig, revoked)
    refused(403, "no such invite", rig, msgspec.structs.replace(expired, secret=b"x" * 16))
    assert rig.states() == ["expired", "revoked"]


def test_all_of_it_outlives_a_restart(rig: Rig) -> None:
    open_one, used, revoked = rig.invite(), rig.invite(), rig.invite()
    rig.redeem(used)
    rig.inviter.revoke(rig.inviter.all()[2].id)
    before = rig.inviter.all()
    rig.restart()
    assert rig.inviter.all() == before
    refused(409, "used", rig, used, BOB)
    refused(410, "revoked", rig, revoked)
    rig.redeem(open_one, BOB)


def test_the_file_is_for_its_owner_alone(rig: Rig) -> None:
    rig.invite()
    assert stat.S_IMODE((rig.folder / "invites.json").stat().st_mode) == 0o600


def test_a_key_that_isnt_ones_own_is_refused(rig: Rig) -> None:
    invite = rig.invite()
    good = ALICE.sign(redeem_proof(OWNER.node_id, invite.secret))
    for key, proof in (
        (BOB.public_key, good),
        (ALICE.public_key, bytes([good[0] ^ 1]) + good[1:]),
        (ALICE.public_key, ALICE.sign(redeem_proof(BOB.node_id, invite.secret))),
        (ALICE.public_key, ALICE.sign(renew_proof(OWNER.node_id))),
    ):
        with pytest.raises(Refusal, match=r"400.*isn't signed"):
            rig.inviter.redeem(invite.secret, key, "x", proof, members=HERE)
    assert rig.states() == ["open"]


def test_who_is_barred_gets_nothing(rig: Rig) -> None:
    used, fresh = rig.invite(), rig.invite()
    rig.redeem(used)
    rig.barred[ALICE.node_id] = "this node was put out"
    refused(403, "put out", rig, used)
    refused(403, "put out", rig, fresh)
    assert rig.states() == ["used", "open"]
    with pytest.raises(Refusal, match="put out"):
        rig.renew()


def test_a_full_disk_uses_nothing_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    invite = rig.invite()

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(invites, "write_atomic", full)
    with pytest.raises(StorageError, match="disk is full"):
        rig.redeem(invite)
    with pytest.raises(StorageError, match="disk is full"):
        rig.invite()
    monkeypatch.setattr(invites, "write_atomic", write_atomic)
    assert rig.states() == ["open"]
    rig.redeem(invite, BOB)


def test_a_damaged_file_is_told(rig: Rig) -> None:
    (rig.folder / "invites.json").write_text("{")
    with pytest.raises(StorageError, match="damaged: move it away"):
        rig.restart()


@pytest.mark.parametrize("seconds", [0.0, -1.0, 1e9, float("nan"), float("inf")])
def test_times_have_bounds(rig: Rig, seconds: float) -> None:
    with pytest.raises(Refusal, match="400"):
        rig.invite(expires_s=seconds)
    with pytest.raises(Refusal, match="400"):
        rig.invite(membership_s=1e11 if seconds == 1e9 else seconds)


def test_there_are_only_so_many(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invites, "MAX_INVITES", 3)
    rig.invite(expires_s=10.0)
    rig.redeem(rig.invite())
    rig.invite()
    with pytest.raises(Refusal, match=r"409.*revoke some"):
        rig.invite()
    rig.clock.wall_s += 10.0
    rig.invite()  # the expired one gives way
    assert rig.states() == ["used", "open", "open"]


def test_without_a_key_nobody_is_invited(rig: Rig) -> None:
    rig.keys = []
    with pytest.raises(Refusal, match=r"409.*no swarm key"):
        rig.invite()


def test_revoking_what_isnt_there(rig: Rig) -> None:
    with pytest.raises(Refusal, match="404"):
        rig.inviter.revoke("12345678")


# Renewing


def test_a_replaced_key_brings_a_certificate_by_the_new_one(rig: Rig) -> None:
    first = rig.redeem(rig.invite("actor"))
    assert rig.renew() == first
    rig.keys = [KEY, NEW]  # taken, not shown yet
    second = rig.renew()
    assert second.certificate == first.certificate
    assert second.authorities == (Authority(KEY).certificate, Authority(NEW).certificate)
    rig.keys = [NEW]
    third = rig.renew()
    assert third.authorities == (Authority(NEW).certificate,)
    assert is_issued_by(third.certificate, Authority(NEW).certificate)
    certificate = read_certificate(third.certificate)
    assert certificate is not None
    assert certificate.roles == {"actor"}


def test_who_wasnt_invited_here_gets_no_certificate(rig: Rig) -> None:
    """Also not who has a good one: by a stolen key, say, for which it is replaced."""
    rig.redeem(rig.invite())
    with pytest.raises(Refusal, match=r"403.*hasn't invited"):
        rig.renew(BOB)
    with pytest.raises(Refusal, match="400"):
        rig.inviter.renew(ALICE.public_key, BOB.sign(renew_proof(OWNER.node_id)), members=HERE)


def test_a_revoked_member_gets_no_other_certificate(rig: Rig) -> None:
    rig.redeem(rig.invite())
    assert rig.inviter.revoke(rig.inviter.all()[0].id).state(0.0) == "used"
    with pytest.raises(Refusal, match=r"410.*revoked"):
        rig.renew()


def test_a_second_invite_counts_from_then_on(rig: Rig) -> None:
    rig.redeem(rig.invite("actor"))
    rig.clock.wall_s += 1
    rig.redeem(rig.invite("actor", "learner"))
    certificate = read_certificate(rig.renew().certificate)
    assert certificate is not None
    assert certificate.roles == {"actor", "learner"}
