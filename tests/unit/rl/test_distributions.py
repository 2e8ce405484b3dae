"""Distributions against torch.distributions."""

from __future__ import annotations

import torch

from p2pdrl.rl.distributions import Categorical, DiagonalGaussian


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
