"""Machines that join by an invite, as real processes: none of them ever sees the swarm's key."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

import pytest

from p2pdrl.api.keyfile import rotate_swarm_key, write_swarm_key
from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.membership.identity import Identity
from p2pdrl.node.bootstrap.invited import read_membership
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Address

PACE = ["--set", "node.learner.max_updates_per_s=5", "--set", "task.algorithm.unroll_steps=32"]


def p2pdrl(*arguments):
    """Run a command; return its exit code, output and error."""
    command = [sys.executable, "-m", "p2pdrl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def invite(node, *options):
    code, line, said = p2pdrl("invite", "--api", node.api, *options)
    assert code == 0, said
    return line.strip()


def has_told(node, kind):
    return any(event["kind"] == kind for event in node.told())


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    return path


@pytest.fixture
def founder(swarm, key, wait_until):
    node = swarm.start("a", *PACE, "--swarm-key-file", str(key))
    wait_until(lambda: has_told(node, "training"), 60, f"a founds:\n{node.text()[-2000:]}")
    return node


def joined(swarm, wait_until, name, *arguments, **given):
    node = swarm.start(name, *PACE, *arguments, **given)
    wait_until(lambda: has_told(node, "training"), 60, f"{name} trains:\n{node.text()[-2000:]}")
    return node


def test_an_invited_actor_joins_and_can_not_act_as_a_learner(swarm, founder, key, wait_until):
    """An invite is good once; what its member asks for beyond it, it asks for in vain."""
    line = invite(founder, "--roles", "actor")
    member = joined(swarm, wait_until, "b", "--join", line, data=swarm.folder / "b")
    for name, words in {
        "second": "used already, by another node",
        "revoked": "the invite was revoked",
    }.items():
        bad = line
        if name == "revoked":
            bad = invite(founder)
            rows = json.loads(p2pdrl("invite", "list", "--json", "--api", founder.api)[1])
            assert p2pdrl("invite", "revoke", rows[-1]["id"], "--api", founder.api)[0] == 0
        other = swarm.start(name, "--join", bad)
        assert other.wait(30) == 1
        assert words in other.text()
    (row,) = [
        row for row in json.loads(p2pdrl("peers", "--json", "--api", founder.api)[1]) if not row["self"]
    ]
    assert (row["name"], row["roles"], row["state"]) == ("b", ["actor"], "alive")
    assert p2pdrl("roles", "set", "learner", "--api", member.api)[0] == 2, "its own node knows better"
    member.signal(15)
    member.wait(20)
    asyncio.run(_ask_for_more(founder, member))
    for path in member.data.rglob("*"):
        if path.is_file():
            assert key.read_bytes().strip() not in path.read_bytes()


async def _ask_for_more(founder, member):
    """As a changed node would, that holds the invited one's certificate."""
    held = read_membership(member.data)
    identity = Identity.load_or_create(member.data)
    tls = identity.tls(held.credentials)
    transport = HttpTransport(identity.node_id, held.grant.swarm, tls, clock=SystemClock())
    await transport.start()
    at = Address.parse(founder.api)
    try:
        for lane in ("probe", "bulk"):
            for route in ("exchange", "reduce", "push", "stage"):
                with pytest.raises(PeerRefusedError, match="for actor alone makes no learner") as told:
                    await transport.call(at, held.inviter, route, b"", deadline_s=5, lane=lane)
                assert told.value.status == 403
        with pytest.raises(PeerRefusedError) as told:  # that one it may call
            await transport.call(at, held.inviter, "state", b"", deadline_s=5)
        assert told.value.status == 400
    finally:
        await transport.close()


@pytest.mark.slow
def test_an_invited_node_is_a_member_like_any_other(swarm, founder, key, wait_until, tmp_path):
    """It trains, restarts without the line, and is commanded by its own token."""
    file = tmp_path / "invite"
    file.write_text(invite(founder) + "\n")
    node = joined(swarm, wait_until, "b", "--join-file", str(file))
    assert p2pdrl("status", "--api", node.api)[0] == 0
    code, out, said = p2pdrl("status", "--json", "--api", node.api)
    assert code == 0, said
    status = json.loads(out)
    assert status["swarm_id"] == json.loads(p2pdrl("status", "--json", "--api", founder.api)[1])["swarm_id"]
    assert node.get("/v1/status") is None, "reading wants credentials"
    code, out, _ = p2pdrl("doctor", "--data-dir", str(node.data), "--peers", founder.api, "--json")
    checks = {check["name"]: check["result"] for check in json.loads(out)["checks"]}
    assert (checks["membership"], checks[f"peer {founder.api} swarm"]) == ("ok", "ok")
    assert p2pdrl("invite", "--api", node.api)[0] == 1, "who was invited can't invite"

    def exchanges():
        found = json.loads(p2pdrl("status", "--json", "--api", node.api)[1])["accounting"]
        return sum(sum(one.get("rounds", {}).values()) for one in found.values())

    wait_until(exchanges, 60, "it exchanges parameters", every_s=1.0)
    node.signal(15)
    assert node.wait(20) == 0
    again = joined(swarm, wait_until, "b2", data=node.data)
    names = [row["name"] for row in json.loads(p2pdrl("peers", "--json", "--api", again.api)[1])]
    assert set(names) == {"a", "b2"}
    founder.kill9()
    wait_until(lambda: has_told(again, "member-dead"), 60, "the founder is given up")
    back = joined(
        swarm, wait_until, "a2", "--swarm-key-file", str(key), "--peers", again.api, data=founder.data
    )
    assert has_told(back, "joined"), "it joins through the node that it has invited"


@pytest.mark.slow
def test_an_expired_invite_is_refused_by_the_inviters_clock(swarm, founder):
    line = invite(founder, "--expires", "1s")
    time.sleep(1.1)
    late = swarm.start("late", "--join", line)
    assert late.wait(30) == 1
    assert "the invite has expired" in late.text()
    assert not late.data.exists(), "nothing is left behind"


@pytest.mark.slow
def test_invited_nodes_outlive_a_replaced_key(swarm, founder, key, wait_until):
    """One is up all the while, the other comes back when the old key is refused."""
    up = joined(swarm, wait_until, "up", "--join", invite(founder))
    away = joined(swarm, wait_until, "away", "--join", invite(founder, "--roles", "actor,learner"))
    away.signal(15)
    assert away.wait(20) == 0
    rotate_swarm_key(key, 50.0, time.time())
    wait_until(lambda: "old swarm key is refused" in founder.text(), 150, "the founder refuses the old key")
    wait_until(lambda: "old swarm key is refused" in up.text(), 60, f"up follows:\n{up.text()[-2000:]}")
    back = joined(swarm, wait_until, "away", data=away.data)
    for node in (founder, up):
        assert not has_told(node, "member-dead"), node.text()[-2000:]
    alive = {row["name"] for row in json.loads(p2pdrl("peers", "--json", "--api", back.api)[1])}
    assert alive == {"a", "up", "away"}
    assert read_membership(back.data).roles == {"actor", "learner"}
