"""Evaluation: how many episodes, which ones, from which randomness."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig
from p2pdrl.errors import UsageError
from p2pdrl.rl.envs import Discrete, EnvSpec, make_vector_env
from p2pdrl.rl.evaluate import _Actor, _play, evaluate, record_video
from p2pdrl.rl.normalize import RunningNormalizer
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.q_network import QNetwork

ENV = EnvConfig(num_envs=4, max_episode_steps=30)


@pytest.fixture
def policy():
    return ActorCritic(make_vector_env(ENV, 0).spec, NetworkConfig(hidden=(8,)), seed=0)


def test_plays_as_many_episodes_as_asked(policy):
    for episodes in (1, 3, 10):
        result = evaluate(policy, ENV, episodes, greedy=False, seed=0)
        assert len(result.returns) == len(result.lengths) == episodes
        assert result.returns == tuple(float(length) for length in result.lengths)
        assert result.min <= result.median <= result.max
        assert result.mean == pytest.approx(np.mean(result.returns))
        assert result.std == pytest.approx(np.std(result.returns))


def test_a_seed_repeats_it(policy):
    first = evaluate(policy, ENV, 5, greedy=False, seed=1)
    assert first == evaluate(policy, ENV, 5, greedy=False, seed=1)
    assert first != evaluate(policy, ENV, 5, greedy=False, seed=2)


def test_noisy_weights_are_judged_by_their_means():
    net = QNetwork(
        make_vector_env(ENV, 0).spec, NetworkConfig(hidden=(8,), noisy=True, noisy_sigma=5.0), seed=0
    )
    sampled, other = (evaluate(net, ENV, 5, greedy=greedy, seed=1) for greedy in (False, True))
    assert sampled == other


def test_long_episodes_count_as_much_as_short_ones():
    class TwoSpeeds:
        """One environment ends every step, the other every fifth; the step after an end only resets."""

        num_envs = 2
        games_over = staticmethod(lambda ends_B: ends_B)

        def reset(self):
            self.t = np.zeros(2, dtype=int)
            return np.zeros((2, 1))

        def step(self, actions):
            length = np.array([1, 5])
            resets = self.t == length
            self.t = np.where(resets, 0, self.t + 1)
            return np.zeros((2, 1)), np.where(resets, 0.0, 1.0), self.t == length, np.zeros(2, dtype=bool)

    played = _play(TwoSpeeds(), lambda obs, starts: obs, np.array([3, 3]))
    assert sorted(played) == [(1.0, 1)] * 3 + [(5.0, 5)] * 3


def test_a_memory_is_emptied_between_episodes_and_kept_within():
    class Copies:
        """Two environments that show 1 in the first step of an episode and 0 after; episodes of 2 and 3."""

        num_envs = 2
        games_over = staticmethod(lambda ends_B: ends_B)

        def __init__(self):
            self.t = np.zeros(2, dtype=int)

        def reset(self):
            return np.ones((2, 1), np.float32)

        def step(self, actions):
            length = np.array([2, 3])
            resets = self.t == length
            self.t = np.where(resets, 0, self.t + 1)
            obs = (self.t == 0).astype(np.float32)[:, None]
            return obs, np.zeros(2), self.t == length, np.zeros(2, dtype=bool)

    spec = EnvSpec((1,), "float32", Discrete(2))
    policy = ActorCritic(spec, NetworkConfig(hidden=(4,), core="lstm", core_size=3), seed=0)
    states = []

    class Watched(_Actor):
        def __call__(self, obs_BX, starts_B):
            before = None if self._state_BS is None else self._state_BS.clone()
            actions = super().__call__(obs_BX, starts_B)
            states.append((obs_BX[:, 0].tolist(), before, self._state_BS.clone()))
            return actions

    with torch.inference_mode():
        _play(Copies(), Watched(policy, 0, greedy=True, normalizer=None), np.array([3, 3]))
        first = policy.initial_state(2)
        policy.act(torch.ones(2, 1), None, first)
    rows = [(b, obs[b], before, after) for obs, before, after in states for b in range(2)]
    begun = [after[b] for b, shown, _, after in rows if shown == 1.0]
    assert len(begun) >= 6
    assert all(torch.allclose(state, first[0]) for state in begun)
    assert not any(torch.allclose(after[b], first[0]) for b, shown, _, after in rows if shown == 0.0)


def test_a_policy_with_a_memory_is_evaluated():
    policy = ActorCritic(
        make_vector_env(ENV, 0).spec, NetworkConfig(hidden=(8,), core="lstm", core_size=4), seed=0
    )
    first = evaluate(policy, ENV, 5, greedy=False, seed=1)
    assert first == evaluate(policy, ENV, 5, greedy=False, seed=1)
    assert len(first.returns) == 5


def test_the_normalizer_is_applied_and_left_alone(policy):
    normalizer = RunningNormalizer((4,))
    normalizer.update(np.random.default_rng(0).normal(size=(10, 4)))
    evaluate(policy, ENV, 2, greedy=True, seed=0, normalizer=normalizer)
    assert normalizer.own.count == 10


def test_no_episodes_is_refused(policy):
    with pytest.raises(UsageError, match="at least 1"):
        evaluate(policy, ENV, 0, greedy=True, seed=0)


def test_video_without_its_packages_names_the_extra(policy, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "moviepy", None)
    with pytest.raises(UsageError, match=r"p2pdrl\[video\]"):
        record_video(policy, ENV, tmp_path / "a.mp4", greedy=True, seed=0)
    assert list(tmp_path.iterdir()) == []


def test_other_video_formats_are_refused(policy, tmp_path):
    with pytest.raises(UsageError, match=r"\.mp4"):
        record_video(policy, ENV, tmp_path / "a.gif", greedy=True, seed=0)
