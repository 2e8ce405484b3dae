"""What a person sees when something is wrong: one line that says what to do, and the right exit code."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.conftest import RealSwarm, wait_until

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3


def p2pdrl(*arguments, timeout_s=40, env=None):
    done = subprocess.run(
        [sys.executable, "-m", "p2pdrl", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=os.environ | (env or {}),
    )
    return done.returncode, done.stderr.strip().splitlines()


def last_line(lines):
    """The message itself; log lines may stand before it, a traceback nowhere."""
    assert not any("Traceback" in line for line in lines), "\n".join(lines)
    assert lines[-1].startswith("p2pdrl: "), lines
    return lines[-1]


@pytest.fixture(scope="module")
def keyed(tmp_path_factory):
    """A node that others meet, and its key."""
    folder = tmp_path_factory.mktemp("keyed")
    key = folder / "key"
    assert p2pdrl("keygen", key)[0] == OK
    swarm = RealSwarm(folder)
    swarm.temporary.mkdir()
    try:
        node = swarm.start("keyed", "--swarm-key-file", str(key), "--set", "node.learner.max_updates_per_s=2")
        wait_until(lambda: "trains CartPole-v1" in node.text(), 60, "it trains")
        yield node, key
    finally:
        swarm.close()


def test_a_second_node_takes_the_next_port_and_folder(tmp_path):
    env = os.environ | {"P2PDRL_DATA_ROOT": str(tmp_path)}
    line = [sys.executable, "-m", "p2pdrl", "node", "--peers", "127.0.0.1:7700"]
    line += ["--set", "node.learner.max_updates_per_s=2"]
    nodes, logs = [], [tmp_path / "1.log", tmp_path / "2.log"]
    try:
        for log in logs:
            with log.open("wb") as out:
                nodes.append(subprocess.Popen(line, stdout=out, stderr=out, env=env))
            wait_until(lambda log=log: "listens on" in log.read_text(), 30, "it listens")
        # They start together, so either may found the swarm that the other joins.
        wait_until(lambda: "joined a swarm" in "".join(log.read_text() for log in logs), 60, "one joins")
        port = [int(re.search(r"listens on 127\.0\.0\.1:(\d+)", log.read_text())[1]) for log in logs]
        if port[0] != 7700:
            pytest.skip("another program has port 7700")
        # The next free one: a test beside this one may hold 7701.
        assert 7700 < port[1] < 7710
        assert f"port 7700 is taken; this node takes {port[1]}" in logs[1].read_text()
        assert f"this node takes {tmp_path}/node-2" in logs[1].read_text()
    finally:
        for node in nodes:
            node.terminate()
        assert [node.wait(15) for node in nodes] == [OK, OK]


def test_wrong_key_wrong_task_and_no_token(keyed, tmp_path):
    node, key = keyed
    other = tmp_path / "other"
    assert p2pdrl("keygen", other)[0] == OK
    common = ["node", "--listen", "127.0.0.1:0", "--peers", node.api]
    code, lines = p2pdrl(*common, "--swarm-key-file", other, "--data-dir", tmp_path / "x")
    assert code == USAGE
    assert "--swarm-key-file" in last_line(lines)
    task = ["--set", "task.env.id=Pendulum-v1", "--data-dir", tmp_path / "y"]
    code, lines = p2pdrl(*common, "--swarm-key-file", key, *task)
    assert code == USAGE
    assert "trains CartPole-v1" in last_line(lines)
    code, lines = p2pdrl("status", "--api", node.api, env={"P2PDRL_DATA_ROOT": str(tmp_path)})
    assert code == OK, lines
    code, lines = p2pdrl("keygen", key)
    assert code == USAGE
    assert "never overwritten" in last_line(lines)


def test_the_status_of_nobody_says_what_to_start():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        code, lines = p2pdrl("status", "--api", f"127.0.0.1:{nobody.getsockname()[1]}")
    assert code == UNREACHABLE
    assert "p2pdrl node" in last_line(lines)


@pytest.mark.slow
def test_nobody_listening_is_told_and_tried_for_ever(swarm):
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        node = swarm.start("alone", "--peers", address)
        wait_until(lambda: f"no answer from {address} yet" in node.text(), 30, "it says so")
        assert node.process.poll() is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--set", "task.env.id=CartPole-v9"], "CartPole-v1"),
        (["--set", "task.env.idd=CartPole-v1"], "did you mean task.env.id"),
        (["--set", "task.algorithm.learning_rate=fast"], "task.algorithm.learning_rate"),
        (["--config", "cartpol"], "cartpole"),
        (["--device", "cuda:7"], "cpu"),
        (["--listen", "0.0.0.0:0"], "keygen"),
        (["--swarm-key-file", "/nowhere/key"], "/nowhere/key"),
        (["--peers", "a..b:7700"], "isn't an address"),
        (["--data-dir", "/proc/nope"], "/proc/nope"),
    ],
)
def test_bad_input(arguments, words, tmp_path):
    code, lines = p2pdrl("node", "--data-dir", tmp_path / "data", "--listen", "127.0.0.1:0", *arguments)
    assert code == USAGE
    assert words in last_line(lines)
    assert not any("founds a swarm" in line for line in lines)
    assert not (tmp_path / "data").exists()


def test_a_taken_port_and_a_locked_folder(keyed, tmp_path):
    node, _ = keyed
    code, lines = p2pdrl("node", "--listen", node.api, "--data-dir", tmp_path / "other")
    assert code == USAGE
    assert "is taken" in last_line(lines)
    assert not (tmp_path / "other").exists()
    code, lines = p2pdrl("node", "--listen", "127.0.0.1:0", "--data-dir", node.data)
    assert code == USAGE
    assert "in use by another node" in last_line(lines)


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small disk wants root")
    folder = tmp_path / "disk"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", folder], check=False).returncode:
        pytest.skip("this machine lets nobody mount a tmpfs")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def fill(folder: Path) -> Path:
    file = folder / "filler"
    with file.open("wb", buffering=0) as out:
        try:
            while True:
                out.write(b"\0" * 4096)
        except OSError:
            return file


@pytest.mark.slow
def test_a_full_disk_is_a_warning_and_training_goes_on(small_disk, swarm):
    node = swarm.start("small", "--set", "node.checkpoint.every_s=1", data=small_disk / "data")
    swarm.training(node)
    filler = fill(small_disk)
    wait_until(lambda: node.events("checkpoint-failed"), 20, "it warns")
    before = node.status()
    assert before["last_checkpoint"]["error"]
    assert not before["healthy"]
    wait_until(lambda: node.status()["updates"] > before["updates"] + 5, 20, "it trains on")
    filler.unlink()
    wait_until(lambda: node.events("checkpoint-works"), 20, "it saves again")
    assert node.status()["last_checkpoint"]["error"] is None


def test_a_disk_that_is_full_at_the_start_is_told_in_one_line(small_disk):
    fill(small_disk)
    code, lines = p2pdrl("node", "--listen", "127.0.0.1:0", "--data-dir", small_disk / "data")
    assert code == FAILED
    assert "the disk is full" in last_line(lines)
