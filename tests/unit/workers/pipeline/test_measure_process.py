"""The child that lists a task's blocks."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.config.task import EnvConfig, NetworkConfig, PPOConfig, RegressionConfig, TaskConfig
from p2pdrl.workers.pipeline import measure
from p2pdrl.workers.pipeline.protocol import Blocks


@pytest.fixture
def listed(monkeypatch, capsys):
    """Run it on a task; returns its code, its answer, and what it told."""

    def run(task: TaskConfig, *args: str):
        monkeypatch.setattr(sys, "argv", ["measure", "--device", "cpu", *args])
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(msgspec.json.encode(task))))
        code = measure.main()
        out, err = capsys.readouterr()
        return code, msgspec.json.decode(out, type=Blocks) if out else None, err

    return run


def test_a_policy(listed):
    task = TaskConfig(
        env=EnvConfig(num_envs=2), network=NetworkConfig(hidden=(8, 8)), algorithm=PPOConfig(unroll_steps=8)
    )
    code, blocks, _ = listed(task, "--parts", "4")
    assert code == 0
    assert [layer.name for layer in blocks.layers] == [
        "actor.0 + critic.0",
        "actor.2 + critic.2",
        "policy_head + value_head",
    ]
    assert [layer.parameter_bytes for layer in blocks.layers] == [4 * 80, 4 * 144, 4 * 27]
    assert [layer.output_bytes for layer in blocks.layers] == [4 * 4 * 16, 4 * 4 * 16, 4 * 4 * 3]
    assert (blocks.device, blocks.microbatches) == ("cpu", 4)


def test_a_regression(listed):
    task = TaskConfig(algorithm=RegressionConfig(kind="classifier", hidden=(4,), rows=64))
    code, blocks, _ = listed(task, "--parts", "1")
    assert (code, len(blocks.layers)) == (0, 2)


def test_what_is_wrong_is_one_line(listed):
    code, blocks, told = listed(TaskConfig(env=EnvConfig(id="Nope-v3")), "--parts", "1")
    assert (code, blocks) == (2, None)
    assert told.startswith("p2pdrl: task.env.id = 'Nope-v3'")
    assert len(told.splitlines()) == 1
