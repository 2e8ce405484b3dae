"""The serving node is killed: the others go on from what they hold, and nothing starts anew."""

from __future__ import annotations

import time

import pytest

AGAIN_S = 3.0
"""From the moment that a survivor knows of the loss until its learner steps again."""


def serves(node):
    return "server" in str((node.json("/v1/mode") or {}).get("facts", {}).get("role", ""))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("protocol", ["server_sync", "server_async"])
def test_workers_go_on_when_the_serving_node_is_killed(
    swarm, small_updates, wait_until, make_recovery, protocol
):
    nodes = swarm.start_team(4, small_updates | {"task.strategy.name": protocol})

    def all_work():
        modes = [node.json("/v1/mode") or {} for node in nodes]
        return all(
            mode.get("facts", {}).get("workers") == 4 and node.rounds_in(protocol) > 3
            for mode, node in zip(modes, nodes, strict=True)
        )

    wait_until(all_work, 60, "four workers of one group")
    time.sleep(1)
    (victim,) = (node for node in nodes if serves(node))
    survivors = [node for node in nodes if node is not victim]
    recovery = make_recovery(survivors, victim, protocol)
    recovery.lose(victim.kill9)
    took = recovery.wait(30)
    known = {name: round(at - recovery.lost_at, 2) for name, at in recovery.known_at.items()}
    print(f"{protocol}: known after {known} s, steps again {took} s later", flush=True)
    recovery.nothing_lost()
    assert max(took.values()) <= AGAIN_S
    assert sum(serves(node) for node in survivors) == 1
