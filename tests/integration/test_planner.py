"""The planner against real nodes: rounds and bytes of pairwise averaging, with learners that are paced."""

from __future__ import annotations

import time

import pytest

from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.planner.description import LOOPBACK, Machine, SwarmDescription
from p2pdrl.planner.simulate import predict

NODES = 3
SIZE = 2000
UPDATE_S = 0.25
WATCHED_S = 6.0
COMMON = {
    "task.algorithm.name": "regression",
    "task.algorithm.features": SIZE,
    "task.algorithm.rows": 64,
    "task.algorithm.learning_rate": 0,
    "task.algorithm.evaluate_every": 1_000_000,
    "task.algorithm.min_update_s": UPDATE_S,
    "task.strategy.name": "adpsgd",
    "node.checkpoint.every_s": 0,
}


def account(nodes):
    """Rounds, bytes and updates of all nodes so far, and when that was."""
    statuses = [node.status() for node in nodes]
    accounts = [status["accounting"]["adpsgd"] for status in statuses]
    ok = sum(one["rounds"].get("ok", 0) for one in accounts)
    updates = sum(status["updates"] for status in statuses)
    return ok, sum(one["bytes_out"] for one in accounts), updates, time.monotonic()


@pytest.mark.slow
def test_rounds_and_bytes_are_as_predicted(swarm, wait_until):
    flags = [f"--set={key}={value}" for key, value in COMMON.items()]
    nodes = []
    for index in range(NODES):
        nodes.append(swarm.start(f"n{index}", *flags, peers=nodes[0] if nodes else None))
    swarm.training(*nodes, timeout_s=120)
    # The first node lets those rest that refused it while they started.
    wait_until(lambda: all(account([node])[0] >= 2 for node in nodes), 60, "all begin exchanges")
    first = account(nodes)
    time.sleep(WATCHED_S)
    last = account(nodes)
    took_s = last[3] - first[3]
    rounds_s, bytes_s, updates_s = ((last[i] - first[i]) / took_s / NODES for i in (0, 1, 2))

    # On a machine that is busy with other things learners are slower than they are paced to be.
    machine = Machine(update_s=max(UPDATE_S, 1 / updates_s))
    described = SwarmDescription(nodes=NODES, size=SIZE, machines=(machine,), links=(LOOPBACK,))
    said = predict(described, AdpsgdConfig(), seconds=60)
    assert rounds_s == pytest.approx(said.rounds_s, rel=0.3)
    assert bytes_s == pytest.approx(said.bytes_out_s, rel=0.3)
