"""Distributions against torch.distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import distributions as reference_of

from p2pdrl.rl.distributions import ActionMap, Categorical, DiagonalGaussian, TransformedGaussian


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_categorical_agrees_with_torch():
    logits = torch.randn(7, 5, generator=generator())
    actions = torch.arange(7) % 5
    reference = torch.distributions.Categorical(logits=logits)
    ours = Categorical(logits)
    torch.testing.assert_close(ours.log_prob(actions), reference.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), reference.entropy())
    torch.testing.assert_close(ours.mode(), logits.argmax(-1))


def test_categorical_samples_with_its_probabilities():
    probs = torch.tensor([0.1, 0.2, 0.7])
    draws = Categorical(probs.log().expand(50_000, 3)).sample(Categorical.noise((50_000,), 3, generator(1)))
    counts = torch.bincount(draws, minlength=3).double()
    chi_square = ((counts - 50_000 * probs) ** 2 / (50_000 * probs)).sum()
    assert chi_square < 13.8  # 2 degrees of freedom, p = 0.001


def test_gaussian_agrees_with_torch():
    mean, log_std = torch.randn(7, 3, generator=generator()), torch.tensor([-1.0, 0.0, 0.5])
    actions = torch.randn(7, 3, generator=generator(1))
    reference = torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)
    ours = DiagonalGaussian(mean, log_std)
    torch.testing.assert_close(ours.log_prob(actions), reference.log_prob(actions))
    torch.testing.assert_close(ours.entropy(), reference.entropy())
    assert ours.mode() is mean


def test_gaussian_samples_with_its_moments():
    ours = DiagonalGaussian(torch.tensor([[1.0, -2.0]]).expand(50_000, 2), torch.tensor([0.0, 1.0]))
    draws = ours.sample(DiagonalGaussian.noise((50_000,), 2, generator(2)))
    torch.testing.assert_close(draws.mean(0), torch.tensor([1.0, -2.0]), atol=0.05, rtol=0)
    torch.testing.assert_close(draws.std(0), torch.tensor([1.0, 2.718]), atol=0.05, rtol=0)


LOW, HIGH = np.array([-2.0, 0.0, -1.0], np.float32), np.array([2.0, 5.0, -0.5], np.float32)


def transformed(mean, log_std, squash, low=LOW, high=HIGH):
    """Ours, and torch's chain of transforms."""
    ours = TransformedGaussian(mean, log_std, ActionMap.between(low, high, squash=squash))
    centre, half = (torch.tensor(x.astype(np.float64)) / 2 for x in (high + low, high - low))
    chain = [reference_of.AffineTransform(centre, half)]
    if squash:
        chain.insert(0, reference_of.TanhTransform())
    normal = reference_of.Normal(mean, log_std.exp().expand(mean.shape))
    return ours, reference_of.Independent(reference_of.TransformedDistribution(normal, chain), 1)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize("per_row", [False, True])
def test_transformed_gaussian_agrees_with_torch(squash, per_row):
    def draw(seed):
        return torch.randn(50, 3, generator=generator(seed), dtype=torch.float64)

    mean, log_std = draw(0), 0.5 * draw(1) if per_row else torch.tensor([-1.0, 0.0, 0.5]).double()
    ours, reference = transformed(mean, log_std, squash)
    samples = ours.sample(draw(2))
    actions = torch.from_numpy(ours.action_map(samples.numpy()).astype(np.float64))
    sent = samples
    for transform in reference.base_dist.transforms:
        sent = transform(sent)
    torch.testing.assert_close(actions, sent, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(ours.log_prob(samples), reference.log_prob(sent), rtol=1e-6, atol=1e-6)
    assert torch.equal(ours.mode(), mean)


@pytest.mark.parametrize("size", [15.0, 60.0, 1e4])
def test_the_squashing_far_out_is_exact_and_finite(size):
    ours, _ = transformed(torch.zeros(1, 3), torch.zeros(3), squash=True)
    u = torch.full((1, 3), size).requires_grad_()
    # log(1 − tanh²u) = −2 log cosh u → 2 (log 2 − |u|), to less than e^−2|u|
    expected = 3 * 2.0 * (np.log(2.0) - size) + np.log([2.0, 2.5, 0.25]).sum()
    for sign in (1.0, -1.0):
        log_det = ours.action_map.log_det(sign * u)
        assert float(log_det.detach()) == pytest.approx(expected, rel=1e-6)
    log_det.backward()
    assert u.grad.tolist() == [[-2.0] * 3]
    actions = ours.action_map(np.array([[size] * 3, [-size] * 3], np.float32))
    assert (actions >= LOW).all()
    assert (actions <= HIGH).all()


def density(mean, log_std, squash):
    """Points between or around the bounds -1 … 3, and ours at them."""
    one = TransformedGaussian(
        torch.tensor([mean]).double(),
        torch.tensor([log_std]).double(),
        ActionMap.between(np.array([-1.0]), np.array([3.0]), squash=squash),
    )
    width = 2.0 if squash else 40.0
    edges = np.linspace(1.0 - width, 1.0 + width, 400_001)
    points = 0.5 * (edges[1:] + edges[:-1])
    u = (points - 1.0) / 2.0
    u = np.arctanh(u) if squash else u
    log_probs = one.log_prob(torch.from_numpy(u[:, None])).numpy()
    return edges[1] - edges[0], points, log_probs


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -1.0), (0.7, 0.0), (-1.5, -0.3)])
def test_densities_of_what_the_environment_gets_integrate_to_one(mean, log_std, squash):
    step, _, log_probs = density(mean, log_std, squash)
    assert np.exp(log_probs).sum() * step == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("squash", [False, True])
@pytest.mark.parametrize(("mean", "log_std"), [(0.0, -1.0), (0.7, -0.3)])
def test_entropies_and_their_gradients_are_those_of_the_integral_on_average(mean, log_std, squash):
    def integral(mean, log_std):
        step, _, log_probs = density(mean, log_std, squash)
        return -(np.exp(log_probs) * log_probs).sum() * step

    nodes, weights = np.polynomial.hermite_e.hermegauss(80)  # expectations over standard normal z
    parameters = [torch.tensor([x], dtype=torch.float64, requires_grad=True) for x in (mean, log_std)]
    ours = TransformedGaussian(
        parameters[0].expand(80, 1),
        parameters[1],
        ActionMap.between(np.array([-1.0]), np.array([3.0]), squash=squash),
    )
    taken = ours.sample(torch.from_numpy(nodes[:, None])).detach()
    entropy = (torch.from_numpy(weights / weights.sum()) * ours.entropy(taken)).sum()
    assert float(entropy.detach()) == pytest.approx(integral(mean, log_std), abs=1e-5)
    entropy.backward()
    h = 1e-3
    slopes = [
        (integral(mean + h, log_std) - integral(mean - h, log_std)) / (2 * h),
        (integral(mean, log_std + h) - integral(mean, log_std - h)) / (2 * h),
    ]
    found = [0.0 if x.grad is None else float(x.grad) for x in parameters]
    assert found == pytest.approx(slopes, abs=1e-4)
