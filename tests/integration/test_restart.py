"""A node that comes back is the same node; two swarms that meet become one."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from datetime import datetime

import pytest

from p2pdrl.node.state.checkpoints import load
from tests.integration.conftest import free_port

PACE = ["--set", "node.learner.max_updates_per_s=5", "--set", "task.algorithm.unroll_steps=32"]


def command(node, *words):
    done = subprocess.run(
        [sys.executable, "-m", "p2pdrl", *words, "--api", node.api, "--data-dir", str(node.data)],
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_killed_founder_goes_on_from_its_checkpoint(swarm, wait_until):
    judged = ["--set", "task.evaluation.every=100", "--set", "task.evaluation.episodes=1"]
    first = swarm.start("solo", *PACE, *judged)
    swarm.training(first)
    wait_until(lambda: first.status()["updates"] >= 10, 30, "ten updates")
    wait_until(lambda: first.json("/v1/evaluations"), 30, "an evaluation")
    curve = first.json("/v1/evaluations")
    command(first, "checkpoint")
    saved = load(next(first.data.rglob("last.safetensors")))
    before = first.status()
    first.kill9()

    again = swarm.start("solo", *PACE, *judged, data=first.data)
    swarm.training(again)
    assert again.json("/v1/evaluations")[: len(curve)] == curve
    event = again.events("resumed-checkpoint")[0]
    assert event["policy_version"] == saved.meta["policy_version"]
    assert event["params_hash"] == saved.meta["params_hash"]
    assert event["optimizer"] is True
    now = again.status()
    assert now["id"] == before["id"]
    assert now["lineage"] == before["lineage"]
    assert now["env_steps"] >= saved.meta["env_steps"]
    steps = again.checkpoint().sidecar["optimizer.steps"]
    assert steps >= saved.sidecar["optimizer.steps"]


@pytest.mark.slow
def test_a_killed_member_comes_back_elsewhere_with_its_counts(swarm, wait_until):
    a = swarm.start("a", *PACE)
    b = swarm.start("b", *PACE, peers=a)
    swarm.training(a, b)
    wait_until(lambda: b.status()["updates"] >= 10, 30, "b trains")
    identity, done = b.status()["id"], b.status()["env_steps"]
    wait_until(
        lambda: a.status()["swarm_env_steps"] >= done + a.status()["env_steps"], 15, "a knows b's steps"
    )
    known = a.status()["swarm_env_steps"]
    b.kill9()

    back = swarm.start("b", *PACE, data=b.data)  # no --peers: it remembers where a lived
    swarm.training(back)
    assert back.status()["id"] == identity
    assert back.port != b.port

    def row():
        return next((row for row in a.peers() if row["id"] == identity), {})

    wait_until(lambda: (row().get("state"), row().get("address")) == ("alive", back.api), 15, "a sees b anew")
    wait_until(lambda: back.status()["env_steps"] >= done, 15, "b has its counts back, from disk or from a")
    assert a.status()["swarm_env_steps"] >= known
    assert len(a.peers()) == 2


@pytest.mark.slow
def test_two_islands_become_one_swarm_of_the_elder_lineage(swarm, wait_until):
    elder = swarm.start("elder", *PACE)
    swarm.training(elder)
    wait_until(lambda: elder.status()["env_steps"] >= 4000, 60, "the elder is ahead")
    younger = swarm.start("younger", *PACE)
    swarm.training(younger)
    assert younger.status()["lineage"] != elder.status()["lineage"]
    steps = elder.status()["env_steps"] + younger.status()["env_steps"]

    bridge = swarm.start("bridge", *PACE, "--peers", younger.api, peers=elder)
    swarm.training(bridge)
    lineage = elder.status()["lineage"]
    wait_until(lambda: younger.status()["lineage"] == lineage, 30, "the younger adopts")
    assert any(lineage in event["text"] or "lineage" in event["text"] for event in younger.events("adopted"))
    assert not elder.events("adopted")
    wait_until(lambda: bridge.status()["lineage"] == lineage, 30, "the bridge too")
    wait_until(
        lambda: all(node.status()["members"]["alive"] == 3 for node in (elder, younger, bridge)),
        30,
        "all three see all three",
    )
    wait_until(lambda: younger.status()["swarm_env_steps"] >= steps, 15, "no island's steps are lost")


@pytest.mark.slow
def test_pause_and_resume_of_one_node_and_of_all(swarm, wait_until):
    a = swarm.start("a", *PACE)
    b = swarm.start("b", *PACE, peers=a)
    swarm.training(a, b)
    command(a, "pause")
    wait_until(lambda: a.status()["state"] == "paused", 5, "a is paused")
    at = a.status()["updates"]
    going = b.status()["updates"]
    wait_until(lambda: b.status()["updates"] > going + 3, 15, "b goes on")
    assert a.status()["updates"] <= at + 1
    command(a, "resume")
    wait_until(lambda: a.status()["updates"] > at + 3, 15, "a goes on")
    command(b, "pause", "--swarm")
    wait_until(lambda: {a.status()["state"], b.status()["state"]} == {"paused"}, 15, "all are paused")
    command(a, "resume", "--swarm")
    wait_until(lambda: {a.status()["state"], b.status()["state"]} == {"training"}, 15, "all train")


def test_ctrl_c_leaves_properly(swarm, wait_until, no_orphans):
    a = swarm.start("a", *PACE)
    b = swarm.start("b", *PACE, peers=a)
    swarm.training(a, b)
    b.signal(signal.SIGINT)
    assert b.wait(10) == 0
    wait_until(lambda: a.view().get("b") == "left", 10, "a knows that b left")
    a.signal(signal.SIGTERM)
    assert a.wait(10) == 0


@pytest.mark.slow
def test_an_elder_checkpoint_isn_t_thrown_away_for_a_young_swarm(swarm, wait_until):
    elder = swarm.start("elder", *PACE)
    swarm.training(elder)
    wait_until(lambda: elder.status()["env_steps"] >= 2000, 60, "the elder has learnt something")
    command(elder, "checkpoint")
    lineage = elder.status()["lineage"]
    elder.kill9()
    young = swarm.start("young", *PACE, "--set", "node.learner.max_updates_per_s=1")
    swarm.training(young)
    back = swarm.start("elder", *PACE, peers=young, data=elder.data)
    swarm.training(back)
    assert back.status()["lineage"] == lineage
    assert not back.events("adopted")
    wait_until(lambda: young.status()["lineage"] == lineage, 30, "the young one adopts")


@pytest.mark.slow
def test_newcomers_whose_only_donor_dies_go_on_together(swarm, wait_until):
    founder = swarm.start("founder", *PACE)
    swarm.training(founder)
    others = [swarm.start(name, *PACE, peers=founder) for name in ("x", "y")]
    for node in others:
        wait_until(lambda node=node: "joined a swarm" in node.text(), 40, "it joins", every_s=0.01)
    founder.kill9()  # while their learners are still being built
    swarm.training(*others, timeout_s=60)
    x, y = others
    wait_until(lambda: x.status()["lineage"] == y.status()["lineage"] != "", 30, "one lineage")
    wait_until(
        lambda: x.status()["exchanges"].get("ok", 0) + y.status()["exchanges"].get("ok", 0), 20, "they mix"
    )


@pytest.mark.slow
def test_a_member_that_restarts_while_the_others_are_frozen_waits_for_them(swarm, wait_until):
    """Else it would found another swarm, whose settings might win over those of the old one."""
    endless = ["--set", "task.stop.env_steps=0"]
    a = swarm.found("a", *PACE, "--set", "task.stop.env_steps=5000000", "--set", "task.strategy.weight=0.4")
    b = swarm.start("b", *PACE, *endless, peers=a)
    swarm.training(a, b)
    lineage = a.status()["lineage"]
    wait_until(lambda: b.status().get("lineage") == lineage, 20, "one lineage")
    b.kill9()
    a.signal(signal.SIGSTOP)

    back = swarm.start("b", *PACE, *endless, data=b.data)  # no --peers: it remembers where a lived
    port = free_port()
    own = swarm.start("c", *PACE, *endless, "--peers", f"127.0.0.1:{port}", peers=a, port=port)
    wait_until(lambda: back.events("waiting"), 20, "b says what it waits for")
    assert "takes connections and doesn't answer" in back.events("waiting")[0]["text"]
    for node in (back, own):
        assert node.events("founded") == node.events("resumed-swarm") == []
        assert node.status()["state"] == "joining"
    a.signal(signal.SIGCONT)
    swarm.training(back, own, timeout_s=90)
    for node in (a, back, own):
        assert node.status()["lineage"] == lineage
        wait_until(lambda node=node: node.status()["stop"]["env_steps"] == 5_000_000, 10, "the swarm's stop")


@pytest.mark.slow
def test_all_nodes_restarted_at_once_go_on_with_their_swarm(swarm, wait_until):
    task = ["--set", "task.stop.env_steps=5000000", "--set", "task.env.id=Acrobot-v1"]
    a = swarm.found("a", *PACE, *task)
    b = swarm.start("b", *PACE[:2], peers=a)
    swarm.training(a, b)
    lineage = a.status()["lineage"]
    wait_until(lambda: b.status().get("lineage") == lineage, 20, "one lineage")
    wait_until(lambda: all((node.data / "swarm.json").exists() for node in (a, b)), 20, "both remember")
    command(b, "checkpoint")
    for node in (a, b):
        node.kill9()

    b = swarm.start("b", *PACE[:2], peers=a, data=b.data, port=b.port)
    a = swarm.start("a", *PACE[:2], data=a.data, port=a.port)
    swarm.training(a, b, timeout_s=90)
    assert sorted(bool(node.events("resumed-swarm")) for node in (a, b)) == [False, True]
    assert not a.events("founded")
    assert not b.events("founded")
    for node in (a, b):
        assert node.status()["lineage"] == lineage
        assert "Acrobot-v1" in node.events("training")[0]["text"]
        wait_until(lambda node=node: node.status()["stop"]["env_steps"] == 5_000_000, 10, "the swarm's stop")


@pytest.mark.slow
def test_who_waits_for_the_first_node_joins_as_soon_as_that_is_up(swarm, wait_until):
    """On a cluster all start at once, and the first may be the one whose disk is slow."""
    port = free_port()
    address = f"127.0.0.1:{port}"
    others = [swarm.start(name, *PACE, "--peers", address) for name in ("x", "y")]
    for node in others:
        wait_until(lambda node=node: "no answer from" in node.text(), 40, "it has waited for ten seconds")
    first = swarm.start("first", *PACE, port=port)
    swarm.training(first, *others)

    def at(node, kind):
        return datetime.fromisoformat(next(e["time"] for e in node.told() if e["kind"] == kind))

    for node in others:
        late_s = (at(node, "joined") - at(first, "founded")).total_seconds()
        print(f"{node.name} joined {late_s:.2f} s after the founding")
        assert late_s < 4.0, "aim: 2"


def test_who_joins_a_swarm_that_is_done_ends_without_training(swarm, wait_until):
    """Whoever comes as the others finish doesn't go on alone when they are gone."""
    first = swarm.start(
        "first", "--config", "cartpole", "--set", "task.stop.env_steps=300", "--set", "node.keep_running=true"
    )
    wait_until(lambda: first.status().get("state") == "stopped", 60, f"first is done:\n{first.text()}")
    late = swarm.start("late", "--config", "cartpole", peers=first)
    assert late.wait(30) == 0, late.text()[-3000:]
    kinds = [event["kind"] for event in late.told()]
    assert "halted" in kinds, kinds
    assert "training" not in kinds, kinds
    assert (late.data / "summary.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_nodes_that_start_in_any_order_found_one_swarm(swarm, wait_until, seed):
    """Each is told of all; some are frozen while they come up, some are killed and start again."""
    rng = random.Random(seed)
    ports = [free_port() for _ in range(5)]
    seeds = [part for port in ports for part in ("--peers", f"127.0.0.1:{port}")]
    nodes = {}
    for number in rng.sample(range(5), 5):
        name = f"n{number}"
        stop = ["--set", f"task.stop.env_steps={5_000_000 + number}"]
        nodes[name] = swarm.start(name, *PACE, *stop, *seeds, port=ports[number])
        time.sleep(rng.choice([0.0, 0.3, 2.0]))
    frozen = rng.sample(sorted(nodes), 2)
    for name in frozen:
        nodes[name].signal(signal.SIGSTOP)
    again = rng.choice(sorted(nodes.keys() - frozen))
    time.sleep(rng.uniform(0.5, 8.0))
    nodes[again].kill9()
    time.sleep(rng.uniform(0.0, 4.0))
    number = int(again[1:])
    stop = ["--set", f"task.stop.env_steps={5_000_000 + number}"]
    nodes[again] = swarm.start(again, *PACE, *stop, *seeds, port=ports[number], data=nodes[again].data)
    time.sleep(rng.uniform(0.0, 6.0))
    for name in frozen:
        nodes[name].signal(signal.SIGCONT)
    swarm.training(*nodes.values(), timeout_s=150)

    def agreed():
        found = [node.status() for node in nodes.values()]
        return (
            len({(one["lineage"], one["stop"]["env_steps"], one["members"]["alive"]) for one in found}) == 1
        )

    wait_until(agreed, 60, "one swarm, with one stop condition, in which all five live")
    for node in nodes.values():
        assert node.text().count('"kind": "founded"') <= 1, f"{node.name} founded twice on one data folder"
