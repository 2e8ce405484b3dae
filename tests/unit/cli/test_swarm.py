"""``p2pdrl swarm up`` with children that only pretend to train: real processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from p2pdrl.errors import UsageError
from p2pdrl.library.node_process import reserved_ports
from p2pdrl.tensors.checkpoint import Checkpoint, to_bytes

FAKE_NODE = """
import argparse, json, os, pathlib, signal, sys, threading

parser = argparse.ArgumentParser()
parser.add_argument("command")
for name in ["name", "listen", "data-dir", "parent-pid", "swarm", "peers", "swarm-key-file", "log-level"]:
    parser.add_argument("--" + name)
parser.add_argument("--roles")
parser.add_argument("--from")
parser.add_argument("--keep-running", action="store_true")
parser.add_argument("--set", action="append", default=[])
parser.add_argument("--config", action="append", default=[])
arguments = parser.parse_args()
plan = json.loads(os.environ["FAKE_PLAN"]).get(arguments.name, {})
if "dies" in plan:
    print(json.dumps({"event": "told the log", "level": "info"}))
    print("p2pdrl: " + plan["dies"], file=sys.stderr)
    sys.exit(2)
from p2pdrl.testing.fake_node import FakeNode, ServedNode
from p2pdrl.cli.node import end_with_parent
end_with_parent(int(arguments.parent_pid))
import p2pdrl.testing.fake_node as testing
node = FakeNode(arguments.name)
node.state.update(policy_version=100 + int(arguments.name[-1]), argv=sys.argv[1:])
over, asked = threading.Event(), threading.Event()
def end():
    over.set()
    asked.set()
# in a thread: a handler that sets an event waits for ever where this one is just about to wait for it
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=end).start())
status = node.status
node.status = lambda: (asked.set(), status())[1]
host, port = arguments.listen.split(":")
real = testing.web.TCPSite
testing.web.TCPSite = lambda runner, h, p: real(runner, host, int(port))
folder = pathlib.Path(arguments.data_dir)
folder.mkdir()
with ServedNode(node):
    pathlib.Path(os.environ["FAKE_PLAN_UP"], arguments.name).write_text(str(os.getpid()))
    asked.wait()
    over.wait(None if "stays" in plan else 0.3)  # the answer is on its way
if "final" in plan:
    status = {**node.status(), "mean_return": plan["final"], "pid": os.getpid()}
    (folder / "summary.json").write_text(json.dumps({"status": status}))
