"""``p2pdrl export``: what it hands to its child process, and what it shows of the card."""

from __future__ import annotations

import json
import subprocess

import pytest

CARD = {
    "format": "onnx",
    "bytes": 12_000,
    "environment": "CartPole-v1",
    "env_steps": 54_000,
    "inputs": [{"name": "observation"}],
    "outputs": [{"name": "action"}, {"name": "logits"}, {"name": "value"}],
}


@pytest.fixture
def child(monkeypatch):
    """Stands in for the child process; returns the commands that it got, and itself."""
    started = []

    def run(command, **_options):
        started.append(command)
        return subprocess.CompletedProcess(command, run.code, json.dumps(CARD).encode())

    run.code = 0
    monkeypatch.setattr(subprocess, "run", run)
    return started, run


def test_a_checkpoint_is_handed_on_and_the_card_shown(p2pdrl, child, tmp_path):
    started, _ = child
    file = tmp_path / "last.safetensors"
    file.touch()
    result = p2pdrl("export", str(file), "--format", "onnx", "--out", "policy.onnx", "--allow-import")
    assert result.exit_code == 0
    assert result.stdout == (
        "policy.onnx: onnx, 12.0 kB\nCartPole-v1, 54,000 steps\nobservation → action, logits, value\n"
    )
    [command] = started
    assert command[1:4] == ["-m", "p2pdrl.library.exporter", str(file)]
    assert command[4:] == ["--format", "onnx", "--out", "policy.onnx", "--allow-import"]


def test_a_peer_is_named_and_json_is_the_whole_card(p2pdrl, child):
    started, _ = child
    result = p2pdrl("export", "--peer", "10.0.0.1:7700", "--out", "policy.pt2", "--json")
    assert json.loads(result.stdout) == CARD
    assert started[0][3:] == ["10.0.0.1:7700", "--out", "policy.pt2"]


def test_the_childs_failure_is_ours(p2pdrl, child):
    _, run = child
    run.code = 2
    assert p2pdrl("export", "--peer", "x", "--out", "policy.onnx").exit_code == 2
    run.code = -9
    assert p2pdrl("export", "--peer", "x", "--out", "policy.onnx").exit_code == 1


@pytest.mark.parametrize("arguments", [[], [".", "--peer", "x"]])
def test_one_source_is_named(p2pdrl, arguments):
    result = p2pdrl("export", *arguments, "--out", "policy.onnx")
    assert result.exit_code == 2
    assert "either a CHECKPOINT, as in DATA_DIR/checkpoints, or --api" in result.stderr
