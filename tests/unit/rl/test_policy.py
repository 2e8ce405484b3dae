"""Networks and policy: shapes, seeds, initial behaviour."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.policy import ActorCritic

from .policies import POLICIES, make_inputs, make_policy

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
    log_probs, values = policy.evaluate(obs, actions)
    assert log_probs.shape == values.shape == (3, 2)
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
    assert policy.outputs(obs).distribution().entropy().min() > 0.999 * np.log(3)


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
        ActorCritic(EnvSpec((3, 20, 20), "uint8", Discrete(2)), NetworkConfig(kind="nature_cnn"), seed=0)


GOLDEN = {
    # layout, Σ|w| and Σ w·cos(index) of the weights from seed 7: nodes of different versions must begin alike
    "vector": (VECTOR, "8aabb005dc91cc4a2523a0b46fa0723f", 1241.204224, -13.120167),
    "matrix": (MATRIX, "08b9f125481fe6f8eb67c715d27a88de", 1353.550770, 15.579866),
    "control": (CONTROL, "680fd1ddb6166ed153143c62a4fd9530", 1241.098015, 14.363930),
    "frames": (FRAMES, "6049e4fc8536ec40fe30591719b1e5c5", 36317.223589, -10.537573),
    "picture": (PICTURE, "64d2dfc90ac60781aed62c62d6201e45", 36248.738751, -6.531666),
}


@pytest.mark.parametrize(("spec", "layout_hash", "absolute", "mixed"), GOLDEN.values(), ids=GOLDEN)
def test_default_networks_stay_as_they_were(spec, layout_hash, absolute, mixed):
    flat = FlatModule(ActorCritic(spec, NetworkConfig(), seed=7), torch.device("cpu"))
    assert flat.layout.hash == layout_hash
    weights = flat.numpy().astype(np.float64)
    assert np.abs(weights).sum() == pytest.approx(absolute, rel=1e-5)
    assert weights @ np.cos(np.arange(weights.size)) == pytest.approx(mixed, abs=1e-3)


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_follows_from_its_seed(name):
    one, two, other = (make_policy(name, seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_names_and_shapes_are_known_without_memory(name):
    without, real = make_policy(name, None), make_policy(name)
    assert all(parameter.is_meta for parameter in without.parameters())
    shapes = [{n: p.shape for n, p in policy.named_parameters()} for policy in (without, real)]
    assert shapes[0] == shapes[1]


@pytest.mark.parametrize("name", POLICIES)
def test_every_kind_acts_as_it_judges(name):
    """Actions chosen step by step are those that are likeliest when all steps are seen at once."""
    policy = make_policy(name).double()
    obs, context = make_inputs(name, rows=3)
    outputs = policy.outputs(obs, context)
    likeliest = outputs.distribution().mode()
    torch.testing.assert_close(policy.values(obs, context), outputs.values)
    log_probs, values = policy.evaluate(obs, likeliest, context)
    torch.testing.assert_close(log_probs, outputs.distribution().log_prob(likeliest))
    torch.testing.assert_close(values, outputs.values)
    if policy.core is None:
        assert policy.initial_state(3) is None
        torch.testing.assert_close(policy.act(obs), likeliest, rtol=1e-12, atol=1e-12)
        return
    assert context.starts_BT is not None
    assert context.state_BS is not None
    state_BS = context.state_BS.clone()
    with torch.no_grad():
        for t in range(obs.shape[1]):
            state_BS[context.starts_BT[:, t]] = 0.0
            actions = policy.act(obs[:, t], None, state_BS)
            torch.testing.assert_close(actions, likeliest[:, t], rtol=1e-12, atol=1e-12)


def test_a_memory_begins_empty():
    policy = make_policy("lstm")
    state_BS = policy.initial_state(3)
    assert state_BS is not None
    assert state_BS.shape == (3, 12)
    assert not state_BS.any()
    obs = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    noise = policy.noise((3,), torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.equal(policy.act(obs, noise), policy.act(obs, noise, state_BS))
    assert state_BS.any()
    torch.testing.assert_close(policy.values(obs[:, None]), policy.values(obs[:, None], RecurrentContext()))
