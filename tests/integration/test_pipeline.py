"""Two nodes train one model in two halves for a while, without starting anything anew.

Where they have actors, those of both act for the first of them.
"""

from __future__ import annotations

import signal

import pytest

from .pipelines import SMALL, STREAM, Watch, holder, ranks, whole

SOON_S = 5.0
"""From a change of the mode until updates go on."""
OFF_US = 20_000.0
"""Bound on how far the clocks of a trace are apart on a machine that is busy."""


def protocol(node):
    return (node.status().get("strategy") or {}).get("name")


def switch(nodes, mode, wanted, *options, formed=lambda: True):
    watch = Watch(nodes)
    nodes[-1].set_mode(mode, *options)
    return watch, watch.goes_on(30, lambda: all(protocol(node) == wanted for node in nodes) and formed())


@pytest.mark.timeout(120)
def test_two_nodes_go_from_gossip_to_a_pipeline_and_back(swarm, wait_until, no_orphans):
    nodes = swarm.start_team(2, SMALL)
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


ACTING = {
    "task.env.num_envs": 4,
    "task.algorithm.name": "impala",
    "task.algorithm.unroll_steps": 20,
    "task.strategy.name": "pipeline",
    "task.strategy.backend": "stream",
    "task.strategy.microbatches": 2,
    "task.strategy.state_every": 5,
    "task.evaluation.every": 0,
    "task.stop.env_steps": 100_000_000,
    "node.actors.count": 1,
    "node.learner.step_delay_s": 0.002,
    "node.learner.restart_min_s": 0.05,
    "node.checkpoint.every_s": 0,
}
"""Environments so slow that learners wait for actors."""
START_S = 90.0
ROWS = ACTING["task.env.num_envs"] * ACTING["task.algorithm.unroll_steps"]
"""Of one actor's unroll, and of one update."""


def made(nodes):
    """Environment steps by name, as each node counts its own."""
    return {node.name: node.status().get("env_steps", 0) for node in nodes}


def grow(nodes, wait_until, what, by=10 * ROWS):
    """Wait until each of them has made so many more steps."""
    before = made(nodes)
    wait_until(
        lambda: all(count >= before[name] + by for name, count in made(nodes).items()),
        START_S,
        f"{what}:\n" + "\n".join(f"{node.status().get('pipeline')}\n{node.text()[-1500:]}" for node in nodes),
    )


def counted_once(nodes, wait_until):
    """Check that the swarm has counted what updates were made of, and what waits for the next ones.

    Updates go on meanwhile, and a node hears of the other's steps a little later.
    """

    def updates():
        return sum(node.status()["updates"] for node in nodes)

    least = 0.9 * ROWS * updates()
    steps = wait_until(
        lambda: (found := nodes[0].status()["swarm_env_steps"]) >= least and found, 10, "steps are counted"
    )
    waiting = 2 * len(nodes) * ROWS
    assert steps <= ROWS * updates() + waiting
    for node in nodes:
        one = node.status()
        acted = sum(row["env_steps"] for row in one["actors"])
        assert one["env_steps"] <= acted, "no more than its actors have made"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_actors_of_all_ranks_act_for_the_first(swarm, wait_until, no_orphans):
    nodes = swarm.start_team(2, ACTING)
    wait_until(lambda: whole(nodes, 2), START_S, "a pipeline of both")
    first, later = holder(nodes, 0), holder(nodes, 1)
    still = later.status()["updates"]  # before there was a pipeline
    grow(nodes, wait_until, "both make steps")
    counted_once(nodes, wait_until)
    assert later.status()["updates"] == still
    shown = {node.name: node.status()["pipeline"]["experience"] for node in nodes}
    assert shown == {
        first.name: "takes unrolls of its 1 actor and of the other ranks'",
        later.name: "its 1 actor works for rank 0",
    }
    sent = later.status()["experience"]["sent"]
    assert sent["learner_name"] == first.name
    assert sent["env_steps"] <= later.status()["env_steps"]
    assert {row["name"]: row["collects"] for row in first.peers()} == {first.name: True, later.name: True}
    assert sent["policy_version"] > first.status()["policy_version"] - 100

    first.set_mode("gossip")
    wait_until(lambda: all(protocol(node) == "adpsgd" for node in nodes), 30, "they gossip")
    began = {node.name: node.status()["updates"] for node in nodes}
    wait_until(
        lambda: all(node.status()["updates"] > began[node.name] + 5 for node in nodes),
        START_S,
        "each learns from its own actor",
    )
    first.set_mode("pipeline", "stages=2", "state_every=5", "microbatches=2", *STREAM)
    wait_until(lambda: whole(nodes, 2), START_S, "a pipeline again")
    grow(nodes, wait_until, "both make steps again")
    counted_once(nodes, wait_until)

    first, later = holder(nodes, 0), holder(nodes, 1)
    later.kill9()
    grow([first], wait_until, "the first goes on by itself")
    assert first.status()["learner"]["restarts"] == 0
    newcomer = swarm.start("n2", *(f"--set={key}={value}" for key, value in ACTING.items()), peers=first)
    nodes = [first, newcomer]
    swarm.training(*nodes, timeout_s=2 * START_S)
    wait_until(lambda: whole(nodes, 2), START_S, "a pipeline with the newcomer")
    grow(nodes, wait_until, "both make steps")

    first, later = holder(nodes, 0), holder(nodes, 1)
    first.kill9()
    wait_until(lambda: later.status()["updates"] > 10, START_S, "the other is first now, and learns")
    assert later.status()["learner"]["restarts"] == 0
    grow([later], wait_until, "from what its own actor makes")
    wait_until(lambda: later.status()["experience"].get("sent") is None, 10, "which is its learner's")
    later.signal(signal.SIGTERM)
    assert later.wait(20) == 0
    for node in (*nodes, *swarm.nodes):
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_data_of_the_newest_policy_are_made_by_the_first_rank_only(swarm, wait_until, no_orphans):
    nodes = swarm.start_team(2, ACTING | {"task.algorithm.name": "a2c"})
    wait_until(lambda: whole(nodes, 2), START_S, "a pipeline of both")
    first, later = holder(nodes, 0), holder(nodes, 1)
    before = made([later])
    grow([first], wait_until, "the first makes steps")
    assert made([later]) == before
    assert "newest policy only" in later.status()["pipeline"]["experience"]
    assert {row["name"]: row["collects"] for row in first.peers()} == {first.name: True, later.name: False}
    for node in nodes:
        node.signal(signal.SIGTERM)
    assert [node.wait(20) for node in nodes] == [0, 0]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_nodes_that_only_act_work_for_whoever_is_the_first_rank(swarm, wait_until, no_orphans):
    nodes = swarm.start_team(2, ACTING | {"node.roles": '["learner"]'})
    wait_until(lambda: whole(nodes, 2), START_S, "a pipeline of both")
    first, later = holder(nodes, 0), holder(nodes, 1)
    actor = swarm.start(
        "actor",
        *("--roles", "actor", "--actors", "1", "--set", "node.learner.step_delay_s=0.002"),
        peers=later,
    )
    grow([first], wait_until, "the first learns from what comes")
    assert actor.status()["experience"]["sent"]["learner_name"] == first.name
    first.kill9()
    before = later.status()["updates"]
    wait_until(lambda: later.status()["updates"] > before + 10, START_S, "then the other does")
    assert actor.status()["experience"]["sent"]["learner_name"] == later.name
    for node in (actor, later):
        node.signal(signal.SIGTERM)
    assert [node.wait(20) for node in (actor, later)] == [0, 0]
