"""Environments one after the other, beside gymnasium's own loop."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from p2pdrl.config.task import EnvConfig
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.serial_env import SerialVectorEnv


def makers(env_id: str, limit: int):
    return [lambda: gym.make(env_id, disable_env_checker=True, max_episode_steps=limit)] * 3


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCarContinuous-v0"])
def test_to_the_bit_what_gymnasiums_loop_gives(env_id):
    naive = SyncVectorEnv(makers(env_id, 17), copy=True, autoreset_mode=AutoresetMode.NEXT_STEP)
    lean = SerialVectorEnv(makers(env_id, 17))
    seeds = [5, 2**31, 2**32 - 1]
    np.testing.assert_array_equal(naive.reset(seed=seeds)[0], lean.reset(seed=seeds)[0])
    naive.action_space.seed(0)
    ends = 0
    for _ in range(60):
        actions = naive.action_space.sample()
        expected, found = naive.step(actions)[:4], lean.step(actions)[:4]
        for wanted, given in zip(expected, found, strict=True):
            assert wanted.dtype == given.dtype
            np.testing.assert_array_equal(wanted, given)
        ends += int((found[2] | found[3]).sum())
    assert ends >= 6


def test_environments_without_an_action_stand_still():
    some, alone, lean = (SerialVectorEnv(makers("Acrobot-v1", 5)[:n]) for n in (3, 2, 3))
    actions = np.random.default_rng(0).integers(3, size=(24, 3))
    for env in (some, alone, lean):
        env.reset(seed=[5, 6, 7][: env.num_envs])
    for one in actions[:12]:
        for wanted, given in zip(alone.step(one[:2])[:4], some.step(one[:2])[:4], strict=True):
            np.testing.assert_array_equal(given, wanted)
    ends = 0
    for here, there in zip(actions[12:], actions[:12], strict=True):  # the third one's first steps are these
        given, wanted = some.step(np.array([*here[:2], there[2]]))[:4], lean.step(there)[:4]
        for row, expected in zip(given, wanted, strict=True):
            np.testing.assert_array_equal(row[2], expected[2])
        ends += int(given[3][2])
    assert ends == 2


def test_a_second_reset_begins_anew():
    lean = SerialVectorEnv(makers("CartPole-v1", 2))
    first = lean.reset(seed=[0, 1, 2])[0].copy()
    for _ in range(2):
        lean.step(np.zeros(3, np.int64))
    np.testing.assert_array_equal(lean.reset(seed=[0, 1, 2])[0], first)
    assert not lean.step(np.zeros(3, np.int64))[2].any()


def test_a_reset_behind_an_end_forgets_it():
    lean = SerialVectorEnv(makers("CartPole-v1", 2))
    lean.reset(seed=[0, 1, 2])
    for _ in range(2):
        ends = lean.step(np.zeros(3, np.int64))[3]
    assert ends.all()
    lean.reset(seed=[0, 1, 2])
    assert not lean.step(np.zeros(3, np.int64))[3].any()


def test_infos_are_those_of_the_last_step():
    class Told(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(3)

        def reset(self, *, seed=None, options=None):
            return np.zeros(1, np.float32), {"seed": seed}

        def step(self, action):
            return np.zeros(1, np.float32), 0.0, False, False, {"action": int(action)}

    env = SerialVectorEnv([Told] * 2)
    env.reset(seed=[3, 4])
    assert env.infos == [{"seed": 3}, {"seed": 4}]
    env.step(np.array([1, 2]))
    assert env.infos == [{"action": 1}, {"action": 2}]


def test_all_are_closed():
    closed = []

    class Closes(gym.Env):
        observation_space = gym.spaces.Box(0, 1, (1,))
        action_space = gym.spaces.Discrete(2)

        def close(self):
            closed.append(self)

    SerialVectorEnv([Closes] * 3).close()
    assert len(closed) == 3


def test_it_is_what_environments_without_a_path_of_their_own_take():
    env = make_vector_env(EnvConfig(id="Pendulum-v1", num_envs=2), seed=0)
    assert isinstance(env._env, SerialVectorEnv)
    assert env.steps_some
    env.close()


def test_gymnasiums_own_vector_environments_step_all():
    env = make_vector_env(EnvConfig(num_envs=2), seed=0)
    assert not env.steps_some
    env.close()
