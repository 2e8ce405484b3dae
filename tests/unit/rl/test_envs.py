"""Vector environments: fast path, autoreset, bounds, errors."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest

from p2pdrl.config.task import EnvConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import VETTED_VECTOR_ENVS, Continuous, Discrete, VectorEnv, make_vector_env


def test_cartpole_is_described():
    env = make_vector_env(EnvConfig(num_envs=3), seed=0)
    assert env.spec.obs_shape == (4,)
    assert env.spec.obs_dtype == "float32"
    assert env.spec.action == Discrete(2)
    assert env.reset().shape == (3, 4)


def test_pendulum_is_described():
    spec = make_vector_env(EnvConfig(id="Pendulum-v1", num_envs=2), seed=0).spec
    assert isinstance(spec.action, Continuous)
    assert spec.action.dim == 1
    assert spec.action.low.tolist() == [-2.0]
    assert not spec.is_image


def test_observations_of_other_spaces_are_flattened():
    env = make_vector_env(EnvConfig(id="FrozenLake-v1", num_envs=2), seed=0)
    assert env.spec.obs_shape == (16,)
    assert env.reset().sum() == 2  # one-hot


@pytest.mark.parametrize("env_id", sorted(VETTED_VECTOR_ENVS))
def test_vetted_vector_environment_moves_and_ends_like_the_scalar_one(env_id):
    vector = gym.make_vec(env_id, 1, vectorization_mode="vector_entry_point")
    scalar = gym.make(env_id, disable_env_checker=True)
    assert vector.metadata["autoreset_mode"] == gym.vector.AutoresetMode.NEXT_STEP
    rng = np.random.default_rng(0)
    for _ in range(5):
        vector.reset(seed=1)
        scalar.reset(seed=1)
        scalar.unwrapped.state = vector.state[:, 0].copy()
        ended = False
        while not ended:
            action = int(rng.integers(2))
            obs, reward, terminated, truncated, _ = scalar.step(action)
            obs_B, reward_B, terminated_B, truncated_B, _ = vector.step(np.array([action]))
            np.testing.assert_allclose(obs_B[0], obs, rtol=1e-5)
            assert (reward_B[0], terminated_B[0], truncated_B[0]) == (reward, terminated, truncated)
            ended = terminated or truncated


@pytest.mark.parametrize(("limit", "expected"), [(None, 500), (20, 20)])
def test_time_limit_truncates_after_the_same_step_on_both_paths(limit, expected):
    fast = make_vector_env(EnvConfig(num_envs=1, max_episode_steps=limit), seed=0)
    slow = gym.make_vec("CartPole-v1", 1, vectorization_mode="sync", max_episode_steps=limit or 500)
    fast.reset()
    slow.reset(seed=0)
    for step in range(1, expected + 1):
        # hold the pole up: physics isn't the point here
        fast._env.unwrapped.state = np.zeros((4, 1))
        slow.envs[0].unwrapped.state = np.zeros(4)
        _, _, terminated, truncated = fast.step(np.array([step % 2]))
        _, _, slow_terminated, slow_truncated, _ = slow.step(np.array([step % 2]))
        assert terminated.tolist() == slow_terminated.tolist() == [False]
        assert truncated.tolist() == slow_truncated.tolist() == [step == expected]


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Acrobot-v1"])
def test_step_after_an_end_only_resets(env_id):
    env = make_vector_env(EnvConfig(id=env_id, num_envs=2, max_episode_steps=3), seed=0)
    env.reset()
    actions = np.zeros(2, dtype=np.int64)
    for _ in range(3):
        _, _, _, truncated = env.step(actions)
    assert truncated.all()
    _, rewards, terminated, truncated = env.step(actions)
    assert not rewards.any()
    assert not terminated.any()
    assert not truncated.any()


def test_copies_start_apart_and_a_seed_repeats_them():
    for env_id in ("CartPole-v1", "Pendulum-v1"):
        first = make_vector_env(EnvConfig(id=env_id, num_envs=4), seed=7).reset().copy()
        again = make_vector_env(EnvConfig(id=env_id, num_envs=4), seed=7).reset().copy()
        other = make_vector_env(EnvConfig(id=env_id, num_envs=4), seed=8).reset().copy()
        np.testing.assert_array_equal(first, again)
        everything = np.concatenate((first, other))
        assert len(np.unique(everything, axis=0)) == 8


def test_continuous_actions_are_clipped_to_the_bounds():
    obs = []
    for torque in (2.0, 50.0):
        env = make_vector_env(EnvConfig(id="Pendulum-v1", num_envs=1), seed=0)
        env.reset()
        obs.append(env.step(np.array([[torque]], dtype=np.float32))[0].copy())
    np.testing.assert_array_equal(*obs)


class ShiftedActions(gym.Env):
    """Actions 5, 6 and 7; the observation is the action taken."""

    observation_space = gym.spaces.Box(0, 10, (1,))
    action_space = gym.spaces.Discrete(3, start=5)

    def reset(self, *, seed=None, options=None):
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.array([action], np.float32), 0.0, False, False, {}


class StrangeActions(ShiftedActions):
    action_space = gym.spaces.Text(3)


@pytest.fixture
def registered():
    ids = {"Shifted-v0": ShiftedActions, "Strange-v0": StrangeActions}
    for name, cls in ids.items():
        gym.register(name, cls)
    yield
    for name in ids:
        del gym.registry[name]


def test_discrete_actions_may_start_anywhere(registered):
    env = make_vector_env(EnvConfig(id="Shifted-v0", num_envs=3), seed=0)
    env.reset()
    obs, *_ = env.step(np.array([0, 1, 2]))
    assert obs[:, 0].tolist() == [5, 6, 7]


def test_unsupported_actions_are_refused(registered):
    with pytest.raises(ConfigError, match="Text"):
        make_vector_env(EnvConfig(id="Strange-v0", num_envs=1), seed=0)


def test_unknown_id_names_the_nearest():
    with pytest.raises(ConfigError, match="CartPole-v1"):
        make_vector_env(EnvConfig(id="CartPol-v1"), seed=0)


def test_bad_constructor_arguments_are_refused():
    with pytest.raises(ConfigError, match="kwargs"):
        make_vector_env(EnvConfig(kwargs={"no_such_argument": 1}), seed=0)


def test_importing_a_module_wants_permission():
    with pytest.raises(ConfigError, match="--allow-import"):
        make_vector_env(EnvConfig(id="some_module:Env-v0"), seed=0)


def test_missing_package_names_the_extra():
    if gym.envs.registration.importlib.util.find_spec("Box2D") is not None:
        pytest.skip("Box2D is installed here")
    with pytest.raises(ConfigError, match=r"p2pdrl\[box2d\]"):
        make_vector_env(EnvConfig(id="LunarLander-v3"), seed=0)


def test_a_slow_environment_sleeps_once_per_step_of_the_whole_batch():
    slept = []
    inner = gym.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    env = VectorEnv(inner, 0, step_delay_s=0.25, sleep=slept.append)
    env.reset()
    for _ in range(4):
        env.step(np.zeros(3, np.int64))
    assert slept == [0.25] * 4


def test_no_environment_sleeps_by_itself():
    slept = []
    inner = gym.make_vec("CartPole-v1", 3, vectorization_mode="vector_entry_point")
    env = VectorEnv(inner, 0, sleep=slept.append)
    env.reset()
    env.step(np.zeros(3, np.int64))
    assert slept == []
