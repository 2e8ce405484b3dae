"""``p2pdrl invite``, and ``p2pdrl node --join``."""

from __future__ import annotations

import json
import os
import time

import pytest

from p2pdrl.cli import doctor
from p2pdrl.clock import SystemClock
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.invites import Grant, InviteLine, Inviter, redeem_proof
from p2pdrl.node import daemon
from p2pdrl.node.bootstrap.invited import InvitedMember
from p2pdrl.transport.certificates import Authority

KEY = b"the swarm's key"
OWNER, ALICE = Identity(b"o" * 32), Identity(b"a" * 32)
SWARM = "0123456789abcdef"


@pytest.fixture
def inviting(node, served, tmp_path):
    """A served node that holds a swarm's key."""
    node.swarm_keys = (KEY,)
    node.inviter = Inviter(
        tmp_path,
        node_id=OWNER.node_id,
        swarm_id=SWARM,
        keys=lambda: node.swarm_keys,
        members=lambda: ["10.0.0.1:7700"],
        clock=SystemClock(),
    )
    return served


def redeem(node, line, name="alice"):
    secret = InviteLine.parse(line).secret
    proof = ALICE.sign(redeem_proof(OWNER.node_id, secret))
    return node.inviter.redeem(secret, ALICE.public_key, name, proof, members=[])


def test_one_line_on_standard_output_the_rest_on_the_other(p2pdrl, inviting):
    result = p2pdrl("invite", "--api", inviting.address)
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    invite = InviteLine.parse(result.stdout)
    assert (invite.roles, invite.seeds) == ((), ("10.0.0.1:7700",))
    assert abs(invite.expires_s - time.time() - 86_400) < 60
    assert "p2pdrl node --join LINE (good once, until" in result.stderr
    assert "careful" not in result.stderr


def test_roles_and_times_are_asked_for(p2pdrl, inviting):
    result = p2pdrl(
        "invite", "--roles", "actor, replay", "--expires", "90m", "--member-for", "30d", "--json",
        "--api", inviting.address,
    )  # fmt: skip
    made = json.loads(result.stdout)
    assert made["roles"] == ["actor", "replay"]
    assert made["membership_s"] == 30 * 86_400
    assert abs(made["expires"] - time.time() - 5400) < 60
    assert InviteLine.parse(made["line"]).roles == ("actor", "replay")


@pytest.mark.parametrize("text", ["", "24", "0h", "-1h", "1w", "1e3s", "nan", "h", "1h1h", "99999999999d"])
def test_bad_times_are_refused(p2pdrl, inviting, text):
    result = p2pdrl("invite", "--expires", text, "--api", inviting.address)
    assert result.exit_code == 2
    assert "is no time" in result.stderr


@pytest.mark.parametrize(("options", "words"), [
    (["--roles", "king"], "there are the roles"), (["--roles", "server"], "has nothing to do"),
    (["--roles", ","], "name at least one"),
    (["--expires", "9999d"], "at most"), (["--member-for", "99999d"], "at most"),
])  # fmt: skip
def test_bad_wishes_are_refused(p2pdrl, inviting, options, words):
    result = p2pdrl("invite", *options, "--api", inviting.address)
    assert result.exit_code == 2
    assert words in result.stderr
    assert result.stdout == ""


def test_a_node_that_only_this_machine_reaches_is_told(p2pdrl, inviting, node):
    node.inviter.members = lambda: ["127.0.0.1:7700"]
    assert "careful: the node listens at 127.0.0.1:7700" in p2pdrl("invite", "--api", inviting.address).stderr


def test_who_cannot_invite_says_why(p2pdrl, node, served):
    result = p2pdrl("invite", "--api", served.address)
    assert result.exit_code == 1
    assert "this swarm has no key, so nobody needs an invite" in result.stderr
    node.invited = True
    assert "was invited itself, and holds no swarm key" in p2pdrl("invite", "--api", served.address).stderr


def test_what_became_of_invites_is_listed(p2pdrl, inviting, node):
    lines = [p2pdrl("invite", "--roles", "actor", "--api", inviting.address).stdout for _ in range(3)]
    redeem(node, lines[1], "al\x1bice")
    ids = [
        row["id"] for row in json.loads(p2pdrl("invite", "list", "--json", "--api", inviting.address).stdout)
    ]
    assert p2pdrl("invite", "revoke", ids[2], "--api", inviting.address).stdout == f"{ids[2]} is revoked\n"
    told = p2pdrl("invite", "list", "--api", inviting.address).stdout.splitlines()
    assert [line.split()[:2] for line in told] == [
        [ids[0], "open"], [ids[1], "used"], [ids[2], "revoked"],
    ]  # fmt: skip
    assert "until" in told[0]
    assert f"({ALICE.node_id[:8]}" in told[1]
    assert "\x1b" not in told[1]
    assert all(line.endswith("as actor alone") for line in told)
    for line in lines:
        assert InviteLine.parse(line).secret.hex() not in "".join(told)


