"""Commands that operators sign, against a fake node that checks what it is given."""

from __future__ import annotations

import json
import time

import pytest

from p2pdrl.api.keyfile import read_operator_key, read_swarm_keys, write_operator_key, write_swarm_key
from p2pdrl.config.strategy import LocalConfig
from p2pdrl.membership.identity import Identity, verify
from p2pdrl.membership.operators import BansSetting, Operator
from p2pdrl.membership.records import Verifier
from p2pdrl.membership.swarm_records import SwarmRecords
from p2pdrl.node import settings
from p2pdrl.node.settings import HaltSetting, ModeSetting, PauseSetting, decode

OLD_STOP = {"stop": {"env_steps": 10}, "founded_at": 5.0}


@pytest.fixture
def key(tmp_path):
    """A swarm's key, with its operator's beside it."""
    path = tmp_path / "swarm.key"
    write_swarm_key(path, [write_operator_key(tmp_path / "swarm.key.operator", "alice").public])
    return path


@pytest.fixture
def alice(key):
    return read_operator_key(f"{key}.operator")


@pytest.fixture
def held(served, key):
    """The records of a node whose swarm has that key."""
    keys = read_swarm_keys(key)
    served.node.swarm_keys = keys.good(time.time())
    made = served.node.swarm_records = SwarmRecords(Verifier(keys.swarm_id, verify), keys.operators)
    made.follow("ab" * 16)
    made.merge(made.compose("stop", OLD_STOP, read_operator_key(f"{key}.operator").signer))
    return made


@pytest.fixture
def run(p2pdrl, served, key):
    return lambda *words: p2pdrl(*words, "--api", served.address, "--swarm-key-file", str(key))


def value(held, name):
    return decode(held.get(name).value, settings.KINDS[name])


def test_each_command_of_the_whole_swarm_is_signed(run, held, alice, served):
    for words in (
        ("mode", "set", "local", "--no-wait"),
        ("pause", "--swarm"),
        ("stop", "set", "env_steps=77"),
        ("halt", "--reason", "enough"),
        ("peers", "ban", "node-2", "--reason", "floods"),
    ):
        result = run(*words)
        assert result.exit_code == 0, result.stderr
    assert value(held, "mode") == ModeSetting.of(LocalConfig())
    assert value(held, "pause") == PauseSetting(True)
    stop, stopped = value(held, "stop"), held.get("stop")
    assert (stop.stop.env_steps, stop.founded_at) == (77, 5.0)
    assert value(held, "halt") == HaltSetting("command", "enough", stopped.epoch, stopped.proposer)
    (ban,) = value(held, "bans").bans
    assert (ban.id, ban.name, ban.reason, ban.by) == (
        served.node.members[1]["id"], "node-2", "floods", alice.public.words
    )  # fmt: skip
    for record in held.all():
        assert record.proposer == alice.public.id
    assert abs(held.get("halt").at_ms / 1000 - time.time()) < 60
    served.node.members[1]["state"] = "banned"
    assert run("peers", "unban", "node-2").exit_code == 0
    assert run("resume", "--swarm").exit_code == 0
    assert value(held, "bans") == BansSetting()
    assert value(held, "pause") == PauseSetting(False)


def test_without_the_key_it_says_which_is_missing_and_where_it_is_looked_for(
    run, held, key, tmp_path, p2pdrl
):
    elsewhere = tmp_path / "elsewhere"
    (tmp_path / "swarm.key.operator").rename(elsewhere)
    result = run("pause", "--swarm")
    assert result.exit_code == 1
    assert f"none is at {key}.operator, where it is looked for" in result.stderr
    assert "operator alice" in result.stderr
    assert held.get("pause") is None
    assert run("pause", "--swarm", "--operator", str(elsewhere)).exit_code == 0
    assert run("pause", "--swarm", "--operator", str(tmp_path / "none")).exit_code == 2


def test_the_key_may_be_named_by_the_environment(run, held, tmp_path, monkeypatch):
    (tmp_path / "swarm.key.operator").rename(tmp_path / "elsewhere")
    monkeypatch.setenv("P2PDRL_OPERATOR", str(tmp_path / "elsewhere"))
    assert run("pause", "--swarm").exit_code == 0


def test_on_its_own_machine_a_node_tells_where_the_swarms_key_is(p2pdrl, held, served, key, monkeypatch):
    monkeypatch.setenv("P2PDRL_TOKEN", served.node.token)
    assert p2pdrl("pause", "--swarm", "--api", served.address).exit_code == 1
    served.node.swarm_key_file = str(key)
    assert p2pdrl("pause", "--swarm", "--api", served.address).exit_code == 0
    assert value(held, "pause") == PauseSetting(True)


def test_a_key_of_nobody_who_may_signs_nothing(run, held, tmp_path):
    write_operator_key(tmp_path / "other", "mallory")
    result = run("halt", "--operator", str(tmp_path / "other"))
    assert result.exit_code == 1
    assert "mallory" in result.stderr
    assert "no operator of this swarm" in result.stderr
    assert held.get("halt") is None


def test_nothing_is_signed_upon_what_no_operator_has_written(run, held, served, alice):
    liar = SwarmRecords(Verifier(held.swarm_id, verify), [Operator(Identity(b"x" * 32).public_key, "alice")])
    liar.follow(held.lineage)
    liar.merge(liar.compose("bans", BansSetting(), Identity(b"x" * 32)))
    served.node.swarm_records = liar
    result = run("peers", "ban", "node-2")
    assert result.exit_code == 1
    assert "can't be believed" in result.stderr
    assert served.node.done == []


