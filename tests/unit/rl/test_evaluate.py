"""Evaluation: how many episodes, which ones, from which randomness."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from p2pdrl.config.task import EnvConfig, NetworkConfig
from p2pdrl.errors import UsageError
from p2pdrl.rl.envs import make_vector_env
from p2pdrl.rl.evaluate import _play, evaluate, record_video
from p2pdrl.rl.normalize import RunningNormalizer
from p2pdrl.rl.policy import ActorCritic

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


def test_long_episodes_count_as_much_as_short_ones():
    class TwoSpeeds:
        """One environment ends every step, the other every fifth; the step after an end only resets."""

        num_envs = 2

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
