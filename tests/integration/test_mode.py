"""The mode of a live swarm is changed through any node, and who comes back follows it."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
    a = swarm.found("a", *PACE, "--set", "task.strategy.every_updates=2")
    b = swarm.start("b", *PACE, peers=a)
    swarm.training(a, b)
    wait_until(lambda: strategy(b) == ("gossip", "adpsgd", 1), 20, "b follows")
    assert b.status()["strategy"]["options"] == {"every_updates": 2}

    wrong = command(b, "mode", "set", "gossip", "--set", "wieght=0.3")
    assert (wrong.returncode, "did you mean weight?" in wrong.stderr) == (2, True)
    done = command(b, "mode", "set", "gossip", "--set", "weight=0.25", "--wait", "30")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "mode is gossip: adpsgd (weight=0.25), epoch 2\n"
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
    summary = b.summary()
    assert [step["protocol"] for step in summary["modes"]] == ["adpsgd", "adpsgd", "local"]
    assert summary["accounting"]["adpsgd"]["rounds"]["ok"] > 0
    assert summary["reason"] == "signal SIGTERM"


def end(*nodes):
    for node in nodes:
        node.signal(signal.SIGTERM)
        assert node.wait(20) == 0


def switched_and_ended(swarm):
    """Two nodes that were switched to a server, and ended; return them with the mode's record."""
    a = swarm.found("a", *PACE, "--set", "task.strategy.every_updates=2")
    b = swarm.start("b", *PACE, peers=a)
    swarm.training(a, b)
    done = command(b, "mode", "set", "server-sync", "--wait", "30")
    assert done.returncode == 0, done.stderr
    record = b.json("/v1/mode")["record"]
    end(b, a)
    return a, b, record


@pytest.mark.slow
def test_a_swarm_that_was_off_goes_on_in_its_last_mode(swarm, wait_until):
    a, b, record = switched_and_ended(swarm)
    a = swarm.start("a", *PACE, "--set", "task.strategy.every_updates=2", data=a.data)
    b = swarm.start("b", *PACE, data=b.data, peers=a)
    swarm.training(a, b)
    for node in (a, b):
        wait_until(lambda node=node: strategy(node) == ("server-sync", "server_sync", 2), 20, "the last mode")
        assert node.json("/v1/mode")["record"] == record
    assert "gossip: adpsgd" in a.events("mode-recalled")[0]["text"]
    wait_until(lambda: b.rounds_in("server_sync") > 0, 30, "rounds with a server")


@pytest.mark.slow
def test_a_founder_that_forgot_the_mode_hears_of_it_and_one_told_so_begins_in_its_own(swarm, wait_until):
    a, b, _ = switched_and_ended(swarm)
    kept = next(a.data.glob("modes/*.json"))
    kept.write_bytes(kept.read_bytes()[:-20])
    a = swarm.start("a", *PACE, data=a.data)
    swarm.training(a)
    assert "gossip: adpsgd" in a.events("mode-unreadable")[0]["text"]
    b = swarm.start("b", *PACE, data=b.data, peers=a)
    swarm.training(b)
    wait_until(lambda: strategy(a)[0] == strategy(b)[0] == "server-sync", 20, "b remembers")
    end(b, a)

    a = swarm.start("a", *PACE, "--mode-from-config", data=a.data)
    b = swarm.start("b", *PACE, data=b.data, peers=a)
    swarm.training(a, b)
    wait_until(lambda: strategy(a) == strategy(b) == ("gossip", "adpsgd", 3), 20, "the configuration's mode")
