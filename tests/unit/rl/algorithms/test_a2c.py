"""The actor-critic objective against NumPy, for continuous actions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.rl.algorithms.a2c import A2CObjective
from p2pdrl.rl.distributions import PolicyOutputs

N, A = 9, 2


def test_loss_terms_and_gradients():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    outputs = PolicyOutputs(draw(N, A), draw(N), draw(A).requires_grad_())
    targets = {"actions": draw(N, A), "advantages": draw(N), "returns": draw(N)}
    loss, terms = A2CObjective(value_coef=0.3, entropy_coef=0.05)(outputs, targets)
    loss.backward()

    mean, log_std = outputs.policy.numpy(), outputs.log_std.detach().numpy()
    z = (targets["actions"].numpy() - mean) / np.exp(log_std)
    advantages = targets["advantages"].numpy()
    log_probs = (-0.5 * z**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(1)
    policy_loss = -(advantages * log_probs).sum()
    value_loss = 0.5 * ((outputs.values - targets["returns"]).numpy() ** 2).sum()
    entropy = N * (log_std + 0.5 * np.log(2 * np.pi * np.e)).sum()
    np.testing.assert_allclose(terms.numpy(), [policy_loss, value_loss, entropy], rtol=1e-12)
    assert float(loss.detach()) == pytest.approx(policy_loss + 0.3 * value_loss - 0.05 * entropy, rel=1e-12)
    # the parameter that all rows share hears of every one of them
    slope = -(advantages[:, None] * (z**2 - 1)).sum(0) - 0.05 * N
    np.testing.assert_allclose(outputs.log_std.grad.numpy(), slope, rtol=1e-12)
