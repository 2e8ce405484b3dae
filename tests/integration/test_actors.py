"""Actor processes of a real node: they are killed, the learner is killed, the daemon is killed."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from urllib.request import Request, urlopen

import psutil
import pytest

OPTIONS = [
    *("--actors", "2"),
    *("--set", "task.env.num_envs=4"),
    *("--set", "task.algorithm.name=ppo"),
    *("--set", "task.algorithm.unroll_steps=32"),
    *("--set", "task.strategy.name=local"),
    *("--set", "task.stop.env_steps=100000000"),
    *("--set", "node.learner.restart_min_s=0.05"),
]
"""With the default task but for these: many small updates."""
START_S = 90.0


def acting(node):
    return [row for row in node.status().get("actors") or [] if row["running"]]


def both_work(node):
    rows = acting(node)
    return rows if len(rows) == 2 and all(row["unrolls"] >= 3 for row in rows) else None


def start(swarm, wait_until, name="solo"):
    node = swarm.start(name, *OPTIONS)
    rows = wait_until(lambda: both_work(node), START_S, "both actors work")
    assert [row["environments"] for row in rows] == [2, 2]
    return node, rows


def shared_memory(pid):
    """What a process has mapped of the memory that actors and learner share."""
    with open(f"/proc/{pid}/maps") as maps:  # noqa: PTH123 - no path of ours
        return {name for line in maps for name in ("memfd:unrolls", "memfd:policy") if name in line}


def test_an_actor_that_is_killed_is_replaced_and_none_outlives_the_daemon(swarm, wait_until):
    node, rows = start(swarm, wait_until)
    victim = rows[0]
    updates = node.status()["updates"]
    os.kill(victim["pid"], signal.SIGKILL)
    wait_until(lambda: node.status()["updates"] >= updates + 5, 30, "updates go on")
    found = wait_until(
        lambda: next((row for row in acting(node) if row["number"] == 0 and row["restarts"] == 1), None),
        START_S,
        "another took its place",
    )
    assert found["pid"] != victim["pid"]
    before = found["unrolls"]
    wait_until(lambda: acting(node)[0]["unrolls"] > before, 30, "it makes unrolls")
    assert found["dropped"] <= 1
    (event,) = node.events("actor-died")
    assert "killed by signal 9" in event["text"]
    metrics = (node.get("/metrics") or b"").decode()
    assert "p2pdrl_actors 2.0" in metrics
    assert "p2pdrl_actor_restarts_total 1.0" in metrics
    assert len([child for child in node.children() if "workers.actor" in " ".join(child.cmdline())]) == 2
    status = node.status()
    assert status["env_steps"] <= sum(row["env_steps"] for row in status["actors"])  # none counted twice

    children = node.children()
    assert len(children) >= 3
    assert shared_memory(found["pid"]) == {"memfd:unrolls", "memfd:policy"}
    node.kill9()
    wait_until(lambda: not any(alive(child) for child in children), 10, "all children are gone")


BATCHED = ("--set", "node.actors.inference=batched")


@pytest.mark.slow
def test_actors_whose_inference_process_is_killed_wait_for_another_and_go_on(swarm, wait_until, no_orphans):
    node = swarm.start("solo", *OPTIONS, *BATCHED)
    rows = wait_until(lambda: both_work(node), START_S, "both actors work")
    first = node.status()["inference"]["pid"]
    asked = Request(f"http://{node.api}/v1/act", b'{"observations": [[0, 0, 0, 0]]}')
    asked.add_header("Content-Type", "application/json")
    with urlopen(asked, timeout=30) as answer:
        assert json.load(answer)["policy_version"] > 0
    assert node.status()["inference"]["pid"] == first  # callers are answered by the same process
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: node.status()["inference"]["pid"] not in (None, first), START_S, "there is another")
    updates = node.status()["updates"]
    wait_until(lambda: node.status()["updates"] >= updates + 5, START_S, "updates go on")
    assert [row["pid"] for row in acting(node)] == [row["pid"] for row in rows]

    os.kill(rows[0]["pid"], signal.SIGKILL)
    updates = node.status()["updates"]
    wait_until(lambda: node.status()["updates"] >= updates + 5, 30, "nobody waits for a dead actor")
    wait_until(
        lambda: both_work(node) and acting(node)[0]["restarts"] == 1, START_S, "another took its place"
    )
    metrics = (node.get("/metrics") or b"").decode()
    assert "p2pdrl_inference_failures_total 1.0" in metrics
    assert float(metrics.split("p2pdrl_actor_batch_environments_sum ")[1].split()[0]) > 100
    (event,) = node.events("inference-failed")
    assert "killed by signal 9" in event["text"]

    node.signal(signal.SIGTERM)
    assert node.wait(20) == 0
    assert "Traceback" not in node.text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "algorithm",
    [
        ("task.algorithm.name=impala", "task.network.core=lstm"),
        ("task.algorithm.name=dqn", "task.algorithm.learning_starts=200"),
    ],
    ids=["impala, lstm", "dqn"],
)
def test_nodes_that_only_act_ask_an_inference_process_of_their_own(swarm, wait_until, no_orphans, algorithm):
    settings = [word for setting in algorithm for word in ("--set", setting)]
    task = (*settings, *("--set", "task.env.num_envs=4"), *("--set", "task.stop.env_steps=100000000"))
    learner = swarm.found(
        "learner", *task, "--roles", "learner,replay" if "dqn" in algorithm[0] else "learner"
    )
    actor = swarm.start("a", "--roles", "actor", "--actors", "2", *BATCHED, peers=learner)
    wait_until(lambda: sent(actor) > 10, START_S, "unrolls are sent")
    first = actor.status()["inference"]["pid"]
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: actor.status()["inference"]["pid"] not in (None, first), START_S, "there is another")
    before = sent(actor)
    wait_until(lambda: sent(actor) > before + 10, START_S, "they go on")
    for node in (actor, learner):
        node.signal(signal.SIGTERM)
        assert node.wait(30) == 0
        assert "Traceback" not in node.text()


@pytest.mark.slow
def test_a_learner_that_is_killed_finds_its_actors_again(swarm, wait_until):
    node, rows = start(swarm, wait_until)
    os.kill(node.learner_pid(), signal.SIGKILL)
    wait_until(lambda: node.status()["learner"]["restarts"] == 1, START_S, "another learner")
    updates = node.status()["updates"]
    wait_until(lambda: node.status()["updates"] >= updates + 5, 30, "it learns")
    assert [row["pid"] for row in acting(node)] == [row["pid"] for row in rows]
    assert sum(row["restarts"] for row in acting(node)) == 0


@pytest.mark.slow
def test_a_node_that_leaves_takes_its_actors_along(swarm, wait_until):
    node, _ = start(swarm, wait_until)
    children = node.children()
    node.signal(signal.SIGTERM)
    assert node.wait(20) == 0
    wait_until(lambda: not any(alive(child) for child in children), 10, "all children are gone")
    assert "Traceback" not in node.text()


def test_an_environment_that_cant_be_made_ends_the_node_with_the_reason(swarm):
    node = swarm.start("solo", "--actors", "2", "--set", "task.env.id=Nothing-v0")
    assert node.wait(START_S) == 2
    assert "Nothing-v0" in node.text()


CRASHING = """
import gymnasium as gym
from gymnasium.envs.classic_control import CartPoleEnv


