"""Running normalisers: own and others' counters, and the reward scaler."""

from __future__ import annotations

import numpy as np

from p2pdrl.rl.normalize import RewardScaler, RunningNormalizer
from p2pdrl.tensors.moments import Moments


def moments_of(rows):
    moments = Moments.zeros(rows.shape[1:])
    moments.update(rows)
    return moments


def test_nothing_seen_changes_nothing_but_clips():
    found = RunningNormalizer((2,)).normalize(np.array([[1.0, -99.0]]))
    assert found.tolist() == [[1.0, -10.0]]
    assert found.dtype == np.float32


def test_own_and_others_together_are_one_sample():
    rng = np.random.default_rng(0)
    mine, theirs = rng.normal(3, 2, (100, 4)), rng.normal(-5, 0.5, (300, 4))
    normalizer = RunningNormalizer((4,))
    normalizer.update(mine[:30])
    normalizer.set_others(moments_of(theirs))
    normalizer.update(mine[30:])
    everything = np.concatenate((mine, theirs))
    expected = (mine - everything.mean(0)) / everything.std(0)
    np.testing.assert_allclose(normalizer.normalize(mine), expected, rtol=1e-5, atol=1e-6)


def test_repeated_merges_count_nothing_twice():
    rows = np.random.default_rng(0).normal(size=(50, 3))
    normalizer = RunningNormalizer((3,))
    normalizer.update(rows)
    once = None
    for _ in range(3):
        normalizer.set_others(moments_of(rows + 1))
        found = normalizer.normalize(rows)
        once = found if once is None else once
        np.testing.assert_array_equal(found, once)
    assert normalizer.own.count == 50


def test_constant_input_gives_zero():
    normalizer = RunningNormalizer((1,))
    normalizer.update(np.full((10, 1), 7.0))
    assert normalizer.normalize(np.full((2, 1), 7.0)).tolist() == [[0.0], [0.0]]


def test_reward_scaler_divides_by_the_deviation_of_the_discounted_return():
    rewards = np.array([[1.0], [2.0], [4.0], [0.0], [8.0]])
    ends = np.array([[False], [False], [True], [False], [False]])
    valid = np.array([[True], [True], [True], [False], [True]])
    scaled = RewardScaler(1, discount=0.5).scale(rewards, ends, valid)
    returns = [1.0, 2.5, 5.25, 8.0]  # the reset after the end isn't counted, the next episode starts at zero
    np.testing.assert_allclose(scaled, rewards / np.std(returns), rtol=1e-5)


def test_reward_scaler_goes_on_across_unrolls():
    rewards = np.random.default_rng(0).normal(size=(6, 2))
    ends = np.zeros((6, 2), dtype=bool)
    whole, pieces = RewardScaler(2, 0.9), RewardScaler(2, 0.9)
    whole.scale(rewards, ends, ~ends)
    pieces.scale(rewards[:3], ends[:3], ~ends[:3])
    pieces.scale(rewards[3:], ends[3:], ~ends[3:])
    np.testing.assert_allclose(pieces.statistics.own.m2, whole.statistics.own.m2)
