"""Each algorithm learns in a swarm: two real nodes with an actor process each, averaged by gossip.

A run is short: the swarm's evaluations end it at a goal far above what random actions get (22 on CartPole,
-1,200 on Pendulum), long before the steps run out that would end it else.
"""

from __future__ import annotations

import pytest

from p2pdrl.node.accounting.exchanges import GOOD

CARTPOLE = ("150", "5000", "sampled")
GREEDY = ("150", "5000", "greedy")
PENDULUM = ("-700", "2000", "greedy")
"""Goal, environment steps between evaluations, and how actions are chosen in them."""
SMALL = ("task.network.hidden=[64, 64]", "task.algorithm.learning_rate=1e-3")

CASES = {
    "ppo": ("ppo", (), CARTPOLE, 300_000),
    "a2c": ("a2c", (), CARTPOLE, 1_000_000),
    "impala": ("impala", (), CARTPOLE, 400_000),
    "dqn": ("dqn", ("task.network.hidden=[64, 64]",), GREEDY, 100_000),
    "one_step_q": ("n_step_q", ("task.algorithm.name=one_step_q",), GREEDY, 500_000),
    "one_step_sarsa": ("n_step_q", ("task.algorithm.name=one_step_sarsa",), GREEDY, 500_000),
    "n_step_q": ("n_step_q", (), GREEDY, 500_000),
    "sac_discrete": ("sac_discrete", (), ("100", "2500", "greedy"), 60_000),
    "sac": ("sac", SMALL, PENDULUM, 30_000),
    "td3": ("td3", SMALL, PENDULUM, 40_000),
    "ddpg": ("ddpg", SMALL, PENDULUM, 40_000),
}
"""By algorithm: preset, what is changed of it, how it is judged, and the swarm's last environment step."""


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", CASES)
def test_two_nodes_with_actors_learn_together(swarm, name, no_orphans):
    preset, sets, (goal, every, mode), last = CASES[name]
    settings = [
        *sets,
        "task.strategy.name=adpsgd",
        "task.strategy.every_updates=4",
        f"task.evaluation.every={every}",
        f"task.evaluation.mode={mode}",
        "task.evaluation.episodes=10",
        f"task.stop.mean_return={goal}",
        f"task.stop.env_steps={last}",
    ]
    options = ["--config", preset, "--actors", "1", *(word for text in settings for word in ("--set", text))]
    first = swarm.found("first", *options)
    second = swarm.start("second", *options, peers=first)
    assert [node.wait(800) for node in (first, second)] == [0, 0], first.text()[-3000:]
    summaries = [node.summary() for node in (first, second)]
    for node, summary in zip((first, second), summaries, strict=True):
        assert f"{goal} is reached" in summary["reason"], summary["reason"]
        assert "Traceback" not in node.text()
        rounds = summary["status"]["accounting"]["adpsgd"]["rounds"]
        assert sum(rounds.get(word, 0) for word in GOOD) >= 3, rounds
        (actor,) = summary["status"]["actors"]
        assert actor["env_steps"] > 0
    print(name, [summary["status"]["env_steps"] for summary in summaries], summaries[0]["reason"])
