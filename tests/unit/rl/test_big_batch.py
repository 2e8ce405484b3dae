"""The gradients of n workers average to that of one big batch.

What holds: with parameters, advantages and returns equal, the mean gradients of parts of a batch, each
weighted by its rows, average to the gradient of the mean loss on the whole. Advantages must have been
normalised (or not) over the whole batch: normalised part by part they are other numbers, and the
identity is lost. Whatever comes after the mean (clipping, the optimizer) must be done once, on the mean.
"""

from __future__ import annotations

import pytest
import torch

from p2pdrl.config.task import A2CConfig, NetworkConfig, PPOConfig
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.policy import ActorCritic

from .naive_updates import a2c_loss, ppo_loss

PARTS = [5, 1, 18, 8]  # workers rarely have as much as each other
N = sum(PARTS)


def double(config):
    """A policy and rows for it in float64."""
    policy = ActorCritic(EnvSpec((3,), "float32", Discrete(2)), NetworkConfig(hidden=(8,)), 0).double()
    generator = torch.Generator().manual_seed(5)
    rows = {
        "obs": torch.randn(N, 3, generator=generator, dtype=torch.float64),
        "actions": torch.randint(2, (N,), generator=generator),
        "advantages": torch.randn(N, generator=generator, dtype=torch.float64) * 3,
        "returns": torch.randn(N, generator=generator, dtype=torch.float64),
    }
    with torch.no_grad():
        log_probs, values = policy.evaluate(rows["obs"], rows["actions"])
    # the policy has moved since it acted: some ratios are beyond the clip
    rows["log_probs"] = log_probs + torch.randn(N, generator=generator, dtype=torch.float64) * 0.3
    rows["values"] = values + torch.randn(N, generator=generator, dtype=torch.float64) * 0.3
    return policy, rows


def normalised(advantages):
    return (advantages - advantages.mean()) / (advantages.std(correction=0) + 1e-8)


def gradient_of(policy, loss):
    grads = torch.autograd.grad(loss, list(policy.parameters()))
    return torch.cat([grad.reshape(-1) for grad in grads])


def ppo_gradient(policy, rows, config):
    return gradient_of(policy, ppo_loss(policy, rows, config))


def a2c_gradient(policy, rows, config):
    return gradient_of(policy, a2c_loss(policy, rows, config))


def weighted_mean(policy, rows, gradient, config, *, normalise_parts=False):
    mean, begin = 0.0, 0
    for size in PARTS:
        part = {name: array[begin : begin + size] for name, array in rows.items()}
        if normalise_parts:
            part["advantages"] = normalised(part["advantages"])
        mean = mean + gradient(policy, part, config) * (size / N)
        begin += size
    return mean


@pytest.mark.parametrize(
    ("gradient", "config"),
    [
        (ppo_gradient, PPOConfig(entropy_coef=0.01)),
        (ppo_gradient, PPOConfig(value_clip=0.2)),
        (a2c_gradient, A2CConfig()),
    ],
)
def test_workers_weighted_by_their_rows_are_one_big_batch(gradient, config):
    policy, rows = double(config)
    rows["advantages"] = normalised(rows["advantages"])
    whole = gradient(policy, rows, config)
    torch.testing.assert_close(weighted_mean(policy, rows, gradient, config), whole, rtol=1e-11, atol=1e-13)


def test_advantages_normalised_part_by_part_are_not_one_big_batch():
    config = PPOConfig()
    policy, rows = double(config)
    parts = weighted_mean(policy, rows, ppo_gradient, config, normalise_parts=True)
    rows["advantages"] = normalised(rows["advantages"])
    whole = ppo_gradient(policy, rows, config)
    assert float((parts - whole).norm() / whole.norm()) > 0.05