sys.exit(plan.get("code", 0))
"""


@pytest.fixture
def fake_nodes(monkeypatch, tmp_path):
    """Put the fake in place of ``p2pdrl node``; returns a function that sets what each node does."""
    script = tmp_path / "fake_node.py"
    script.write_text(FAKE_NODE)
    # A command that is killed can't remove its temporary folder.
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    up = tmp_path / "up"
    up.mkdir()
    monkeypatch.setattr("p2pdrl.library.node_process.PROGRAM", (sys.executable, str(script)))
    monkeypatch.setenv("FAKE_PLAN_UP", str(up))

    def plan(**nodes):
        monkeypatch.setenv(
            "FAKE_PLAN", json.dumps({name.replace("_", "-"): what for name, what in nodes.items()})
        )
        return up

    plan()
    return plan


def test_a_run_ends_when_its_nodes_do_and_leaves_nothing(p2pdrl, fake_nodes, tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    fake_nodes(node_1={"final": 477.5})
    result = p2pdrl("swarm", "up", "2", "--base-port", "21700", "--set", "task.env.num_envs=2")
    assert result.exit_code == 0, result.stderr
    assert "2 nodes" in result.stdout
    assert "477.5" in result.stdout
    assert result.stdout.count("done") >= 2
    assert "\x1b" not in result.stdout + result.stderr
    assert "node-1" in result.stderr
    assert max(map(len, result.stdout.splitlines())) <= 100
    assert list(scratch.iterdir()) == []


def test_what_the_nodes_are_told(p2pdrl, fake_nodes, tmp_path):
    fake_nodes()
    old = tmp_path / "old.safetensors"
    old.write_bytes(to_bytes(Checkpoint(np.zeros(5, np.float32), {}, {"layout": [["w", [5], "float32"]]})))
    result = p2pdrl(
        "swarm", "up", "2", "--json", "--keep", "--base-port", "21710", "--data-root", str(tmp_path / "data"),
        "--config", "cartpole", "--log-level", "debug", "--from", str(old),
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    document = json.loads(result.stdout)
    first, second = (node["argv"] for node in document["nodes"])
    assert "--peers" not in first
    assert second[second.index("--peers") + 1] == first[first.index("--listen") + 1]
    for argv in (first, second):
        assert "--keep-running" in argv
        assert argv[argv.index("--from") + 1] == str(old)
        assert argv[argv.index("--config") + 1] == "cartpole"
        assert argv[argv.index("--swarm") + 1].startswith("up-")
    assert [node["exit_code"] for node in document["nodes"]] == [0, 0]
    assert (tmp_path / "data" / "node-1.log").exists()


def test_a_checkpoint_that_isn_t_there_is_told_before_anything_starts(p2pdrl, fake_nodes):
    up = fake_nodes()
    result = p2pdrl("swarm", "up", "2", "--base-port", "21715", "--from", "nothing.safetensors")
    assert result.exit_code == 2
    assert "--from nothing.safetensors: there is no checkpoint" in result.stderr
    assert not list(up.iterdir())


def test_the_first_nodes_learn_and_the_others_act_for_them(p2pdrl, fake_nodes):
    fake_nodes()
    up = ("swarm", "up", "4", "--json", "--base-port", "21740")
    result = p2pdrl(*up, "--learners", "2")
    assert result.exit_code == 0, result.stderr
    roles = [node["argv"][node["argv"].index("--roles") + 1] for node in json.loads(result.stdout)["nodes"]]
    assert roles == ["learner", "learner", "actor", "actor"]
    for learners, why in (("4", "--learners 4 of 4 nodes leave none that acts"), ("3", "start 6 nodes, or")):
        refused = p2pdrl(*up, "--learners", learners)
        assert refused.exit_code == 2
        assert why in refused.stderr


@pytest.mark.parametrize(
    ("options", "roles"),
    [
        (["--learners", "1"], ["learner,replay", "actor", "actor"]),
        (["--learners", "1", "--replays", "1"], ["learner", "replay", "actor"]),
    ],
)
def test_nodes_hold_shards_of_a_replay_memory(p2pdrl, fake_nodes, options, roles):
    fake_nodes()
    result = p2pdrl("swarm", "up", "3", "--json", "--base-port", "21750", "--config", "dqn", *options)
    assert result.exit_code == 0, result.stderr
    told = [node["argv"][node["argv"].index("--roles") + 1] for node in json.loads(result.stdout)["nodes"]]
    assert told == roles


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--replays", "1"], "goes with --learners"),
        (["--config", "dqn", "--learners", "1", "--replays", "1"], "--replays 1 of 2 nodes leave none"),
        (["--config", "ppo", "--learners", "1", "--replays", "1"], "ppo has no replay memory"),
    ],
)
def test_shards_that_cant_be_are_refused(p2pdrl, options, why):
    refused = p2pdrl("swarm", "up", "2", *options)
    assert refused.exit_code == 2
    assert why in refused.stderr


def test_a_node_that_fails_later_fails_the_run_but_not_the_others(p2pdrl, fake_nodes):
    fake_nodes(node_2={"code": 3})
    result = p2pdrl("swarm", "up", "2", "--base-port", "21720")
    assert result.exit_code == 1
    assert "1 of 2 nodes failed (node-2 with 3)" in result.stderr
    assert "done" in result.stdout
    assert "failed" in result.stdout


def test_a_node_that_cant_start_ends_the_run_with_its_words(p2pdrl, fake_nodes):
    fake_nodes(node_1={"dies": "the port is taken"}, node_2={"stays": True})
    result = p2pdrl("swarm", "up", "2", "--base-port", "21730")
    assert result.exit_code == 2, "as the node did"
    assert "node-1 said: the port is taken" in result.stderr
    assert "left" in result.stdout


def test_a_bad_configuration_starts_nothing(p2pdrl, fake_nodes):
    up = fake_nodes()
    result = p2pdrl("swarm", "up", "2", "--set", "task.env.idd=x")
    assert result.exit_code == 2
    assert list(up.iterdir()) == []


def test_a_data_root_that_cant_be_or_a_key_that_isnt_there_starts_nothing(
    p2pdrl, fake_nodes, tmp_path, monkeypatch
):
    up = fake_nodes()
    file = tmp_path / "file"
    file.touch()
    missing = p2pdrl("swarm", "up", "1", "--swarm-key-file", str(tmp_path / "no.key"))
    assert (missing.exit_code, "no swarm key at" in missing.stderr) == (2, True)
    below = p2pdrl("swarm", "up", "1", "--data-root", str(file / "below"))
    assert (below.exit_code, "can't make the data root" in below.stderr) == (2, True)
    monkeypatch.setattr("p2pdrl.cli.swarm.os.access", lambda path, mode: not mode & os.W_OK)
    others = p2pdrl("swarm", "up", "1", "--data-root", str(tmp_path))
    assert (others.exit_code, "can't write to the data root" in others.stderr) == (2, True)
    assert list(up.iterdir()) == []


def test_a_log_that_cant_be_written_is_one_line(p2pdrl, fake_nodes, tmp_path):
    fake_nodes()
    (tmp_path / "node-1.log").mkdir()
    result = p2pdrl("swarm", "up", "1", "--base-port", "21735", "--data-root", str(tmp_path))
    assert result.exit_code == 1
    assert result.stderr.startswith("p2pdrl: can't write the log ")


@pytest.mark.parametrize("count", ["0", "65", "x"])
def test_bad_counts(p2pdrl, count):
    assert p2pdrl("swarm", "up", count).exit_code == 2


def in_a_process(port, script):
    """Run ``swarm up 2`` in a process of its own, with the fake program."""
    code = (
        "import sys\n"
        "import p2pdrl.library.node_process as fleet\n"
        f"fleet.PROGRAM = (sys.executable, {str(script)!r})\n"
        "from p2pdrl.cli.main import main\n"
        f"sys.exit(main(['swarm', 'up', '2', '--base-port', '{port}']))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def wait_until(what, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.02)


def is_gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM, signal.SIGKILL]
)
def test_no_node_outlives_the_command(fake_nodes, tmp_path, number):
    up = fake_nodes(node_1={"stays": True}, node_2={"stays": True})
    parent = in_a_process(21740 + 10 * number, tmp_path / "fake_node.py")
    wait_until(lambda: len([file for file in up.iterdir() if file.read_text()]) == 2)
    children = [int(file.read_text()) for file in up.iterdir()]
    os.kill(parent.pid, number)
    out, err = parent.communicate(timeout=30)
    wait_until(lambda: all(map(is_gone, children)), 5)
    if number != signal.SIGKILL:
        assert parent.returncode == (130 if number == signal.SIGINT else 0), err
        assert out.count("left") == 2


def test_reserved_ports_are_apart_and_open_to_a_server():
    import socket

    with reserved_ports(2, 22700) as first, reserved_ports(2, 22700) as second:
        assert len({*first, *second}) == 4
        # create_server sets SO_REUSEADDR, as asyncio does.
        with (
            socket.create_server(("127.0.0.1", first[0])) as server,
            socket.create_connection(server.getsockname()),
        ):
            pass
    with pytest.raises(UsageError, match="free ports"), reserved_ports(3, 65534):
        pass
