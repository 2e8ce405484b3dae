"""Commands that talk to a node, against a fake one over real HTTP."""

from __future__ import annotations

import errno
import json
import os
import threading

import pytest

from p2pdrl.api.keyfile import write_swarm_key

ASKING = [["status"], ["peers"], ["top"], ["events"], ["pause"], ["resume"], ["checkpoint"], ["leave"]]


@pytest.mark.parametrize("command", ASKING)
def test_nobody_there_is_exit_3_and_one_line(p2pdrl, free_address, command):
    result = p2pdrl(*command, "--api", free_address)
    assert result.exit_code == 3
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert free_address in result.stderr
    assert "p2pdrl node" in result.stderr


@pytest.mark.parametrize("command", ASKING)
def test_a_bad_address_is_exit_2(p2pdrl, command):
    result = p2pdrl(*command, "--api", "nonsense:port")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1


def test_status_shows_what_a_researcher_looks_for(p2pdrl, served):
    served.node.reasons = ["the disk is full"]
    result = p2pdrl("status", "--api", served.address)
    assert result.exit_code == 0
    for part in ["node-1", "240,000 steps", "431.2", "goal: return 475", "unwell", "the disk is full"]:
        assert part in result.stdout


def test_the_address_may_come_from_the_environment(p2pdrl, served, monkeypatch):
    monkeypatch.setenv("P2PDRL_API", served.address)
    assert p2pdrl("status").exit_code == 0


@pytest.mark.parametrize("command", ["status", "peers", "top", "events"])
def test_json_is_one_document(p2pdrl, served, command):
    result = p2pdrl(command, "--json", "--api", served.address)
    assert result.exit_code == 0
    json.loads(result.stdout)


def test_peers_are_a_table_of_at_most_100_columns(p2pdrl, served):
    served.node.members[1].update(name="n" * 300, address="[2001:db8::1234:5678:9abc]:7700")
    result = p2pdrl("peers", "--api", served.address)
    lines = result.stdout.splitlines()
    assert len(lines) == 5
    assert lines[4].startswith("no room for: ")
    assert max(map(len, lines)) <= 100
    assert "node-1" in lines[2]


def test_names_cant_steer_the_terminal(p2pdrl, served):
    served.node.members[1]["name"] = "\x1b[2J[red]evil\r\n\x07"
    served.node.state["name"] = "\x1b]0;evil\x07"
    served.node.log.emit("join", "\x1b[2Jevil")
    for command in ["status", "peers", "events"]:
        output = p2pdrl(command, "--api", served.address).stdout
        assert "evil" in output
        assert not {"\x1b", "\x07", "\r"} & set(output)
    assert "[red]evil" in p2pdrl("peers", "--api", served.address).stdout


@pytest.mark.parametrize(
    "broken", [{"members": None, "stop": [], "learner": 3, "exchanges": "x"}, {"mean_return": "nan"}]
)
def test_an_odd_status_is_shown_as_far_as_it_goes(p2pdrl, served, broken):
    served.node.state.update(broken)
    assert p2pdrl("status", "--api", served.address).exit_code == 0


@pytest.mark.parametrize(
    ("command", "done"),
    [
        (["pause"], "pause node"), (["pause", "--swarm"], "pause swarm"), (["resume"], "resume node"),
        (["resume", "--swarm"], "resume swarm"), (["checkpoint"], "checkpoint"),
        (["leave", "--timeout", "0"], "leave"),
    ],
)  # fmt: skip
def test_actions(p2pdrl, served, command, done):
    result = p2pdrl(*command, "--api", served.address)
    assert result.exit_code == 0
    assert served.node.done == [done]
    assert result.stdout.count("\n") == 1


def test_actions_without_the_token_are_exit_2(p2pdrl, served, tmp_path):
    (tmp_path / "token").unlink()
    result = p2pdrl("pause", "--api", served.address)
    assert result.exit_code == 2
    assert "--data-dir" in result.stderr
    assert served.node.done == []


