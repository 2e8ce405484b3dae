"""Nodes evaluate in turn as they train; a goal ends the swarm, and the best policy is on disk."""

from __future__ import annotations

import os
import signal

import pytest

from p2pdrl.node.state.checkpoints import load

QUICK = [
    *("--set", "task.evaluation.every=2000", "--set", "task.evaluation.episodes=4"),
    *("--set", "task.env.max_episode_steps=100", "--set", "node.learner.max_updates_per_s=5"),
]


@pytest.mark.slow
def test_two_evaluations_that_reach_the_goal_end_a_swarm_of_two(swarm, wait_until, no_orphans):
    a = swarm.start("a", *QUICK, "--set", "task.stop.mean_return=5")  # whatever it does lasts longer
    a.hold()  # until both train: else it would evaluate twice by itself
    b = swarm.start("b", *QUICK[4:], peers=a)
    for node in (a, b):
        wait_until(lambda node=node: node.status().get("state") == "paused", 60, f"{node.name} is held")
    a.post("/v1/resume?scope=swarm")
    assert [node.wait(90) for node in (a, b)] == [0, 0], a.text()[-3000:]
    told = [
        (event["env_steps"], event["mean"], node.name)
        for node in (a, b)
        for event in node.told()
        if event["kind"] == "evaluated"
    ]
    assert {name for *_, name in told} == {"a", "b"}  # the second one confirms the first
    for node in (a, b):
        summary = node.summary()
        assert "5 is reached" in summary["reason"]
        assert "in the last two evaluations, of 4 episodes each" in summary["reason"]
        assert summary["status"]["evaluation"]["count"] >= 2
        mine = [mean for _, mean, name in told if name == node.name]
        assert load(next(node.data.rglob("best.safetensors"))).meta["mean_return"] == max(mine)


def test_an_evaluator_that_is_killed_is_told_and_training_goes_on(swarm, wait_until, no_orphans):
    node = swarm.start("solo", *QUICK, "--set", "task.evaluation.episodes=2000")
    swarm.training(node)

    def evaluators():
        return [child for child in node.children() if "workers.evaluator" in " ".join(child.cmdline())]

    wait_until(evaluators, 60, "an evaluation begins")
    os.kill(evaluators()[0].pid, signal.SIGKILL)
    wait_until(lambda: node.events("evaluation-failed"), 20, "it is told")
    assert "killed by signal 9" in node.events("evaluation-failed")[0]["text"]
    updates = node.status()["updates"]
    wait_until(lambda: node.status()["updates"] > updates, 20, "training goes on")
    node.signal(signal.SIGTERM)
    assert node.wait(20) == 0
