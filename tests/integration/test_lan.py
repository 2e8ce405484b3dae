"""Nodes that find each other on the local network; with the extra ``lan`` only."""

from __future__ import annotations

import pytest

from .conftest import RealSwarm

pytest.importorskip("zeroconf", reason="finding nodes on the local network wants the extra lan (zeroconf)")

PACE = ["--set", "node.learner.max_updates_per_s=4", "--set", "task.stop.env_steps=0"]


def test_two_nodes_that_were_given_no_address_become_one_swarm(swarm: RealSwarm, wait_until) -> None:
    """A third, of a swarm of another name, stays by itself."""
    nodes = [swarm.start(name, *PACE, "--peers", "lan") for name in ("n0", "n1")]
    other = swarm.start("n2", *PACE, "--peers", "lan", "--swarm", "another")
    swarm.training(*nodes, other, timeout_s=200)
    for node in nodes:
        wait_until(lambda node=node: node.view() == {"n0": "alive", "n1": "alive"}, 30, "they are one swarm")
        assert node.events("lan")
    assert len({node.status()["lineage"] for node in nodes}) == 1
    assert other.view() == {"n2": "alive"}
