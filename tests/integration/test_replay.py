"""The replay memory outlives the learner, and the node if it is on disk."""

from __future__ import annotations

import os
import signal

import pytest

DQN = [
    *("--config", "dqn", "--set", "task.stop.env_steps=0", "--set", "task.algorithm.anneal=none"),
    *("--set", "task.algorithm.buffer_size=20000", "--set", "task.evaluation.every=0"),
    *("--set", "node.learner.max_updates_per_s=40", "--set", "node.learner.restart_min_s=0.1"),
]


def rows(node) -> float:
    learner = node.status().get("learner") or {}
    return (learner.get("metrics") or {}).get("replay_rows", 0.0)


@pytest.mark.parametrize("actors", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_learner_loses_no_transition(swarm, wait_until, no_orphans, actors):
    node = swarm.start("solo", *DQN, "--actors", str(actors))
    wait_until(lambda: rows(node) > 1500, 60, "the memory fills")
    before, pid = rows(node), node.learner_pid()
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: node.status()["learner"]["restarts"] == 1, 30, "another learner runs")
    wait_until(lambda: rows(node) and node.status()["learner"]["pid"] != pid, 30, "it reports")
    assert rows(node) >= before - 8  # each of 8 streams was cut behind its newest row
    node.signal(signal.SIGTERM)
    assert node.wait(20) == 0


@pytest.mark.slow
def test_on_disk_it_outlives_the_node(swarm, wait_until, no_orphans):
    on_disk = [*DQN, "--set", "node.learner.replay_on_disk=true"]
    node = swarm.start("solo", *on_disk)
    wait_until(lambda: rows(node) > 1500, 60, "the memory fills")
    before = rows(node)
    node.kill9()
    again = swarm.start("solo", *on_disk, data=node.data)
    wait_until(lambda: rows(again), 60, "it reports")
    assert rows(again) >= before - 8
    assert len(list(node.data.glob("replay-*.json"))) == 1
    again.signal(signal.SIGTERM)
    assert again.wait(20) == 0
