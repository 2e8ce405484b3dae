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
    accounts = [node.status()["accounting"]["adpsgd"] for node in nodes]
    ok = sum(one["rounds"].get("ok", 0) for one in accounts)
    return ok, sum(one["bytes_out"] for one in accounts), time.monotonic()


@pytest.mark.slow
def test_rounds_and_bytes_are_as_predicted(swarm, wait_until):
    flags = [f"--set={key}={value}" for key, value in COMMON.items()]
    nodes = []
    for index in range(NODES):
        nodes.append(swarm.start(f"n{index}", *flags, peers=nodes[0] if nodes else None))
    swarm.training(*nodes, timeout_s=120)
    wait_until(lambda: account(nodes)[0] >= 2 * NODES, 60, "exchanges go on")
    first = account(nodes)
    time.sleep(WATCHED_S)
    last = account(nodes)
    took_s = last[2] - first[2]
    rounds_s, bytes_s = ((last[i] - first[i]) / took_s / NODES for i in (0, 1))

    described = SwarmDescription(
        nodes=NODES, size=SIZE, machines=(Machine(update_s=UPDATE_S),), links=(LOOPBACK,)
    )
    said = predict(described, AdpsgdConfig(), seconds=60)
    assert rounds_s == pytest.approx(said.rounds_s, rel=0.3)
    assert bytes_s == pytest.approx(said.bytes_out_s, rel=0.3)
