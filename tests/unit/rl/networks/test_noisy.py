"""Noisy layers: their arithmetic, their mean and variance, how they act, what is independent of what."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pdrl.config.loader import resolve
from p2pdrl.config.task import NetworkConfig
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.networks.layers import initialise
from p2pdrl.rl.networks.noisy import NoisyDense, factorised_noise, noise_size, using_noise
from p2pdrl.rl.q_network import QNetwork
from p2pdrl.rl.registry import build_trainer

SPEC = EnvSpec((3,), "float32", Discrete(4))


def layer(inputs: int = 5, outputs: int = 3, sigma: float = 0.5) -> NoisyDense:
    made = NoisyDense(inputs, outputs, sigma)
    initialise(made, torch.Generator().manual_seed(1))
    with torch.no_grad():  # deviations that differ, as after some learning
        made.weight_sigma.mul_(torch.linspace(0.5, 2.0, inputs))
        made.bias_sigma.mul_(torch.linspace(0.5, 2.0, outputs))
    return made


def test_initial_values_are_the_papers():
    made = NoisyDense(16, 400, 0.4)
    initialise(made, torch.Generator().manual_seed(0))
    assert made.weight_sigma.unique().tolist() == pytest.approx([0.1])
    assert made.bias_sigma.unique().tolist() == pytest.approx([0.1])
    for means in (made.weight, made.bias):
        means = means.detach()
        assert 0.24 < float(means.abs().max()) <= 0.25
        assert float(means.mean()) == pytest.approx(0.0, abs=0.03)
        assert float(means.var()) == pytest.approx(0.25**2 / 3, rel=0.1)


def test_a_layer_is_a_linear_map_with_noisy_weights():
    made = layer()
    noise = factorised_noise((8,), torch.Generator().manual_seed(2))
    into, out = noise[:5], noise[5:]
    x = torch.randn(7, 5, generator=torch.Generator().manual_seed(3))
    with using_noise([made], noise):
        found = made(x)
    weight = made.weight + made.weight_sigma * torch.outer(out, into)
    torch.testing.assert_close(found, x @ weight.T + made.bias + made.bias_sigma * out)
    torch.testing.assert_close(made(x), x @ made.weight.T + made.bias)  # afterwards it is the mean again


def test_mean_and_variance_are_those_of_the_formula():
    made = layer()
    x = torch.tensor([0.5, -1.0, 2.0, 0.3, -0.7])
    draws = 200_000
    noise = factorised_noise((draws, noise_size([made])), torch.Generator().manual_seed(4))
    with torch.no_grad(), using_noise([made], noise):
        y = made(x.expand(draws, 5)).double()
    # E f(ε) = 0 and E f(ε)² = E|ε| = √(2/π); all factors are independent
    square = math.sqrt(2 / math.pi)
    inner = square * (made.weight_sigma.double() * x).square().sum(1) + made.bias_sigma.double().square()
    variance = (square * inner).detach().numpy()
    mean = (made.weight.double() @ x.double() + made.bias.double()).detach().numpy()
    np.testing.assert_allclose(y.var(0).numpy(), variance, rtol=0.03)
    np.testing.assert_allclose(y.mean(0).numpy(), mean, atol=4 * np.sqrt(variance.max() / draws))


@pytest.mark.parametrize("dueling", [False, True])
def test_environments_act_each_under_noise_of_their_own(dueling):
    policy = QNetwork(SPEC, NetworkConfig(hidden=(8,), noisy=True, dueling=dueling), seed=1)
    assert any("sigma" in name for name, _ in policy.named_parameters())
    generator = torch.Generator().manual_seed(0)
    obs = torch.randn(1, 3, generator=generator).expand(500, 3)
    noise = policy.noise((2, 500), generator)
    acted = policy.act(obs, noise[0])
    assert len(acted.unique()) > 1
    assert (acted != policy.act(obs, noise[1])).any()
    for row in (0, 17):
        assert policy.act(obs[:1], noise[0, row]) == acted[row]
    policy.exploration = 1.0  # without effect
    assert (policy.act(obs, noise[0]) == acted).all()
    assert len(policy.act(obs).unique()) == 1
    policy.draw_weight_noise(generator)
    assert len(policy.act(obs).unique()) == 1  # what is drawn for learning isn't used to act
    assert (policy.outputs(obs) != policy(obs)).any()


def trainer(seed: int, **settings):
    sets = {
        "algorithm.name": "dqn",
        "algorithm.learning_starts": 16,
        "algorithm.gradient_steps": 2,
        "network.hidden": [8],
        "network.noisy": True,
        **settings,
    }
    task = resolve(sets=[f"task.{key}={value}".replace("'", '"') for key, value in sets.items()]).config.task
    return build_trainer(task, seed, "cpu")


def test_learning_is_the_same_under_the_same_seed():
    first, second, third = trainer(1), trainer(1), trainer(2)
    for _ in range(5):
        metrics = [made.step().metrics for made in (first, second)]
        assert metrics[0] == metrics[1]
        third.step()
    assert metrics[0]["exploration"] == 0.0
    assert (first.flat == second.flat).all()
    assert (first.flat != third.flat).any()
    for made in (first, second, third):
        made.close()


def test_gradients_targets_and_choices_have_noise_of_their_own(monkeypatch):
    made = trainer(1)
    seen = []
    forward = QNetwork.forward

    def noting(self, obs, noise=None):
        seen.append((self, None if noise is None else noise.clone(), len(obs)))
        return forward(self, obs, noise)

    for _ in range(2):
        made.step()
    monkeypatch.setattr(QNetwork, "forward", noting)
    made.algorithm.update(made.source.next())
    learning = [(network, noise) for network, noise, rows in seen if rows == 64]
    made.close()
    assert len(learning) == 6  # two gradients: target, choice, gradient
    noises = [noise for _, noise in learning]
    assert all(not torch.equal(one, other) for i, one in enumerate(noises) for other in noises[:i])
    online = made.policy
    assert [network is online for network, _ in learning] == [False, True, True] * 2


def test_deviations_are_learned():
    made = trainer(1)
    before = {name: p.detach().clone() for name, p in made.policy.named_parameters()}
    for _ in range(5):
        made.step()
    moved = {name for name, p in made.policy.named_parameters() if not torch.equal(p, before[name])}
    made.close()
    assert {"trunk.dense.0.weight_sigma", "advantage_head.weight_sigma", "advantage_head.bias_sigma"} <= moved