def test_revoking_a_used_one_says_what_it_does_not_do(p2pdrl, inviting, node):
    redeem(node, p2pdrl("invite", "--api", inviting.address).stdout)
    (kept,) = node.inviter.all()
    result = p2pdrl("invite", "revoke", kept.id, "--api", inviting.address)
    assert "its node stays a member until the swarm's key is replaced" in result.stdout
    document = json.loads(p2pdrl("invite", "revoke", kept.id, "--json", "--api", inviting.address).stdout)
    assert document["before"] == "revoked"


def test_revoking_what_isnt_there_fails(p2pdrl, inviting):
    result = p2pdrl("invite", "revoke", "00000000", "--api", inviting.address)
    assert result.exit_code == 1
    assert "there is no invite '00000000': see `p2pdrl invite list`" in result.stderr
    assert result.stdout == ""


def test_options_belong_behind_the_subcommand(p2pdrl, inviting):
    result = p2pdrl("invite", "--api", inviting.address, "list")
    assert result.exit_code == 2
    assert "behind `list`" in result.stderr


# p2pdrl node --join


@pytest.fixture
def started(monkeypatch):
    """What the daemon would have been started with."""
    calls = []

    def run(resolved, invite=None):
        calls.append((resolved.config.node, invite, os.environ.get("P2PDRL_JOIN")))
        return 0

    monkeypatch.setattr(daemon, "run", run)
    return calls


@pytest.fixture
def line(tmp_path):
    inviter = Inviter(
        tmp_path,
        node_id=OWNER.node_id,
        swarm_id=SWARM,
        keys=lambda: [KEY],
        members=tuple,
        clock=SystemClock(),
    )
    return inviter.create(("actor",), 60.0, members=["10.0.0.1:7700"])[1].text()


def test_a_line_is_all_that_a_newcomer_needs(p2pdrl, started, line):
    assert p2pdrl("node", "--join", line).exit_code == 0
    assert p2pdrl("node", "--join", line, "--roles", "actor").exit_code == 0
    (node, invite, _), _ = started
    assert invite == InviteLine.parse(line)
    assert node.peers == ("10.0.0.1:7700",)


def test_it_may_come_from_a_file_or_the_environment(p2pdrl, started, line, tmp_path, monkeypatch):
    """So that nobody else on the machine sees it; children of the node don't inherit it."""
    file = tmp_path / "invite"
    file.write_text(f"{line}\nmore\n")
    assert p2pdrl("node", "--join-file", str(file)).exit_code == 0
    monkeypatch.setenv("P2PDRL_JOIN", line)
    assert p2pdrl("node", "--peers", "10.0.0.2:1").exit_code == 0
    assert [(invite, left) for _, invite, left in started] == [(InviteLine.parse(line), None)] * 2
    assert started[1][0].peers == ("10.0.0.2:1",)


@pytest.mark.parametrize("bad", ["", "swarm.key", "p2pdrl://AAAA"])
def test_a_bad_line_is_refused_before_anything_starts(p2pdrl, started, bad, tmp_path):
    (tmp_path / "invite").write_text(bad)
    for options in (["--join", bad], ["--join-file", str(tmp_path / "invite")]):
        result = p2pdrl("node", *options)
        assert result.exit_code == 2
        assert "invite" in result.stderr
    assert started == []


def test_one_invite_is_enough(p2pdrl, started, line, tmp_path):
    result = p2pdrl("node", "--join", line, "--join-file", str(tmp_path / "nowhere"))
    assert (result.exit_code, started) == (2, [])
    result = p2pdrl("node", "--join-file", str(tmp_path / "nowhere"))
    assert result.exit_code == 2
    assert "can't read the invite" in result.stderr


# p2pdrl doctor


def member(folder, **given):
    identity = Identity.load_or_create(folder)
    certificate = Authority(KEY).certify(identity.public_key, **given)
    grant = Grant(SWARM, certificate, (Authority(KEY).certificate,))
    InvitedMember(OWNER.node_id, "", grant).save(folder)


@pytest.mark.parametrize(
    ("given", "result", "words"),
    [
        ({}, "ok", f"of swarm {SWARM}, by invite"),
        ({"roles": ["actor"]}, "ok", "as actor alone"),
        ({"until_s": 4e9}, "ok", "until 2096"),
        ({"until_s": 1e9}, "fail", "until 2001"),
    ],
)
def test_a_membership_is_looked_at(tmp_path, given, result, words):
    member(tmp_path, **given)
    (check,), context = doctor.membership_checks(tmp_path, time.time())
    assert (check.result, words in check.found) == (result, True), check.found
    assert context is not None


def test_who_wasnt_invited_has_no_membership(tmp_path):
    assert doctor.membership_checks(tmp_path, 0.0) == ([], None)


def test_a_damaged_membership_fails(tmp_path):
    (tmp_path / "membership.json").write_text("{}")
    (check,), context = doctor.membership_checks(tmp_path, 0.0)
    assert (check.result, context) == ("fail", None)


def test_a_peer_that_speaks_no_tls_isnt_of_ours(p2pdrl, served, tmp_path):
    member(tmp_path)
    result = p2pdrl("doctor", "--json", "--data-dir", str(tmp_path), "--peers", served.address)
    checks = {check["name"]: check for check in json.loads(result.stdout)["checks"]}
    assert checks["membership"]["result"] == "ok"
    assert "doesn't take our certificate" in checks[f"peer {served.address} swarm"]["found"]
    assert result.exit_code == 4