class Crashing(CartPoleEnv):
    def step(self, action):
        raise ArithmeticError("the pole is gone")


gym.register("Crashing-v0", entry_point=Crashing)
"""


@pytest.mark.slow
def test_an_environment_that_raises_is_told_and_ends_the_node(swarm, tmp_path):
    (tmp_path / "crashing.py").write_text(CRASHING)
    node = swarm.start(
        "solo",
        *("--actors", "1", "--allow-import"),
        *("--set", "task.env.id=crashing:Crashing-v0"),
        *("--set", "node.learner.restart_min_s=0.05", "--set", "node.learner.give_up_after=2"),
        env={"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])},
    )
    assert node.wait(2 * START_S) == 1
    assert "actor 0 died 2 times in a row in the same way" in node.text()
    assert "ArithmeticError: the pole is gone" in node.text()


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("actors", [0, 2])
def test_ppo_solves_cartpole_with_and_without_actors(swarm, actors, seed):
    node = swarm.start(
        "solo",
        *("--actors", str(actors)),
        *("--set", f"node.seed={seed}"),
        *("--set", f"task.seed={seed}"),
        *("--set", "task.strategy.name=local"),
        *("--set", "task.stop.mean_return=475"),
        *("--set", "task.stop.env_steps=300000"),
    )
    assert node.wait(1500) == 0
    (halted,) = [event for event in node.told() if event["kind"] == "halted"]
    assert "return" in halted["reason"], halted


LUNAR_LANDER = [
    *("--set", "task.env.id=LunarLander-v3", "--set", "task.env.num_envs=16"),
    *("--set", "task.algorithm.learning_rate=0.0003", "--set", "task.algorithm.unroll_steps=256"),
    *("--set", "task.algorithm.discount=0.999", "--set", "task.algorithm.gae_lambda=0.98"),
    *("--set", "task.algorithm.entropy_coef=0.01", "--set", "task.algorithm.minibatches=32"),
    *("--set", "task.strategy.name=local"),
]
"""Not the best there is: alike for both."""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("Box2D") is None, reason="wants the box2d extra")
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("actors", [0, 2])
def test_ppo_lands_with_and_without_actors(swarm, actors, seed):
    node = swarm.start(
        "solo",
        *("--actors", str(actors), "--set", f"node.seed={seed}", "--set", f"task.seed={seed}"),
        *LUNAR_LANDER,
        *("--set", "task.stop.mean_return=100", "--set", "task.stop.env_steps=600000"),
    )
    assert node.wait(3000) == 0
    (halted,) = [event for event in node.told() if event["kind"] == "halted"]
    assert "return" in halted["reason"], halted


def sent(node):
    """Unrolls that a node which only acts has sent."""
    told = node.status().get("experience") or {}
    return (told.get("sent") or {}).get("sent", 0)


def alive(child):
    try:
        return child.is_running() and child.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
