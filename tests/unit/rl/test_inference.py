"""A policy asked from outside, in environments of several entries, with masks, and with odd action spaces."""

from __future__ import annotations

import json

import gymnasium as gym
import numpy as np
import pytest

from p2pdrl.api.act import decode_json
from p2pdrl.config.task import DQNConfig, EnvConfig, SACConfig, TaskConfig
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.inference import PolicyInference
from p2pdrl.tensors.shared_policy import ActingPolicy

from .toys import registered


@pytest.fixture(autouse=True)
def toys():
    with registered():
        yield


def as_json(observation):
    if isinstance(observation, dict):
        return {key: as_json(value) for key, value in observation.items()}
    if isinstance(observation, tuple):
        return [as_json(value) for value in observation]
    return np.asarray(observation).tolist()


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"nested": True, "picture": 0},
        {"actions": "multi"},
        {"masks": "info", "picture": 0},
        {"masks": "info", "actions": "multi", "nested": True},
    ],
    ids=str,
)
def test_a_caller_plays_by_json_and_takes_allowed_actions_only(kwargs):
    """The environment raises where an action isn't allowed."""
    inference = PolicyInference(TaskConfig(env=EnvConfig(id="Cards-v0", kwargs=kwargs)), seed=1)
    env = gym.make("Cards-v0", disable_env_checker=True, **kwargs)
    obs, info = env.reset(seed=1)
    for _ in range(60):
        question = {"observations": [as_json(obs)]}
        if kwargs.get("masks") == "info":
            question["mask"] = [as_json(info["action_mask"])]
        asked = decode_json(json.dumps(question).encode(), inference.spec, 4)
        answer = inference.answer(asked.obs_NX, greedy=0)
        assert np.isfinite(answer.log_probs_N).all()
        obs, _, terminated, truncated, info = env.step(answer.actions_NA[0])
        if terminated or truncated:
            obs, info = env.reset()


def test_rows_are_those_that_the_learner_sees():
    inference = PolicyInference(TaskConfig(env=EnvConfig(id="Cards-v0")), seed=1)
    vector = make_vector_env(EnvConfig(id="Cards-v0", num_envs=1), seed=7)
    rows = vector.reset()
    env = gym.make("Cards-v0", disable_env_checker=True)
    obs, _ = env.reset(seed=int(np.random.SeedSequence(7).generate_state(1)[0]))
    asked = decode_json(json.dumps({"observations": as_json(obs)}).encode(), inference.spec, 4)
    np.testing.assert_array_equal(asked.obs_NX, rows)


@pytest.mark.parametrize("name", ["GuessChoices-v0", "GuessShifted-v0", "GuessSwitches-v0", "Pendulum-v1"])
def test_actions_are_elements_of_the_environments_space(name):
    inference = PolicyInference(TaskConfig(env=EnvConfig(id=name)), seed=1)
    space = gym.make(name).action_space
    answer = inference.answer(np.zeros((20, *inference.spec.obs_shape), np.float32), greedy=5)
    assert all(space.contains(action) for action in answer.actions_NA)


@pytest.mark.parametrize(
    ("env", "algorithm"), [("CartPole-v1", DQNConfig()), ("Pendulum-v1", SACConfig())], ids=["dqn", "sac"]
)
def test_whoever_explores_by_epsilon_doesnt_here_and_has_no_values(env, algorithm):
    task = TaskConfig(env=EnvConfig(id=env), algorithm=algorithm)
    inference = PolicyInference(task, seed=1)
    vector = np.random.default_rng(0).normal(0, 0.1, inference.size).astype(np.float32)
    inference.use(vector, ActingPolicy(3, 1.0, np.zeros(0), np.zeros(0)))
    obs = np.random.default_rng(1).normal(size=(30, *inference.spec.obs_shape)).astype(np.float32)
    greedy, sampled = inference.answer(obs, greedy=30), inference.answer(obs, greedy=0)
    assert (greedy.values_N, greedy.policy_version) == (None, 3)
    if env == "CartPole-v1":
        assert sampled.actions_NA.tolist() == greedy.actions_NA.tolist()
    else:
        assert not np.array_equal(sampled.actions_NA, greedy.actions_NA)