def test_roles_are_shown_and_changed(p2pdrl, served):
    served.node.members = [
        {"name": "first", "id": "0", "state": "alive", "self": True, "roles": ["actor"]},
        {"name": "second", "id": "1", "state": "alive", "roles": ["learner", "replay"]},
        {"name": "gone", "id": "2", "state": "dead", "roles": ["learner"]},
    ]
    shown = p2pdrl("roles", "show", "--api", served.address)
    assert shown.stdout == "first   actor\nsecond  learner, replay\n"
    rows = json.loads(p2pdrl("roles", "show", "--json", "--api", served.address).stdout)
    assert [row["roles"] for row in rows] == [["actor"], ["learner", "replay"]]
    told = p2pdrl("roles", "set", "actor", "--api", served.address)
    assert (told.exit_code, told.stdout) == (0, "the node is actor\n"), told.stderr
    assert served.node.done == ["roles actor"]
    late = p2pdrl("roles", "set", "learner", "--wait", "0.3", "--api", served.address)
    assert late.exit_code == 4
    assert "isn't at work in its new roles after 0.3 s" in late.stderr
    assert p2pdrl("roles", "set", "king", "--api", served.address).exit_code == 2
    assert p2pdrl("roles", "set", ",", "--api", served.address).exit_code == 2


def test_leave_waits_until_the_node_is_gone(p2pdrl, served):
    timer = threading.Timer(0.15, served.stop)  # as a node that says goodbye first
    served.node.on_leave = timer.start
    result = p2pdrl("leave", "--api", served.address)
    timer.join()
    assert result.exit_code == 0
    assert "has left" in result.stdout


def test_leave_gives_up_with_4(p2pdrl, served):
    assert p2pdrl("leave", "--timeout", "0.05", "--api", served.address).exit_code == 4


def test_wait(p2pdrl, served):
    assert p2pdrl("wait", "--healthy", "2", "--timeout", "0", "--api", served.address).exit_code == 0
    served.node.members[1].update(healthy=False, reasons=["the learner is down"])
    result = p2pdrl("wait", "--healthy", "2", "--timeout", "0", "--api", served.address)
    assert result.exit_code == 4
    assert "1 of 2" in result.stderr
    assert "node-2: the learner is down" in result.stderr


def test_wait_for_members_that_train(p2pdrl, served):
    api = ["--timeout", "0", "--api", served.address]
    assert p2pdrl("wait", "--training", "2", *api).stdout == "2 members train\n"
    served.node.members[1].update(trains=False, training_state="starting")
    assert p2pdrl("wait", "--healthy", "2", *api).exit_code == 0
    result = p2pdrl("wait", "--training", "2", "--healthy", "2", *api)
    assert result.exit_code == 4
    assert "1 of 2 members train (node-2 is starting)" in result.stderr
    assert "healthy" not in result.stderr


def test_wait_tells_scripts_what_it_saw(p2pdrl, served):
    api = ["--json", "--timeout", "0", "--api", served.address]
    found = json.loads(p2pdrl("wait", "--healthy", "2", *api).stdout)
    found.pop("waited_s")
    counts = {"healthy": 2, "training": 2, "members": 2}
    assert found == {"ok": True, **counts, "wanted": {"healthy": 2}, "missing": ""}
    result = p2pdrl("wait", "--training", "3", *api)
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    assert (found["ok"], found["missing"]) == (False, "2 of 3 members train")


def test_wait_for_a_node_that_never_comes_is_3(p2pdrl, free_address):
    result = p2pdrl("wait", "--healthy", "1", "--timeout", "0", "--api", free_address)
    assert result.exit_code == 3
    assert free_address in result.stderr


