"""``p2pdrl eval`` with a child that only pretends to play."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

RESULT = {
    "mean": 480.5,
    "std": 3.0,
    "median": 481.0,
    "min": 470.0,
    "max": 500.0,
    "mean_length": 480.5,
    "returns": [],
}
DOCUMENT = {
    "env": "CartPole-v1", "policy_version": 7, "env_steps": 7000, "episodes": 3, "seed": 0, "sampled": RESULT,
    "greedy": RESULT,
}  # fmt: skip


@pytest.fixture
def child(monkeypatch):
    """Stands in for the evaluator; returns what it was called with, and the checkpoint's bytes."""
    calls = []
    outcome = {"code": 0}

    def run(command, **_options):
        calls.append((command, Path(command[3]).read_bytes()))
        return subprocess.CompletedProcess(command, outcome["code"], json.dumps(DOCUMENT).encode())

    monkeypatch.setattr("p2pdrl.cli.evaluate.subprocess.run", run)
    return calls, outcome


def test_a_file(p2pdrl, child, tmp_path, monkeypatch):
    calls, _ = child
    monkeypatch.setattr("p2pdrl.cli.evaluate.VIDEO_PACKAGES", ())
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"parameters")
    result = p2pdrl("eval", str(path), "--episodes", "3", "--allow-import", "--video", "out.mp4")
    assert result.exit_code == 0
    assert "480.5" in result.stdout
    [(command, data)] = calls
    assert data == b"parameters"
    assert command[1:4] == ["-m", "p2pdrl.workers.evaluator", str(path)]
    assert {"--allow-import", "--video"} <= set(command)
    assert command[command.index("--episodes") + 1] == "3"
    assert json.loads(p2pdrl("eval", str(path), "--json").stdout) == DOCUMENT


def test_a_film_that_cant_be_made_is_told_before_anything_is_played(p2pdrl, child, tmp_path, monkeypatch):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"parameters")
    monkeypatch.setattr("p2pdrl.cli.evaluate.VIDEO_PACKAGES", ("no_such_package",))
    monkeypatch.chdir(tmp_path)
    result = p2pdrl("eval", str(path), "--video", "out.mp4")
    assert result.exit_code == 2
    assert "no_such_package; run: pip install 'p2pdrl[video]'" in result.stderr
    monkeypatch.setattr("p2pdrl.cli.evaluate.VIDEO_PACKAGES", ())
    assert "make it, or name another" in p2pdrl("eval", str(path), "--video", "no/out.mp4").stderr
    assert "out.mp4" in p2pdrl("eval", str(path), "--video", "out.avi").stderr
    assert child[0] == []


def test_a_running_node(p2pdrl, child, served):
    calls, _ = child
    assert p2pdrl("eval", "--peer", served.address).exit_code == 0
    assert calls[0][1] == b"p2pdrl" * 600_000


def test_the_childs_code_is_ours(p2pdrl, child, tmp_path):
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"")
    _, outcome = child
    for code, expected in [(1, 1), (2, 2), (-9, 1)]:
        outcome["code"] = code
        assert p2pdrl("eval", str(path)).exit_code == expected


@pytest.mark.parametrize("args", [[], ["/no/such/file"], ["x", "--peer", "y"], ["--peer", "a:b"]])
def test_bad_command_lines(p2pdrl, child, args):
    assert p2pdrl("eval", *args).exit_code == 2
    assert child[0] == []


def test_a_peer_that_isnt_there(p2pdrl, child, free_address):
    assert p2pdrl("eval", "--peer", free_address).exit_code == 3


def test_history_shows_the_swarm_s_own_evaluations(p2pdrl, served):
    shown = p2pdrl("eval", "--peer", served.address, "--history").stdout.splitlines()
    assert shown[0].split() == ["steps", "mean", "std", "episodes", "length", "took", "node"]
    assert shown[2].split()[:5] == ["100,000", "400.0", "31.5", "30", "400.0"]
    found = json.loads(p2pdrl("eval", "--peer", served.address, "--history", "--json").stdout)
    assert [row["env_steps"] for row in found] == [50_000, 100_000]
    served.node.last_evaluations = []
    assert p2pdrl("eval", "--peer", served.address, "--history").stdout == "no evaluation yet\n"
    assert p2pdrl("eval", "--history").exit_code == 2
