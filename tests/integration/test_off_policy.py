"""Real nodes learn from replay: actor processes fill each node's memory, gossip averages what they learn."""

from __future__ import annotations

import pytest

OPTIONS = [
    *("--config", "pendulum"),
    *("--actors", "2"),
    *("--set", "task.strategy.name=adpsgd"),
    *("--set", "task.stop.env_steps=24000"),
]


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_two_nodes_with_actors_swing_a_pendulum_up_together(swarm, wait_until):
    first = swarm.found("first", *OPTIONS)
    second = swarm.start("second", *OPTIONS, peers=first)
    for node in (first, second):
        wait_until(
            lambda node=node: node.rounds_in("adpsgd") >= 5 and len(node.status().get("actors") or []) == 2,
            240,
            f"{node.name} gossips:\n{node.text()[-3000:]}",
        )
    best = dict.fromkeys(("first", "second"), -float("inf"))

    def ended():
        for node in (first, second):
            found = node.status().get("mean_return")
            best[node.name] = max(best[node.name], -float("inf") if found is None else found)
        return all(node.process.poll() is not None for node in (first, second))

    wait_until(ended, 1200, "both reach the last step", every_s=1.0)
    print(best)
    assert [node.wait(1) for node in (first, second)] == [0, 0]
    assert "Traceback" not in first.text() + second.text()
    assert min(best.values()) > -900  # the mean of all episodes, of which the first third gets -1,200
