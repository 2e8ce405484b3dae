"""Networks and policy: shapes, seeds, initial behaviour."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec
from p2pdrl.rl.policy import ActorCritic

VECTOR = EnvSpec((4,), "float32", Discrete(3))
MATRIX = EnvSpec((2, 5), "float32", Discrete(3))
CONTROL = EnvSpec((4,), "float32", Continuous(2, np.full(2, -1.0), np.full(2, 1.0)))
FRAMES = EnvSpec((4, 84, 84), "uint8", Discrete(6))
PICTURE = EnvSpec((84, 84, 3), "uint8", Discrete(6))


@pytest.mark.parametrize("spec", [VECTOR, MATRIX, CONTROL, FRAMES, PICTURE])
def test_shapes(spec):
    policy = ActorCritic(spec, NetworkConfig(), seed=0)
    generator = torch.Generator().manual_seed(0)
    obs = torch.zeros((3, 2, *spec.obs_shape), dtype=getattr(torch, spec.obs_dtype))
    actions = torch.stack([policy.act(row, policy.noise((2,), generator)) for row in obs])
    assert actions.shape == ((3, 2, 2) if isinstance(spec.action, Continuous) else (3, 2))
    log_probs, entropy, values = policy.evaluate(obs, actions)
    assert log_probs.shape == entropy.shape == values.shape == (3, 2)
    torch.testing.assert_close(policy.values(obs), values)


def test_weights_follow_from_the_seed_alone():
    def weights(seed):
        torch.rand(torch.randint(9, (1,)).item())  # whatever else draws from the global stream
        return torch.cat([p.flatten() for p in ActorCritic(VECTOR, NetworkConfig(), seed).parameters()])

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_first_policy_is_near_uniform():
    policy = ActorCritic(VECTOR, NetworkConfig(), seed=0)
    obs = torch.randn(100, 4, generator=torch.Generator().manual_seed(0))
    _, entropy, _ = policy.evaluate(obs, torch.zeros(100, dtype=torch.int64))
    assert entropy.min() > 0.999 * np.log(3)


def test_greedy_takes_the_likeliest():
    policy = ActorCritic(VECTOR, NetworkConfig(), seed=0)
    obs = torch.randn(20, 4, generator=torch.Generator().manual_seed(0))
    choices = torch.arange(3).expand(20, 3).T
    log_probs = torch.stack([policy.evaluate(obs, row)[0] for row in choices])
    assert torch.equal(policy.act(obs), log_probs.argmax(0))


def test_cnn_for_vectors_is_refused():
    with pytest.raises(ConfigError, match="nature_cnn"):
        ActorCritic(VECTOR, NetworkConfig(kind="nature_cnn"), seed=0)


def test_small_pictures_are_refused():
    with pytest.raises(ConfigError, match="36"):
        ActorCritic(EnvSpec((3, 20, 20), "uint8", Discrete(2)), NetworkConfig(), seed=0)
