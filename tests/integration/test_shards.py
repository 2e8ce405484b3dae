"""A replay memory in shards on other nodes: samples, priorities, and whoever dies."""

from __future__ import annotations

import math
import os
import signal

import pytest

START_S = 90.0
DETECT_S = 30.0
APEX = (
    *("--config", "apex_dqn"),
    *("--set", "task.env.num_envs=4"),
    *("--set", "node.learner.restart_min_s=0.05"),
)


def replay(learner):
    """What the learner draws from, by the name of the node."""
    found = learner.status().get("experience", {}).get("replay", {})
    return {row["name"]: row for row in found.get("shards", []) if row["here"]}


def samples(learner):
    return learner.status().get("experience", {}).get("replay", {}).get("samples", 0)


def shard(node):
    return node.status().get("experience", {}).get("shard", {})


def start(swarm, *options):
    learner = swarm.found("learner", *APEX, *options, "--roles", "learner")
    shards = [swarm.start(name, "--roles", "replay", peers=learner) for name in ("r1", "r2")]
    actor = ("--roles", "actor", "--actors", "1", "--set", "node.actors.state_every_s=1")
    actors = [swarm.start(name, *actor, peers=learner) for name in ("a1", "a2")]
    return learner, shards, actors


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_learner_draws_from_the_shards_that_are_there(swarm, wait_until, no_orphans):
    learner, shards, actors = start(swarm, "--set", "task.stop.env_steps=100000000")
    wait_until(lambda: set(replay(learner)) == {"r1", "r2"}, START_S, "both shards are drawn from")
    wait_until(lambda: samples(learner) > 20, START_S, "samples come")
    wait_until(lambda: all(row["drawn"] > 0 for row in replay(learner).values()), START_S, "from both")
    wait_until(lambda: all(shard(node)["priorities"] > 0 for node in shards), START_S, "priorities come back")
    rows = replay(learner)
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1.0)
    status = learner.status()
    assert (status["env_steps"], status["healthy"]) == (0, True), "steps are credited where they are stored"
    assert status["updates"] > 0
    stored = [node.status()["env_steps"] for node in shards]
    assert min(stored) > 0
    sent = sum(node.status()["experience"]["sent"]["env_steps"] for node in actors)
    assert sum(stored) <= sent + 4 * 4 * 16

    before = shard(shards[0])
    os.kill(before["pid"], signal.SIGKILL)
    wait_until(lambda: shards[0].events("learner-restarted"), START_S, "its process is replaced")
    wait_until(lambda: shard(shards[0]).get("rows", 0) >= before["rows"] - 16, DETECT_S, "no row is lost")

    shards[1].kill9()
    now = samples(learner)
    wait_until(lambda: samples(learner) > now + 5, 5.0, "sampling goes on")
    assert set(replay(learner)) == {"r1"}
    wait_until(
        lambda: all(node.status()["experience"]["sent"]["learner_name"] == "r1" for node in actors),
        DETECT_S,
        "its actors send to the other",
    )
    for node in (*actors, shards[0], learner):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("algorithm", ["td3", "sac"])
def test_actor_critics_learn_from_shards(swarm, wait_until, no_orphans, algorithm):
    settings = {
        "task.algorithm.name": algorithm,
        "task.env.id": "Pendulum-v1",
        "task.env.num_envs": 2,
        "task.algorithm.unroll_steps": 8,
        "task.algorithm.gradient_steps": 4,
        "task.algorithm.batch_size": 32,
        "task.algorithm.learning_starts": 200,
        "task.algorithm.prioritized": "true",
        "task.network.hidden": "[32, 32]",
        "task.stop.env_steps": 100000000,
    }
    options = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    learner = swarm.found("learner", *options, "--roles", "learner")
    shards = [swarm.start(name, "--roles", "replay", peers=learner) for name in ("r1", "r2")]
    # one actor node for each shard: who sends where follows from the ids
    actors = [swarm.start(name, "--roles", "actor", "--actors", "1", peers=learner) for name in ("a1", "a2")]
    drawn = lambda: {name: row["drawn"] for name, row in replay(learner).items()}  # noqa: E731
    wait_until(lambda: len(drawn()) == 2 and min(drawn().values()) > 500, 2 * START_S, "rows are drawn")
    wait_until(lambda: all(shard(node)["priorities"] > 500 for node in shards), START_S, "errors go back")
    status = learner.status()
    losses = {name: value for name, value in status["learner"]["metrics"].items() if name.endswith("_loss")}
    assert len(losses) >= 2, status["learner"]  # of actor and critics
    assert all(math.isfinite(value) for value in losses.values())
    version = status["policy_version"]
    for node in actors:
        wait_until(
            lambda n=node: n.status()["experience"]["sent"]["policy_version"] > version,
            DETECT_S,
            "actors act by what was learned",
        )
    for node in (*actors, *shards, learner):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_another_learns_on_from_the_same_shards(swarm, wait_until, no_orphans):
    learner, shards, actors = start(swarm, "--set", "task.stop.env_steps=100000000")
    wait_until(lambda: samples(learner) > 50, START_S, "it learns")
    wait_until(
        lambda: all(node.status()["experience"]["sent"]["state_version"] > 10 for node in actors),
        START_S,
        "its actors have a newer whole state",
    )
    learner.kill9()
    heir = wait_until(
        lambda: next((node for node in actors if node.events("promoted")), None), 15.0, "one begins"
    )
    wait_until(lambda: samples(heir) > 20, START_S, "it draws from the shards")
    assert set(replay(heir)) == {"r1", "r2"}
    version = max(shard(node)["policy_version"] for node in shards)
    wait_until(
        lambda: all(shard(node)["policy_version"] > version for node in shards), DETECT_S, "they follow it"
    )
    (other,) = [node for node in actors if node is not heir]
    for node in (heir, other):  # its own actors' unrolls go to the shards, as before
        sent = node.status()["experience"]["sent"]["sent"]
        wait_until(lambda n=node, s=sent: n.status()["experience"]["sent"]["sent"] > s + 5, DETECT_S, "acts")
    for node in (other, heir, *shards):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_learner_two_shards_and_two_actors_solve_the_task(swarm, no_orphans):
    options = ("--set", "task.stop.mean_return=475", "--set", "task.env.num_envs=8")
    learner, shards, actors = start(swarm, *options, "--set", "task.stop.env_steps=400000")
    nodes = [learner, *shards, *actors]
    assert [node.wait(500) for node in nodes] == [0] * 5, learner.text()[-3000:]
    for node in nodes:
        assert "475 is reached" in node.summary()["reason"]
        assert "Traceback" not in node.text()
    stored = sum(node.summary()["status"]["env_steps"] for node in shards)
    sent = sum(node.summary()["status"]["experience"]["sent"]["env_steps"] for node in actors)
    waiting = 2 * 4 * 2 * 8 * 16
    assert stored <= sent <= stored + waiting, "each step is counted once"
