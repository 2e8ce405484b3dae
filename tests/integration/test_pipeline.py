"""Two nodes train one model in two halves for a while, without starting anything anew."""

from __future__ import annotations

import signal

import pytest

from .pipelines import STREAM, Watch, ranks, whole

SOON_S = 5.0
"""From a change of the mode until updates go on."""
OFF_US = 20_000.0
"""Bound on how far the clocks of a trace are apart on a machine that is busy."""
OPTIONS = {
    "task.env.num_envs": 4,
    "task.algorithm.unroll_steps": 64,
    "task.algorithm.epochs": 2,
    "task.algorithm.minibatches": 2,
    "task.strategy.compression": "none",
    "node.checkpoint.every_s": 0,
}


def protocol(node):
    return (node.status().get("strategy") or {}).get("name")


def switch(nodes, mode, wanted, *options, formed=lambda: True):
    watch = Watch(nodes)
    nodes[-1].set_mode(mode, *options)
    return watch, watch.goes_on(30, lambda: all(protocol(node) == wanted for node in nodes) and formed())


@pytest.mark.timeout(120)
def test_two_nodes_go_from_gossip_to_a_pipeline_and_back(swarm, wait_until, no_orphans):
    nodes = swarm.start_team(2, OPTIONS)
    wait_until(lambda: all(node.rounds_in("adpsgd") > 0 for node in nodes), 20, "they gossip")

    watch, into_s = switch(nodes, "pipeline", "pipeline", "stages=2", *STREAM, formed=lambda: whole(nodes, 2))
    print(f"gossip to pipeline: {into_s} s; {ranks(nodes)}", flush=True)
    watch.nothing_lost(0)
    head, tail = sorted(nodes, key=lambda node: ranks(nodes)[node.name][1])
    shown = head.status()["pipeline"]
    assert (shown["stage"], shown["stages"], shown["schedule"], shown["backend"]) == (
        [1],
        2,
        "1f1b",
        "stream",
    )
    wait_until(lambda: head.status()["pipeline"].get("bubble") is not None, 10, "the head's bubble")
    assert tail.status()["pipeline"]["stage"] == [2]
    wait_until(
        lambda: {row["name"]: row["stage"] for row in head.peers()} == {head.name: "1/2", tail.name: "2/2"},
        10,
        "peers tell their stages",
    )
    page = (tail.get("/metrics") or b"").decode()
    assert "p2pdrl_pipeline_rank 1.0" in page
    check_trace(tail.json("/v1/pipeline/trace?seconds=5"), [head.name, tail.name])
    still = tail.status()["updates"]

    watch, back_s = switch(nodes, "gossip", "adpsgd", "compression=none")
    print(f"pipeline to gossip: {back_s} s", flush=True)
    watch.nothing_lost(0)
    wait_until(lambda: tail.status()["updates"] > still, 5, "the lower stage trains again")
    assert head.status()["pipeline"] is None
    assert max(into_s, back_s) <= SOON_S
    for node in nodes:
        assert node.status()["healthy"], node.status()["reasons"]
        node.signal(signal.SIGTERM)
    assert [node.wait(20) for node in nodes] == [0, 0]


def check_trace(document, names):
    """One row for each rank, on one clock: rank 1's forward comes after rank 0's, its backward before.

    Clocks are off by half of a round trip.
    """
    events = document["traceEvents"]
    rows = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert rows == [f"rank {rank}: {name}" for rank, name in enumerate(names)], document["otherData"]
    starts: dict[tuple[int, str, int], float] = {}
    for event in events:
        if event["ph"] == "X" and event["args"].get("minibatch", -1) >= 0:
            starts[event["tid"], event["name"], event["args"]["minibatch"]] = event["ts"]
    both = [
        step for row, name, step in starts if (row, name) == (1, "forward 1") and (0, name, step) in starts
    ]
    assert both, f"no minibatch that both tell of: {document}"[:2000]
    for step in both:
        assert starts[0, "forward 1", step] < starts[1, "forward 1", step] + OFF_US
        if (0, "backward 1", step) in starts:
            assert starts[1, "backward 1", step] < starts[0, "backward 1", step] + OFF_US
