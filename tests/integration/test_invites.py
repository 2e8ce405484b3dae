"""Machines that join by an invite, as real processes: none of them ever sees the swarm's key."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from urllib.parse import urlencode

import pytest

from p2pdrl.api.client import NodeClient
from p2pdrl.api.keyfile import rotate_swarm_key, write_swarm_key
from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.membership.identity import Identity
from p2pdrl.node.bootstrap.invited import read_membership
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Address

SLOWLY = ["--set", "node.learner.max_updates_per_s=5"]
PACE = [*SLOWLY, "--set", "task.algorithm.unroll_steps=32"]


IMPALA = ["--config", "impala", "--set", "task.env.num_envs=4"]


def p2pdrl(*arguments):
    """Run a command; return its exit code, output and error."""
    command = [sys.executable, "-m", "p2pdrl", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return done.returncode, done.stdout, done.stderr


def api(node):
    """As a command on the node's machine would ask it."""
    return NodeClient(Address.parse(node.api), data_dir=str(node.data))


def invite(node, **wishes):
    return api(node).post("/v1/invites?" + urlencode({"expires_s": 600, **wishes}, doseq=True))


def has_told(node, kind):
    return any(event["kind"] == kind for event in node.told())


@pytest.fixture
def key(tmp_path):
    path = tmp_path / "swarm.key"
    write_swarm_key(path)
    return path


@pytest.fixture
def founder(swarm, key, wait_until):
    return founds(swarm, wait_until, *PACE, "--swarm-key-file", str(key))


def founds(swarm, wait_until, *arguments):
    node = swarm.start("a", *arguments)
    wait_until(lambda: has_told(node, "training"), 120, "a founds")
    return node


def joined(swarm, wait_until, name, *arguments, until="training", **given):
    node = swarm.start(name, *SLOWLY, *arguments, **given)
    wait_until(lambda: has_told(node, until), 120, f"{name} is {until}")
    return node


def test_an_invited_actor_joins_and_can_not_act_as_a_learner(swarm, founder, key, wait_until):
    """An invite is good once; what its member asks for beyond it, it asks for in vain."""
    made = invite(founder, role="actor")
    taken_back = invite(founder)
    assert api(founder).post(f"/v1/invites/revoke?id={taken_back['id']}")["before"] == "open"
    member = joined(swarm, wait_until, "b", "--join", made["line"], until="joined")
    late = {name: swarm.start(name, "--join", one["line"]) for name, one in (("c", made), ("d", taken_back))}
    wait_until(lambda: len(api(founder).peers()) > 1, 20, "the founder knows of it")
    (row,) = [row for row in api(founder).peers() if not row["self"]]
    assert (row["name"], row["roles"], row["state"]) == ("b", ["actor"], "alive")
    member.signal(15)
    assert member.wait(20) == 0
    asyncio.run(_ask_for_more(founder, member))
    for name, words in (("c", "used already, by another node"), ("d", "the invite was revoked")):
        assert late[name].wait(30) == 2
        assert words in late[name].text()
        assert not late[name].data.exists(), "nothing is left behind"
    for path in member.data.rglob("*"):
        assert not path.is_file() or key.read_bytes().strip() not in path.read_bytes()


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
    file.write_text(p2pdrl("invite", "--api", founder.api)[1])
    node = joined(swarm, wait_until, "b", "--join-file", str(file))
    assert p2pdrl("status", "--api", node.api)[0] == 0
    code, out, said = p2pdrl("status", "--json", "--api", node.api)
    assert code == 0, said
    status = json.loads(out)
    assert status["swarm_id"] == api(founder).status()["swarm_id"]
    assert node.get("/v1/status") is None, "reading wants credentials"
    code, out, _ = p2pdrl("doctor", "--data-dir", str(node.data), "--peers", founder.api, "--json")
    checks = {check["name"]: check["result"] for check in json.loads(out)["checks"]}
    assert (checks["membership"], checks[f"peer {founder.api} swarm"]) == ("ok", "ok")
    assert p2pdrl("invite", "--api", node.api)[0] == 1, "who was invited can't invite"

    def exchanges():
        found = api(node).status()["accounting"]
        return sum(sum(one.get("rounds", {}).values()) for one in found.values())

    wait_until(exchanges, 60, "it exchanges parameters")
    node.signal(15)
    assert node.wait(20) == 0
    again = joined(swarm, wait_until, "b2", data=node.data)
    names = [row["name"] for row in api(again).peers()]
    assert set(names) == {"a", "b2"}
    founder.kill9()
    wait_until(lambda: has_told(again, "member-dead"), 60, "the founder is given up")
    back = joined(
        swarm, wait_until, "a2", "--swarm-key-file", str(key), "--peers", again.api, data=founder.data
    )
    assert has_told(back, "joined"), "it joins through the node that it has invited"


@pytest.mark.slow
def test_an_expired_invite_is_refused_by_the_inviters_clock(swarm, founder):
    made = invite(founder, expires_s=1)
    time.sleep(1.1)
    late = swarm.start("late", "--join", made["line"])
    assert late.wait(30) == 2
    assert "the invite has expired" in late.text()
    assert not late.data.exists(), "nothing is left behind"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_invited_nodes_outlive_a_replaced_key(swarm, founder, key, wait_until):
    """One is up all the while, the other comes back when the old key is refused."""
    up = joined(swarm, wait_until, "up", "--join", invite(founder)["line"])
    away = joined(
        swarm,
        wait_until,
        "away",
        "--join",
        invite(founder, role=["actor", "learner"])["line"],
        until="joined",
    )
    away.signal(15)
    assert away.wait(20) == 0
    rotate_swarm_key(key, 40.0, time.time())
    wait_until(lambda: "old swarm key is refused" in founder.text(), 150, "the founder refuses the old key")
    wait_until(lambda: "old swarm key is refused" in up.text(), 60, f"up follows:\n{up.text()[-2000:]}")
    back = joined(swarm, wait_until, "back", data=away.data, until="joined")
    for node in (founder, up):
        assert not has_told(node, "member-dead"), node.text()[-2000:]
    everybody = {"a", "up", "back"}
    wait_until(lambda: {row["name"] for row in api(back).peers()} == everybody, 20, "it knows everybody")
    assert read_membership(back.data).roles == {"actor", "learner"}


@pytest.mark.slow
def test_an_invited_actor_acts_for_a_learner(swarm, key, wait_until):
    learner = founds(swarm, wait_until, *IMPALA, "--roles", "learner", "--swarm-key-file", str(key))
    line = invite(learner, role="actor")["line"]
    joined(swarm, wait_until, "b", "--join", line, "--actors", "1")

    def unrolls():
        received = api(learner).status().get("experience", {}).get("received", {})
        return sum(row["unrolls"] for row in received.get("actors", []))

    wait_until(lambda: unrolls() > 5, 60, "its unrolls come")
