"""Advantages against published numbers and an independent direct sum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.rl.algorithms.returns import gae

# rows are environments, as in the source; transposed to TB below
REWARDS = [[0, 0, 1, 0, -0.5], [0, 0, 0, 0, 1]]
VALUES = [[1, 4, -3, -2, -1, -1], [-3, -2, -1, 0, 5, -1]]
DISCOUNTS = [[0.99] * 5, [0.9, 0.9, 0.9, 0, 0.9]]
GOLDENS = {
    1.0: [[-1.45118, -4.4557, 2.5396, 0.5249, -0.49], [3, 2, 1, 0, -4.9]],
    0.7: [[-0.676979, -5.248167, 2.4846, 0.6704, -0.49], [2.2899, 1.73, 1, 0, -4.9]],
    0.4: [[0.56731, -6.042, 2.3431, 0.815, -0.49], [1.725, 1.46, 1, 0, -4.9]],
}


def time_major(rows):
    return torch.tensor(rows, dtype=torch.float64).T.contiguous()


def gae_by_direct_sum(rewards, values, discounts, lambda_, continues):
    """Return A_t = Σ_k (Π_{t ≤ i < k} γ_i λ c_i) δ_k, one environment and one time at a time."""
    T, B = rewards.shape
    advantages = np.zeros((T, B))
    for b in range(B):
        for t in range(T):
            weight = 1.0
            for k in range(t, T):
                delta = rewards[k, b] + discounts[k, b] * values[k + 1, b] - values[k, b]
                advantages[t, b] += weight * delta
                weight *= discounts[k, b] * lambda_ * continues[k, b]
    return advantages


@pytest.mark.parametrize("lambda_", GOLDENS)
def test_gae_matches_published_numbers(lambda_):
    found = gae(time_major(REWARDS), time_major(VALUES), time_major(DISCOUNTS), lambda_)
    # the source cuts some numbers after three decimals
    np.testing.assert_allclose(found, time_major(GOLDENS[lambda_]), atol=1e-3)


@pytest.mark.parametrize("seed", range(5))
def test_gae_matches_direct_sum(seed):
    rng = np.random.default_rng(seed)
    T, B, lambda_ = 17, 3, 0.9
    rewards, values = rng.normal(size=(T, B)), rng.normal(size=(T + 1, B))
    discounts = 0.97 * (rng.random((T, B)) > 0.2)
    continues = (rng.random((T, B)) > 0.2).astype(float)
    found = gae(
        *(torch.from_numpy(x) for x in (rewards, values, discounts)), lambda_, torch.from_numpy(continues)
    )
    expected = gae_by_direct_sum(rewards, values, discounts, lambda_, continues)
    np.testing.assert_allclose(found, expected, atol=1e-12)


def test_truncation_bootstraps_but_nothing_leaks_from_the_next_episode():
    rewards = torch.tensor([[1.0], [1.0], [0.0], [100.0]], dtype=torch.float64)
    values = torch.tensor([[0.0], [0.0], [7.0], [55.0], [66.0]], dtype=torch.float64)
    discounts = torch.full((4, 1), 0.5, dtype=torch.float64)
    continues = torch.tensor([[1.0], [0.0], [1.0], [1.0]], dtype=torch.float64)
    found = gae(rewards, values, discounts, 1.0, continues)
    assert found[1].item() == pytest.approx(1.0 + 0.5 * 7.0)  # the final state keeps its value
    assert found[0].item() == pytest.approx(1.0 + 0.5 * (1.0 + 0.5 * 7.0))


def test_terminal_state_is_worth_nothing():
    found = gae(torch.tensor([[1.0]]), torch.tensor([[0.25], [1e9]]), torch.zeros(1, 1), 0.95)
    assert found.item() == pytest.approx(0.75)
