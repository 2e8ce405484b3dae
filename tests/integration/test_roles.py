"""Nodes that only act, and nodes that only learn: unrolls travel, and whoever dies is done without."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

START_S = 90.0
DETECT_S = 30.0
STATE_EVERY_S = 1.0
ON_THE_WAY_S = 1.0
"""What a whole state may take to get to a node that keeps it."""
STATE_EACH_SECOND = ("--set", f"node.actors.state_every_s={STATE_EVERY_S}")
IMPALA = (
    *("--config", "impala"),
    *("--set", "task.env.num_envs=4"),
    *("--set", "node.learner.restart_min_s=0.05"),
)


def received(learner):
    """What came, by the name of the node: (lanes, unrolls, environment steps)."""
    found = {}
    for row in learner.status().get("experience", {}).get("received", {}).get("actors", []):
        lanes, unrolls, steps = found.get(row["name"], (0, 0, 0))
        found[row["name"]] = lanes + 1, unrolls + row["unrolls"], steps + row["env_steps"]
    return found


def come(learner, *names, more_than=5):
    rows = received(learner)
    return rows if all(rows.get(name, (0, 0, 0))[1] > more_than for name in names) else None


def start(swarm, *options):
    learner = swarm.found("learner", *IMPALA, *options, "--roles", "learner")
    actor = ("--roles", "actor", "--actors", "2", *STATE_EACH_SECOND)
    return learner, [swarm.start(name, *actor, peers=learner) for name in ("a", "b")]


def kept(node):
    """Policy version of the whole state that a node which only acts has."""
    return node.status()["experience"]["sent"]["state_version"]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_learner_goes_on_whoever_dies_that_acts_for_it(swarm, wait_until, no_orphans):
    learner, (first, second) = start(swarm, "--set", "task.stop.env_steps=100000000")
    rows = wait_until(lambda: come(learner, "a", "b"), START_S, "unrolls of both nodes come")
    assert [lanes for lanes, *_ in rows.values()] == [2, 2]
    assert {row["name"]: row["roles"] for row in learner.peers()} == {
        "learner": ["learner"],
        "a": ["actor"],
        "b": ["actor"],
    }
    status = second.status()
    assert status["experience"]["sent"]["learner_name"] == "learner"
    assert status["learner"] is None
    assert (status["updates"], status["env_steps"], status["healthy"]) == (0, 0, True)
    both = [True, True]
    wait_until(lambda: [row["running"] for row in second.status()["actors"]] == both, START_S, "both act")
    assert not [child for child in second.children() if "workers.learner" in " ".join(child.cmdline())]
    version = status["policy_version"]

    first.kill9()
    wait_until(lambda: learner.events("actors-left"), DETECT_S, "the dead node's lanes are free")
    assert set(received(learner)) == {"b"}
    updates = learner.status()["updates"]
    wait_until(lambda: learner.status()["updates"] > updates + 20, DETECT_S, "updates go on")

    os.kill(learner.learner_pid(), signal.SIGKILL)
    wait_until(lambda: learner.status()["learner"]["restarts"] == 1, START_S, "another learner process")
    updates = learner.status()["updates"]
    wait_until(lambda: learner.status()["updates"] > updates + 20, DETECT_S, "it learns from the same actors")
    sent = second.status()["experience"]["sent"]
    assert sent["policy_version"] > version
    ours = learner.status()
    came = sum(row["env_steps"] for row in ours["experience"]["received"]["actors"])
    assert 0 < ours["env_steps"] <= came + 10**5  # those of the node that died came before

    again = swarm.start("c", "--roles", "actor", "--actors", "1", peers=second)
    wait_until(lambda: come(learner, "c"), START_S, "a newcomer acts, told of another actor only")
    for node in (again, second, learner):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_when_all_that_learn_are_gone_a_node_that_acts_goes_on(swarm, wait_until, no_orphans):
    options = ("--set", "task.stop.env_steps=100000000", "--set", "task.evaluation.every=10000")
    learner, actors = start(swarm, *options)
    wait_until(lambda: come(learner, "a", "b"), START_S, "unrolls of both nodes come")
    wait_until(lambda: learner.status()["updates"] > 200, START_S, "it has learned something")
    wait_until(
        lambda: all(node.status()["experience"]["sent"]["sent"] > 20 for node in actors), START_S, "they act"
    )
    wait_until(lambda: all(kept(node) > 50 for node in actors), START_S, "they have a newer whole state")
    learner.kill9()
    heir = wait_until(
        lambda: next((node for node in actors if node.events("promoted")), None), 15.0, "one begins"
    )
    (other,) = [node for node in actors if node is not heir]
    (event,) = heir.events("promoted")
    assert event["policy_version"] > 50
    wait_until(lambda: heir.status()["updates"] > 20, START_S, "it learns")
    wait_until(
        lambda: other.status()["experience"]["sent"]["learner_name"] == heir.name,
        DETECT_S,
        "the other acts for it",
    )
    wait_until(lambda: come(heir, other.name), DETECT_S, "unrolls of the other come")
    roles = {row["name"]: row["roles"] for row in other.peers() if row["state"] == "alive"}
    assert roles == {heir.name: ["actor", "learner"], other.name: ["actor"]}
    assert heir.status()["policy_version"] > event["policy_version"]
    assert not other.events("promoted")
    back = swarm.start("learner", *IMPALA, "--roles", "learner", peers=heir, data=learner.data)
    swarm.training(back)
    wait_until(lambda: back.status()["state"] == "training", START_S, "it is back")
    for node in (back, other, heir):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_task_is_solved_though_one_that_acts_and_then_the_learner_are_lost(swarm, wait_until, no_orphans):
    """A node that acts joins, one is killed, then the node that learns: another learns on to the goal."""
    options = ("--set", "task.stop.env_steps=3000000", "--set", "task.stop.mean_return=475")
    # it takes two evaluations to be done, and by the second the learner has long been killed
    learner, (first, second) = start(swarm, *options, "--set", "task.evaluation.every=300000")
    wait_until(lambda: come(learner, "a", "b"), START_S, "unrolls of both nodes come")
    third = swarm.start("c", "--roles", "actor", "--actors", "1", *STATE_EACH_SECOND, peers=learner)
    wait_until(lambda: come(learner, "c"), START_S, "a newcomer acts")
    first.kill9()
    wait_until(lambda: learner.events("actors-left"), DETECT_S, "it is known to be gone")
    wait_until(lambda: all(kept(node) > 50 for node in (second, third)), START_S, "both have a whole state")
    versions = []  # of the learner: when it said so, and what

    def followed():
        versions.append((time.monotonic(), learner.status()["policy_version"]))
        return versions[-1][0] - versions[0][0] > 2 * (STATE_EVERY_S + ON_THE_WAY_S)

    wait_until(followed, START_S, "it learns on")
    assert versions[-1][1] > versions[0][1]
    killed_at = time.monotonic()
    learner.kill9()
    actors = (second, third)
    heir = wait_until(
        lambda: next((node for node in actors if node.events("promoted")), None), 15.0, "one learns on"
    )
    (event,) = heir.events("promoted")
    age_s = STATE_EVERY_S + ON_THE_WAY_S
    old = [version for at, version in versions if at <= killed_at - age_s]
    assert event["policy_version"] >= max(old), "it goes on from a state of the last second"
    assert [node.wait(600) for node in actors] == [0, 0], heir.text()[-3000:]
    for node in actors:
        assert "475 is reached" in node.summary()["reason"]
        assert "Traceback" not in node.text()
    (other,) = (node for node in actors if node is not heir)
    came = heir.summary()["status"]["experience"]["received"]["actors"]
    sent = other.summary()["status"]["experience"]["sent"]["env_steps"]
    assert sum(row["env_steps"] for row in came if row["name"] == other.name) <= sent, "none counts twice"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_and_two_nodes_that_act_solve_the_task(swarm, no_orphans):
    options = ("--set", "task.stop.env_steps=1000000", "--set", "task.stop.mean_return=475")
    learner, actors = start(swarm, *options, "--set", "task.env.num_envs=8")
    nodes = [learner, *actors]
    assert [node.wait(500) for node in nodes] == [0, 0, 0], learner.text()[-3000:]
    for node in nodes:
        assert "475 is reached" in node.summary()["reason"]
        assert "Traceback" not in node.text()
    status = learner.summary()["status"]
    sent = sum(node.summary()["status"]["experience"]["sent"]["env_steps"] for node in actors)
    waiting = 2 * 2 * 3 * 8 * 20
    assert status["env_steps"] <= sent <= status["env_steps"] + waiting, "each step is counted once"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_learners_change_how_they_agree_while_others_act_for_them(swarm, wait_until, no_orphans):
    """Two nodes that learn and two that act: gossip, all-reduce, an asynchronous server, gossip again."""
    options = ("--set", "task.stop.env_steps=100000000", "--set", "task.evaluation.every=100000000")
    first = swarm.found("first", *IMPALA, *options, "--roles", "learner")
    second = swarm.start("second", *IMPALA, "--roles", "learner", *options, peers=first)
    swarm.training(first, second)
    actors = [
        swarm.start(name, "--roles", "actor", "--actors", "1", peers=first) for name in ("third", "fourth")
    ]
    learners = (first, second)
    for learner in learners:
        wait_until(lambda one=learner: len(come_from(one)) == 1, START_S, "each learner has a node's actors")
    assert {name for learner in learners for name in come_from(learner)} == {"third", "fourth"}
    for mode, protocol in (
        ("allreduce", "grad_average"),
        ("server-async", "server_async"),
        ("gossip", "adpsgd"),
    ):
        first.set_mode(mode, *(() if mode == "server-async" else (f"protocol={protocol}",)))
        before = {node.name: node.status()["updates"] for node in learners}
        steps = first.status()["swarm_env_steps"]
        wait_until(
            lambda name=protocol: all(node.rounds_in(name) >= 3 for node in learners),
            START_S,
            f"{protocol} works",
        )
        for node in learners:
            more = before[node.name] + 10
            wait_until(lambda one=node, n=more: one.status()["updates"] > n, START_S, "updates go on")
        assert first.status()["swarm_env_steps"] > steps
        for node in actors:
            assert node.status()["mode"] == mode
            assert node.status()["healthy"], node.status()["reasons"]
    for node in (*actors, second, first):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


def come_from(learner):
    return [name for name, (_, unrolls, _) in received(learner).items() if unrolls > 3]


def set_roles(node, *roles, wait_s=60):
    """What `p2pdrl roles set` says; it waits until the node works in them."""
    words = ",".join(roles), "--wait", str(wait_s)
    command = [sys.executable, "-m", "p2pdrl", "roles", "set", *words, "--api", node.api]
    return subprocess.run(
        [*command, "--data-dir", str(node.data)], capture_output=True, text=True, timeout=90, check=False
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_roles_change_while_the_others_go_on(swarm, wait_until, no_orphans):
    learner, (first, second) = start(
        swarm, "--set", "task.stop.env_steps=100000000", "--set", "task.env.normalize_observations=true"
    )
    third = swarm.start("c", "--roles", "actor", "--actors", "1", peers=learner)
    wait_until(lambda: come(learner, "a", "b", "c"), START_S, "unrolls of all come")
    wait_until(lambda: learner.status()["updates"] > 50, START_S, "it learns")
    version, steps = learner.status()["policy_version"], learner.status()["swarm_env_steps"]
    pids = [node.status()["pid"] for node in (learner, first, second, third)]

    told = set_roles(first, "learner")
    assert (told.returncode, told.stdout) == (0, "the node is learner\n"), told.stderr
    # of two learners each has one of the two nodes that still act
    wait_until(lambda: first.status()["updates"] > 5, START_S, "it learns, too")
    assert first.status()["policy_version"] >= version, "from the newest state"
    assert set_roles(learner, "actor").returncode == 0
    wait_until(lambda: learner.status()["experience"]["sent"]["sent"] > 5, START_S, "it acts for the other")
    assert {row["name"]: row["roles"] for row in second.peers()} == {
        "learner": ["actor"],
        "a": ["learner"],
        "b": ["actor"],
        "c": ["actor"],
    }
    wait_until(lambda: set(received(first)) == {"learner", "b", "c"}, START_S, "all work for it")
    updates = first.status()["updates"]
    wait_until(lambda: first.status()["updates"] > updates + 20, START_S, "updates go on")
    assert first.status()["swarm_env_steps"] >= steps, "nothing that was counted is lost"
    refused = set_roles(first, "actor")
    assert refused.returncode == 2
    assert "nobody else learns" in refused.stderr
    assert set_roles(first, "learner", "actor").returncode == 0
    wait_until(lambda: len(first.status()["actors"]) == 2, START_S, "it acts beside learning")
    assert [node.status()["pid"] for node in (learner, first, second, third)] == pids
    for node in (second, third, learner, first):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_who_acts_for_learners_that_take_nothing_is_told_why_and_may_change_its_mind(swarm, wait_until):
    on = ("--set", "task.stop.env_steps=100000000", "--set", "task.stop.mean_return=none")
    learner = swarm.found("learner", "--config", "cartpole", *on)
    other = swarm.start("other", peers=learner)
    wait_until(lambda: other.status().get("updates", 0) > 5, START_S, "it learns")
    steps = other.status()["swarm_env_steps"]
    assert set_roles(other, "actor", wait_s=3).returncode != 0
    wait_until(lambda: not other.status()["healthy"], START_S, "it is unwell")
    (reason,) = other.status()["reasons"]
    assert "learner doesn't take this node's actors yet" in reason
    assert "`p2pdrl roles set learner,actor` there" in reason
    assert set_roles(other, "learner", "actor").returncode == 0
    wait_until(lambda: other.status()["healthy"], START_S, "it learns again")
    assert other.status()["swarm_env_steps"] >= steps
    assert set_roles(learner, "learner", "actor").returncode == 0
    assert set_roles(other, "actor").returncode == 0, "now somebody takes what it makes"
    wait_until(lambda: set(received(learner)) == {"other"}, START_S, "it acts for the learner")
    for node in (other, learner):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_who_waits_for_a_learner_ends_with_the_swarm(swarm, wait_until):
    learner = swarm.found("learner", "--config", "cartpole", "--set", "task.stop.mean_return=none")
    other = swarm.start("other", peers=learner)
    wait_until(lambda: other.status().get("updates", 0) > 5, START_S, "it learns")
    assert set_roles(other, "actor", wait_s=1).returncode != 0
    halt = [sys.executable, "-m", "p2pdrl", "halt", "--api", learner.api, "--data-dir", str(learner.data)]
    subprocess.run(halt, check=True, timeout=60)
    for node in (learner, other):
        assert node.wait(60) == 0
        assert "Traceback" not in node.text()