def test_a_node_of_another_swarm_gets_nothing_signed(run, held, served):
    served.node.swarm_records = SwarmRecords(Verifier("0" * 16, verify), held.roots)
    assert run("halt").exit_code == 2


def test_operators_name_others_and_take_that_back(run, held, alice, key, tmp_path):
    bob = write_operator_key(tmp_path / "bob", "bob")
    public = f"{bob.public.public_key.hex()}:bob"
    assert run("operators", "add", public).exit_code == 0
    assert held.operators == (alice.public, bob.public)
    again = run("operators", "add", public)
    assert again.exit_code == 1
    assert run("pause", "--swarm", "--operator", str(tmp_path / "bob")).exit_code == 0
    denied = run("operators", "remove", "bob", "--operator", str(tmp_path / "bob"))
    assert denied.exit_code == 1
    assert "root operators can: operator alice" in denied.stderr
    rows = json.loads(run("operators", "list", "--json").stdout)["operators"]
    assert [(row["name"], row["root"]) for row in rows] == [("alice", True), ("bob", False)]
    root = run("operators", "remove", "alice")
    assert root.exit_code == 1
    assert "Rotate the key" in root.stderr
    assert run("operators", "remove", "bob").exit_code == 0
    assert held.operators == (alice.public,)
    assert held.get("pause").proposer == alice.public.id, "what he wrote is signed anew"
    assert value(held, "pause") == PauseSetting(True)
    assert "bob" not in run("operators", "list").stdout
    assert run("operators", "add", "nonsense").exit_code == 2


@pytest.mark.parametrize("digits", [0, 1, 3])
def test_nobody_is_removed_by_a_slip(run, held, alice, tmp_path, digits):
    bob = write_operator_key(tmp_path / "bob", "bob").public
    assert run("operators", "add", f"{bob.public_key.hex()}:bob").exit_code == 0
    result = run("operators", "remove", bob.id[:digits])
    assert result.exit_code == 1
    assert "names 0 of those that could be removed: operator bob" in result.stderr
    assert held.operators == (alice.public, bob)
    assert run("operators", "remove", bob.id[:4]).exit_code == 0
    assert held.operators == (alice.public,)


def test_where_nobody_commands_in_particular_the_node_signs(p2pdrl, served):
    served.node.swarm_records.merge(served.node.swarm_records.compose("stop", OLD_STOP, Identity(b"n" * 32)))
    for words in (
        ("pause", "--swarm"),
        ("stop", "set", "env_steps=5"),
        ("halt",),
        ("peers", "ban", "node-2"),
        ("mode", "set", "local", "--no-wait"),
    ):
        assert p2pdrl(*words, "--api", served.address).exit_code == 0, words
    ban = f"ban {served.node.members[1]['id']}"
    assert served.node.done == ["pause swarm", "stop env_steps=5", "halt", ban, "mode local"]
    denied = p2pdrl("operators", "add", f"{'0' * 64}:x", "--api", served.address)
    assert denied.exit_code == 1
    assert "--add-operator" in denied.stderr
    assert "every member" in p2pdrl("operators", "list", "--api", served.address).stdout


def test_who_is_meant_is_said_clearly(run, held, served):
    node = served.node.members[1]["id"]
    assert run("peers", "ban", node[:6]).exit_code == 0
    assert run("peers", "ban", "nobody").exit_code == 1
    assert run("peers", "ban", node[:3]).exit_code == 1
    served.node.members.append({**served.node.members[1], "id": "9" * 32})
    twice = run("peers", "ban", "node-2")
    assert twice.exit_code == 1
    assert "name one by its id" in twice.stderr
    assert "nobody here" in run("peers", "unban", "node-2").stderr


def test_status_says_who_commanded_and_when(p2pdrl, served):
    at = 1_790_000_000.0
    served.node.state["commands"] = [
        {"key": "mode", "by": "operator alice (1a2b3c4d)", "operator": "alice", "at": at},
        {"key": "stop", "by": "node-1", "operator": None, "at": None},
    ]
    shown = " ".join(p2pdrl("status", "--api", served.address).stdout.split())
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(at))
    assert f"mode by operator alice (1a2b3c4d) on {when}; stop by node-1" in shown


def test_a_key_is_made_with_its_operators(p2pdrl, tmp_path):
    path = tmp_path / "k"
    made = p2pdrl("keygen", str(path), "--name", "alice")
    assert made.stdout == f"{path}\n"
    assert f"{path}.operator is the key of operator alice" in made.stderr
    assert read_swarm_keys(path).operators == (read_operator_key(f"{path}.operator").public,)
    assert p2pdrl("keygen", str(path)).exit_code == 2
    other = tmp_path / "other"
    assert p2pdrl("keygen", str(other), "--no-operator").exit_code == 0
    assert read_swarm_keys(other).operators == ()
    assert not (tmp_path / "other.operator").exists()
    assert p2pdrl("keygen", str(other)).exit_code == 2
    assert not (tmp_path / "other.operator").exists(), "nothing is left of what failed"
    bob = p2pdrl("keygen", "--operator-only", str(tmp_path / "bob"), "--name", "bob").stdout.strip()
    rotated = p2pdrl("key", "rotate", str(path), "--add-operator", bob, "--remove-operator", "alice")
    assert rotated.exit_code == 0, rotated.stderr
    assert [root.name for root in read_swarm_keys(path).operators] == ["bob"]
    assert json.loads(p2pdrl("key", "show", str(path), "--json").stdout)["operators"][0]["name"] == "bob"
    assert p2pdrl("keygen", "--operator-only", "--no-operator", str(tmp_path / "x")).exit_code == 2
