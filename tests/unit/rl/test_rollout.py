"""The collector on scripted episodes: what is masked, what is bootstrapped, what is counted."""

from __future__ import annotations

import gymnasium as gym
import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig
from p2pdrl.rl.envs import VectorEnv, make_vector_env
from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.rollout import Collector


class Counter(gym.Env):
    """The observation is (episode, step); pays step²; ends after ``length`` steps in the way asked for."""

    observation_space = gym.spaces.Box(-1e6, 1e6, (2,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, length: int, truncates: bool) -> None:
        self.length, self.truncates, self.episode = length, truncates, -1

    def reset(self, *, seed=None, options=None):
        self.episode, self.t = self.episode + 1, 0
        return np.array([self.episode, 0], np.float32), {}

    def step(self, action):
        self.t += 1
        end = self.t == self.length
        obs = np.array([self.episode, self.t], np.float32)
        return obs, float(self.t**2), end and not self.truncates, end and self.truncates, {}


def counters():
    makers = [lambda: Counter(2, truncates=False), lambda: Counter(3, truncates=True)]
    return VectorEnv(gym.vector.SyncVectorEnv(makers, copy=False), seed=0)


def collector(env, unroll_steps, seed=0, **options):
    policy = ActorCritic(env.spec, NetworkConfig(hidden=(8,)), seed=0)
    return policy, Collector(env, policy, unroll_steps, torch.Generator().manual_seed(seed), **options)


def test_rows_of_scripted_episodes():
    policy, collect = collector(counters(), 7)
    unroll = collect.collect()
    # one environment: steps 1 2, then a reset, and so on; the other: steps 1 2 3, then a reset
    assert unroll.obs_T1BX[:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2], [2, 0], [2, 1]]
    assert unroll.obs_T1BX[:, 1].tolist() == [[0, 0], [0, 1], [0, 2], [0, 3], [1, 0], [1, 1], [1, 2], [1, 3]]
    assert unroll.valid_TB.T.tolist() == [
        [True, True, False, True, True, False, True],
        [True] * 3 + [False] + [True] * 3,
    ]
    assert unroll.rewards_TB.T.tolist() == [[1, 4, 0, 1, 4, 0, 1], [1, 4, 9, 0, 1, 4, 9]]
    assert unroll.terminated_TB[:, 0].nonzero().flatten().tolist() == [1, 4]
    assert unroll.truncated_TB[:, 1].nonzero().flatten().tolist() == [2, 6]
    assert not unroll.truncated_TB[:, 0].any()
    assert not unroll.terminated_TB[:, 1].any()
    assert unroll.env_steps == 11
    assert unroll.episodes == [(5.0, 2), (14.0, 3), (5.0, 2), (14.0, 3)]
    # the row after a truncation holds the true final observation, so its value is the bootstrap
    final = policy.values(torch.tensor([0.0, 3.0]))
    torch.testing.assert_close(unroll.values_T1B[3, 1], final)


def test_episodes_run_on_across_unrolls():
    _, long = collector(counters(), 12)
    _, short = collector(counters(), 3)
    whole = long.collect()
    pieces = []
    for _ in range(4):
        piece = short.collect()
        pieces.append((piece.obs_T1BX[:-1].clone(), piece.valid_TB.clone(), piece.episodes, piece.env_steps))
    assert torch.equal(torch.cat([p[0] for p in pieces]), whole.obs_T1BX[:-1])
    assert torch.equal(torch.cat([p[1] for p in pieces]), whole.valid_TB)
    assert [e for p in pieces for e in p[2]] == whole.episodes
    assert sum(p[3] for p in pieces) == whole.env_steps


def test_log_probabilities_belong_to_the_actions():
    env = make_vector_env(EnvConfig(num_envs=4), seed=0)
    policy, collect = collector(env, 16)
    unroll = collect.collect()
    log_probs, _, values = policy.evaluate(unroll.obs_T1BX[:-1], unroll.actions)
    torch.testing.assert_close(unroll.log_probs_TB, log_probs.detach())
    torch.testing.assert_close(unroll.values_T1B[:-1], values.detach())
    assert set(unroll.actions.flatten().tolist()) == {0, 1}


@pytest.mark.parametrize("env_id", ["CartPole-v1", "Pendulum-v1"])
def test_a_seed_repeats_everything(env_id):
    def run(seed):
        env = make_vector_env(EnvConfig(id=env_id, num_envs=2), seed=seed)
        unroll = collector(env, 20, seed)[1].collect()
        return unroll.obs_T1BX.clone(), unroll.actions.clone()

    (obs, actions), (obs_again, actions_again), (obs_other, _) = run(1), run(1), run(2)
    assert torch.equal(obs, obs_again)
    assert torch.equal(actions, actions_again)
    assert not torch.equal(obs, obs_other)


def test_normalizers_count_valid_steps_only_and_statistics_stay_raw():
    normalizer, scaler = RunningNormalizer((2,)), RewardScaler(2, 0.9)
    _, collect = collector(counters(), 7, normalizer=normalizer, reward_scaler=scaler)
    first = collect.collect()
    assert normalizer.own.count == scaler.statistics.own.count == first.env_steps == 11
    assert first.obs_T1BX.max() == 3  # nothing counted yet while it ran
    assert first.episodes[0] == (5.0, 2)
    assert first.rewards_TB.max() < 9
    mean, deviation = normalizer.own.mean.copy(), np.sqrt(normalizer.own.var)
    second = collect.collect()
    np.testing.assert_allclose(second.obs_T1BX[0], (collect._raw_obs_T1BX[0] - mean) / deviation, rtol=1e-4)
