"""The mode of a live swarm is changed through any node, and who comes back follows it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

PACE = ["--set", "node.learner.max_updates_per_s=5", "--set", "task.algorithm.unroll_steps=32"]


def command(node, *words):
    return subprocess.run(
        [sys.executable, "-m", "p2pdrl", *words, "--api", node.api],
        capture_output=True, text=True, timeout=40, check=False,
    )  # fmt: skip


def strategy(node):
    status = node.status()
    return status.get("mode"), status.get("strategy", {}).get("name"), status.get("mode_epoch")


def test_a_live_swarm_changes_its_mode_and_a_founder_that_was_away_follows(swarm, wait_until, no_orphans):
    a = swarm.start("a", *PACE, "--set", "task.strategy.every_updates=2")
    b = swarm.start("b", *PACE, peers=a)
    swarm.training(a, b)
    wait_until(lambda: strategy(b) == ("gossip", "adpsgd", 1), 20, "b follows")
    assert b.status()["strategy"]["options"] == {"every_updates": 2}

    wrong = command(b, "mode", "set", "gossip", "--set", "wieght=0.3")
    assert (wrong.returncode, "did you mean weight?" in wrong.stderr) == (2, True)
    done = command(b, "mode", "set", "gossip", "--set", "weight=0.25", "--wait", "30")
    assert (done.returncode, done.stdout) == (0, "mode is gossip (adpsgd), epoch 2\n"), done.stderr
    assert strategy(a) == strategy(b) == ("gossip", "adpsgd", 2)
    wait_until(lambda: a.json("/v1/rounds"), 20, "a round was counted")
    assert a.json("/v1/mode")["record"]["proposer_name"] == "b"

    a.kill9()
    alone = command(b, "mode", "set", "local", "--wait", "30")
    assert alone.returncode == 0, alone.stderr
    back = swarm.start("a", *PACE, "--set", "task.strategy.every_updates=2", data=a.data, peers=b)
    swarm.training(back)
    wait_until(lambda: strategy(back) == ("local", "local", 3), 20, "the founder follows, on its old options")

    for node in (back, b):
        node.signal(signal.SIGTERM)
    assert [node.wait(20) for node in (back, b)] == [0, 0]
    summary = json.loads((b.data / "summary.json").read_bytes())
    assert [step["protocol"] for step in summary["modes"]] == ["adpsgd", "adpsgd", "local"]
    assert summary["accounting"]["adpsgd"]["rounds"]["ok"] > 0
    assert summary["reason"] == "signal SIGTERM"
