"""How many actors a node has, and when one of them is stuck."""

from __future__ import annotations

import pytest

from p2pdrl.config.node import ActorsConfig, LearnerConfig, NodeConfig
from p2pdrl.config.task import A2CConfig, DQNConfig, EnvConfig, ImpalaConfig, RegressionConfig, TaskConfig
from p2pdrl.node.children.actors import (
    STALLED_S,
    StallWatch,
    actor_count,
    lanes_for_ranks,
    remote_actor_count,
)

FOUR = TaskConfig(env=EnvConfig(num_envs=4))


@pytest.mark.parametrize(
    ("count", "cores", "expected"),
    [(0, 8, 0), (3, 1, 3), (9, 8, 4), ("auto", 1, 0), ("auto", 2, 2), ("auto", 16, 4)],
)
def test_actors_by_cores_and_environments(count, cores, expected):
    assert actor_count(NodeConfig(actors=ActorsConfig(count=count)), FOUR, cores) == expected


@pytest.mark.parametrize(("count", "cores", "expected"), [(0, 8, 4), (0, 1, 1), ("auto", 1, 1), (2, 8, 2)])
def test_a_node_that_only_acts_has_an_actor_at_least(count, cores, expected):
    node = NodeConfig(roles=("actor",), actors=ActorsConfig(count=count))
    assert actor_count(node, FOUR, cores) == expected


def test_a_learner_that_takes_unrolls_of_others_has_its_own_from_a_process():
    node = NodeConfig(learner=LearnerConfig(remote_actors=4))
    assert actor_count(node, FOUR, 1) == 1
    assert actor_count(node, TaskConfig(algorithm=A2CConfig()), 1) == 0


def test_a_node_that_only_learns_has_none():
    node = NodeConfig(roles=("learner",), actors=ActorsConfig(count=4))
    assert actor_count(node, FOUR, 8) == 0


def test_a_regression_has_none():
    node = NodeConfig(actors=ActorsConfig(count="auto"))
    assert actor_count(node, TaskConfig(algorithm=RegressionConfig()), 8) == 0


@pytest.mark.parametrize(
    ("roles", "wanted", "algorithm", "expected"),
    [
        (("learner",), "auto", ImpalaConfig(), 16),
        (("learner",), "auto", DQNConfig(), 16),
        (("learner",), "auto", DQNConfig(buffer_size=500), 4),
        (("learner",), "auto", DQNConfig(buffer_size=2000, unroll_steps=4), 11),
        (("learner",), 3, DQNConfig(), 3),
        (("learner",), "auto", RegressionConfig(), 0),
        ((), "auto", ImpalaConfig(), 0),
        ((), 2, ImpalaConfig(), 2),
        ((), 2, A2CConfig(), 0),
        (("learner", "actor"), "auto", ImpalaConfig(), 16),
        (("actor",), "auto", ImpalaConfig(), 16),
    ],
)
def test_actors_of_other_nodes_by_roles_and_algorithm(roles, wanted, algorithm, expected):
    node = NodeConfig(roles=roles, learner=LearnerConfig(remote_actors=wanted))
    assert remote_actor_count(node, TaskConfig(algorithm=algorithm)) == expected


@pytest.mark.parametrize(
    ("count", "cores", "algorithm", "expected"),
    [
        (2, 1, ImpalaConfig(), 16),
        ("auto", 8, ImpalaConfig(), 16),
        ("auto", 1, ImpalaConfig(), 0),
        (2, 1, A2CConfig(), 0),
        (2, 1, DQNConfig(), 0),
    ],
)
def test_a_node_with_actors_has_lanes_for_those_of_its_pipelines_other_ranks(
    count, cores, algorithm, expected
):
    node, task = NodeConfig(actors=ActorsConfig(count=count)), TaskConfig(algorithm=algorithm)
    assert remote_actor_count(node, task, cores) == expected
    assert lanes_for_ranks(node)


@pytest.mark.parametrize(
    "node", [NodeConfig(roles=("learner", "actor")), NodeConfig(learner=LearnerConfig(remote_actors=3))]
)
def test_lanes_that_were_asked_for_are_for_nodes_that_only_act_too(node):
    assert not lanes_for_ranks(node)


def looks(watch, seconds, committed=5, *, may_begin=True):
    """Look once a second; tell after how many it was found stuck."""
    for second in range(1, seconds + 1):
        if watch.look(committed, may_begin=may_begin, elapsed_s=1.0):
            return second
    return None


def test_an_actor_that_makes_nothing_is_stuck_after_a_while():
    watch = StallWatch()
    assert looks(watch, 10) is None
    assert looks(watch, 200) == pytest.approx(STALLED_S - 8, abs=2)


def test_one_that_must_wait_is_not():
    watch = StallWatch()
    assert looks(watch, 500, may_begin=False) is None
    assert looks(watch, 50) is None


def test_slow_environments_have_more_time():
    watch = StallWatch()
    for committed in range(3):
        assert looks(watch, 30, committed) is None
    assert looks(watch, 250, 3) is None
    assert looks(watch, 250, 3) is not None


def test_time_in_which_the_daemon_itself_was_frozen_counts_little():
    watch = StallWatch()
    looks(watch, 1)
    assert not watch.look(5, may_begin=True, elapsed_s=3600.0)
