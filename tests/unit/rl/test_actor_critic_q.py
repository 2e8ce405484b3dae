"""Actors with critics: bounds, noise, shapes, what gradients reach."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from p2pdrl.config.task import DDPGConfig, NetworkConfig, SACConfig, TD3Config
from p2pdrl.errors import ConfigError
from p2pdrl.rl.actor_critic_q import (
    CategoricalActorCritic,
    DeterministicActorCritic,
    SquashedGaussianActorCritic,
    beside,
)
from p2pdrl.rl.envs import Continuous, Discrete, EnvSpec

LOW, HIGH = np.array([-2.0, 0.0], np.float32), np.array([2.0, 10.0], np.float32)
BOX = EnvSpec((3,), "float32", Continuous(2, LOW, HIGH))
CHOICES = EnvSpec((3,), "float32", Discrete(4))
PICTURES = EnvSpec((36, 36, 1), "uint8", Continuous(2, LOW, HIGH))
GRIDS = EnvSpec((36, 36, 1), "uint8", Discrete(4))
SMALL = NetworkConfig(hidden=(8, 8))
Single = partial(DeterministicActorCritic, critics=1)
Twin = partial(DeterministicActorCritic, critics=2)
SDE = NetworkConfig(hidden=(8,), exploration_noise="sde", log_std_init=-1.0, sde_sample_freq=2)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def observations(spec: EnvSpec, rows: int) -> torch.Tensor:
    if spec.obs_dtype == "uint8":
        return torch.randint(0, 256, (rows, *spec.obs_shape), dtype=torch.uint8, generator=generator())
    return torch.randn((rows, *spec.obs_shape), generator=generator())


@pytest.mark.parametrize("make", [Single, Twin, SquashedGaussianActorCritic])
@pytest.mark.parametrize("network", [SMALL, SDE])
def test_actions_lie_between_minus_one_and_one_and_reach_the_bounds(make, network):
    if network is SDE and make is not SquashedGaussianActorCritic:
        pytest.skip("deterministic policies have noise of their own")
    policy = make(BOX, network, 1)
    obs = observations(BOX, 500)
    noise = policy.noise((500,), generator())
    for exploration in (0.0, 1.0):
        policy.exploration = exploration
        for actions in (policy.act(obs), policy.act(obs, noise)):
            assert actions.shape == (500, 2)
            assert actions.dtype == torch.float32
            assert float(actions.detach().abs().max()) <= 1.0
    ends = policy.to_environment(np.array([[-1.0, -1.0], [1.0, 1.0], [0.0, 0.5]], np.float32))
    np.testing.assert_allclose(ends, [[-2, 0], [2, 10], [0, 7.5]])
    assert ends.dtype == np.float32


@pytest.mark.parametrize("make", [Single, SquashedGaussianActorCritic])
def test_while_it_explores_actions_are_uniform_whatever_the_state(make):
    policy = make(BOX, SMALL, 1)
    policy.exploration = 1.0
    noise = policy.noise((20_000,), generator())
    actions = policy.act(observations(BOX, 20_000), noise)
    assert (actions == policy.act(torch.zeros(20_000, 3), noise)).all()
    np.testing.assert_allclose(np.quantile(actions, [0.1, 0.5, 0.9]), [-0.8, 0, 0.8], atol=0.02)


def test_discrete_actions_are_uniform_while_it_explores_then_drawn_from_the_policy():
    policy = CategoricalActorCritic(CHOICES, SMALL, 1)
    with torch.no_grad():
        policy.actor[1].bias.copy_(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    obs = torch.zeros(40_000, 3)
    noise = policy.noise((40_000,), generator())
    probs = policy.log_probs(obs[:1]).exp()[0].detach()
    np.testing.assert_allclose(torch.bincount(policy.act(obs, noise)) / 40_000, probs, atol=0.01)
    assert (policy.act(obs) == 3).all()
    policy.exploration = 1.0
    np.testing.assert_allclose(torch.bincount(policy.act(obs, noise)) / 40_000, 0.25, atol=0.01)


def test_gaussian_noise_has_its_deviation_and_is_new_at_each_step():
    policy = Twin(BOX, SMALL, 1)
    policy.configure(TD3Config(noise_std=0.3))
    noise = policy.noise((2000, 4), generator())[..., 0, :].numpy()
    assert noise.std() == pytest.approx(0.3, rel=0.03)
    assert abs(np.mean(noise[1:] * noise[:-1])) < 0.003
    obs = torch.zeros(4, 3)
    acted = policy.act(obs, policy.noise((4,), generator(1))) - policy.act(obs)
    expected = policy.noise((4,), generator(1))[..., 0, :]
    np.testing.assert_allclose(acted.detach(), expected, atol=1e-6)


def test_ornstein_uhlenbeck_noise_is_one_process_across_unrolls():
    policy = Single(BOX, SMALL, 1)
    policy.configure(DDPGConfig(noise_std=0.2, noise_theta=0.15))
    source = generator()
    unrolls = [policy.noise((7, 16), source)[..., 0, :].numpy() for _ in range(600)]
    whole = np.concatenate(unrolls)
    deviation = 0.2 / np.sqrt(1 - 0.85**2)
    assert whole.std() == pytest.approx(deviation, rel=0.04)
    for lag in (1, 5):
        found = np.mean(whole[lag:] * whole[:-lag]) / np.mean(whole**2)
        assert found == pytest.approx(0.85**lag, abs=0.03)
    steps = whole[1:] - 0.85 * whole[:-1]  # also from one unroll to the next
    assert steps[6::7].std() == pytest.approx(0.2, rel=0.03)
    assert policy.noise((5000,), source)[..., 0, :].std() == pytest.approx(deviation, rel=0.05)
    assert policy.noise((7, 3), source).shape == (7, 3, 2, 2)  # of fewer environments, begun anew


def test_state_dependent_noise_is_held_and_has_the_deviation_that_is_learned():
    policy = SquashedGaussianActorCritic(BOX, SDE, 1)
    noise = policy.noise((4, 5), generator())
    assert noise.shape == (4, 5, 9, 2)
    assert (noise[0, :, :-1] == noise[1, :, :-1]).all()
    assert (noise[1, :, :-1] != noise[2, :, :-1]).any()
    assert (noise[0, :, -1] != noise[1, :, -1]).any()  # uniform actions are new at each step
    obs = observations(BOX, 1).expand(50_000, 3)
    actions = policy.act(obs, policy.noise((50_000,), generator()))
    mean, log_std = policy.outputs(obs[:1])
    found = torch.atanh(actions)
    np.testing.assert_allclose(found.std(0).detach(), log_std.exp()[0].detach(), rtol=0.02)
    np.testing.assert_allclose(found.mean(0).detach(), mean[0].detach(), atol=0.02)


def test_samples_have_the_density_that_is_said_of_them():
    """∫ π(a|s) da = 1, and E_π 1 / (π(a|s) · 2^A) = 1: the volume of all actions."""
    one = EnvSpec((3,), "float32", Continuous(1, LOW[:1], HIGH[:1]))
    policy = SquashedGaussianActorCritic(one, SMALL, 3)
    obs = observations(one, 1)
    mean, log_std = (part[0, 0].detach() for part in policy.outputs(obs))
    grid = torch.linspace(-0.99999, 0.99999, 200_001, dtype=torch.float64)
    z = (torch.atanh(grid) - mean) / log_std.exp()
    _, log_probs = policy.sample(obs.expand(len(grid), 3), z.float().unsqueeze(-1))
    assert float(torch.trapezoid(log_probs.detach().double().exp(), grid)) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.parametrize("seed", [1, None])
@pytest.mark.parametrize("spec", [BOX, PICTURES])
@pytest.mark.parametrize("make", [Single, Twin, SquashedGaussianActorCritic])
@pytest.mark.parametrize("kind", ["auto", "transformer"])
def test_any_trunk_serves(make, spec, kind, seed):
    network = NetworkConfig(kind=kind, hidden=(8,), width=8, heads=2, layers=1)
    policy = make(spec, network, seed)
    policy.configure(SACConfig())
    if seed is None:
        assert all(value.is_meta for value in policy.parameters())
        return
    obs = observations(spec, 5)
    actions = policy.act(obs)
    critics = 1 if make is Single else 2
    values = policy.q_values(beside(obs, actions))
    assert values.shape == (critics, 5)
    if critics == 2:
        assert (values[0] != values[1]).all()
    assert policy.q_values(beside(obs, actions), members=1).shape == (1, 5)
    np.testing.assert_allclose(policy.q_values(beside(obs, actions), 1).detach()[0], values[0].detach())
    other = policy.q_values(beside(obs, -torch.ones_like(actions)))
    assert (other != values).all()  # the action matters
    assert not policy.values(obs).any()


@pytest.mark.parametrize("spec", [CHOICES, GRIDS])
def test_any_trunk_serves_discrete_actions(spec):
    policy = CategoricalActorCritic(spec, NetworkConfig(hidden=(8,)), 1)
    obs = observations(spec, 5)
    assert policy.q_values(obs).shape == (2, 5, 4)
    np.testing.assert_allclose(policy.outputs(obs).exp().sum(-1).detach(), 1.0, rtol=1e-6)
    assert policy.act(obs).shape == (5,)


@pytest.mark.parametrize("make", [Single, SquashedGaussianActorCritic])
def test_the_actors_gradient_goes_through_the_critics_and_leaves_them_alone(make):
    policy = make(BOX, SMALL, 1)
    obs = observations(BOX, 4)
    if make is Single:
        policy.q_of_own_actions(obs).sum().backward()
    else:
        policy.q_of_own_actions(beside(obs, torch.zeros(4, 2)))[0].sum().backward()
    reached = {name.partition(".")[0] for name, value in policy.named_parameters() if value.grad is not None}
    assert reached == ({"actor"} if make is Single else {"actor_trunk", "actor_head"})
    assert all(value.requires_grad for value in policy.parameters())


@pytest.mark.parametrize("make", [Single, Twin, SquashedGaussianActorCritic])
def test_the_same_seed_gives_the_same_weights(make):
    one, same, other = (
        torch.cat([value.detach().reshape(-1) for value in make(BOX, SMALL, seed).parameters()])
        for seed in (1, 1, 2)
    )
    assert (one == same).all()
    assert (one != other).any()


def test_what_doesnt_fit_is_refused_with_what_to_do():
    unbounded = EnvSpec((3,), "float32", Continuous(1, np.array([-np.inf]), np.array([np.inf])))
    for make in (Single, Twin, SquashedGaussianActorCritic):
        with pytest.raises(ConfigError, match="one of 4; take sac_discrete, dqn or ppo"):
            make(CHOICES, SMALL, 1)
        with pytest.raises(ConfigError, match="action 0 goes from -inf to inf; take ppo"):
            make(unbounded, SMALL, 1)
        with pytest.raises(ConfigError, match="no past"):
            make(BOX, NetworkConfig(core="lstm"), 1)
    with pytest.raises(ConfigError, match="2 numbers; take sac"):
        CategoricalActorCritic(BOX, SMALL, 1)