def test_wait_for_a_node_that_goes_again_is_4(p2pdrl, monkeypatch):
    from p2pdrl.api.client import NodeClient
    from p2pdrl.errors import DaemonUnreachableError

    answers = [[{"name": "one", "state": "alive", "healthy": True}]]

    def peers(_self):
        if not answers:
            raise DaemonUnreachableError("no node answers")
        return answers.pop()

    monkeypatch.setattr(NodeClient, "peers", peers)
    monkeypatch.setattr("p2pdrl.cli.wait._PAUSE_S", 0.001)
    result = p2pdrl("wait", "--healthy", "2", "--timeout", "0.005")
    assert result.exit_code == 4
    assert "no node answers" in result.stderr


def test_events_since(p2pdrl, served):
    for number in range(3):
        served.node.log.emit("tick", f"number {number}")
    assert p2pdrl("events", "--api", served.address).stdout.count("\n") == 3
    assert "number 2" in p2pdrl("events", "--since", "2", "--api", served.address).stdout


def test_following_events_ends_with_3_when_the_node_does(p2pdrl, served):
    import threading

    for number in range(12):
        served.node.log.emit("tick", f"number {number}")
    timer = threading.Timer(0.3, served.stop)
    timer.start()
    result = p2pdrl("events", "-f", "--api", served.address)
    timer.join()
    assert result.exit_code == 3
    assert result.stdout.count("\n") == 10


def test_keygen(p2pdrl, tmp_path):
    path = tmp_path / "swarm.key"
    assert p2pdrl("keygen", str(path)).stdout == f"{path}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    again = p2pdrl("keygen", str(path))
    assert again.exit_code == 2
    assert "never overwritten" in again.stderr


@pytest.mark.parametrize(("written", "file"), [(0, "k.operator"), (1, "k")])
def test_keys_on_a_full_disk_leave_nothing_behind(p2pdrl, tmp_path, monkeypatch, written, file):
    """Neither of the first file nor, where that could be written, of the second one."""
    fsync, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > written:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    path = tmp_path / "k"
    monkeypatch.setattr(os, "fsync", full)
    result = p2pdrl("keygen", str(path))
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == (
        f"p2pdrl: can't write the key to {tmp_path / file}: the disk is full: free some space\n"
    )
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(os, "fsync", fsync)
    assert p2pdrl("keygen", str(path)).exit_code == 0


def test_a_swarm_key_opens_a_keyed_node(p2pdrl, served, tmp_path):
    from p2pdrl.api.keyfile import read_swarm_keys

    write_swarm_key(tmp_path / "k")
    served.node.swarm_keys = read_swarm_keys(tmp_path / "k").good(0.0)
    served.node.data_dir = "/nowhere"
    assert p2pdrl("status", "--api", served.address).exit_code == 2
    assert p2pdrl("status", "--api", served.address, "--swarm-key-file", str(tmp_path / "k")).exit_code == 0


def test_a_key_is_rotated_and_looked_at_without_being_shown(p2pdrl, tmp_path):
    path = tmp_path / "k"
    write_swarm_key(path)
    before = p2pdrl("key", "show", str(path))
    assert before.exit_code == 0
    result = p2pdrl("key", "rotate", str(path), "--overlap", "2")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == before.stdout.splitlines()[0], "the swarm's id stays"
    new, old = result.stdout.splitlines()[1:]
    assert "taken, shown from" in new
    assert "shown, taken until" in old
    assert "copy" in result.stderr
    found = json.loads(p2pdrl("key", "show", str(path), "--json").stdout)
    assert [(key["shown"], key["taken"]) for key in found["keys"]] == [(False, True), (True, True)]
    assert found["keys"][1]["until"] - found["keys"][0]["from"] == pytest.approx(7200, abs=1)
    assert not any(line.split()[0] in result.stdout for line in path.read_text().splitlines())
    again = p2pdrl("key", "rotate", str(path))
    assert again.exit_code == 2
    assert "being rotated already" in again.stderr


def test_rotating_no_key_says_what_to_do(p2pdrl, tmp_path):
    result = p2pdrl("key", "rotate", str(tmp_path / "none"))
    assert result.exit_code == 2
    assert "p2pdrl keygen" in result.stderr
