"""A policy's outputs, and the action distributions that they stand for.

They replace ``torch.distributions``, whose argument checks cost more than the network of a small policy.
Randomness comes in as a tensor of noise, drawn for a whole unroll at once. ``PolicyOutputs`` has tensors
only, so that a pipeline can send them; the distribution is built where it is needed.

Shape suffixes: … leading dimensions (N rows, or B environments and T steps), N choices, A actions or their
dimensions.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Categorical", "DiagonalGaussian", "Distribution", "PolicyOutputs", "distribution"]

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


class Categorical:
    """One of N choices, with probabilities ``softmax(logits)``.

    Args:
        logits: unnormalised log-probabilities, …N.
    """

    __slots__ = ("logits",)

    def __init__(self, logits: Tensor) -> None:
        self.logits = logits

    @staticmethod
    def noise(shape: tuple[int, ...], choices: int, generator: torch.Generator) -> Tensor:
        """Return standard Gumbel noise of shape (*shape, choices): −log of exponential draws."""
        draws = torch.empty((*shape, choices), device=generator.device)
        return draws.exponential_(generator=generator).log_().neg_()

    def sample(self, noise: Tensor) -> Tensor:
        """Return choices (int64, …) by the Gumbel-max trick: argmax(logits + Gumbel noise)."""
        return (self.logits + noise).argmax(-1)

    def mode(self) -> Tensor:
        """Return the likeliest choices (int64, …)."""
        return self.logits.argmax(-1)

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log-probabilities of ``actions`` (int64, …)."""
        log_probs = torch.log_softmax(self.logits, -1)
        return log_probs.gather(-1, actions.unsqueeze(-1)).squeeze(-1)

    def entropy(self) -> Tensor:
        """Return the entropies, in nats, …."""
        log_probs = torch.log_softmax(self.logits, -1)
        return -(log_probs.exp() * log_probs).sum(-1)


class DiagonalGaussian:
    """A normal distribution per action dimension, independent of each other.

    Args:
        mean: …A.
        log_std: A; the same in every state.
    """

    __slots__ = ("log_std", "mean")

    def __init__(self, mean: Tensor, log_std: Tensor) -> None:
        self.mean = mean
        self.log_std = log_std

    @staticmethod
    def noise(shape: tuple[int, ...], dim: int, generator: torch.Generator) -> Tensor:
        """Return standard normal noise of shape (*shape, dim)."""
        return torch.randn((*shape, dim), generator=generator, device=generator.device)

    def sample(self, noise: Tensor) -> Tensor:
        """Return actions …A, not clipped: clipping belongs to the environment, or log_prob would lie."""
        return self.mean + self.log_std.exp() * noise

    def mode(self) -> Tensor:
        """Return the likeliest actions, …A."""
        return self.mean

    def log_prob(self, actions: Tensor) -> Tensor:
        """Return log-densities of ``actions`` …A, summed over A."""
        z = (actions - self.mean) * torch.exp(-self.log_std)
        return (-0.5 * z * z - self.log_std - LOG_SQRT_2PI).sum(-1)

    def entropy(self) -> Tensor:
        """Return the entropies, in nats, …."""
        return (self.log_std + (0.5 + LOG_SQRT_2PI)).sum(-1).expand(self.mean.shape[:-1])


Distribution = Categorical | DiagonalGaussian


class PolicyOutputs(NamedTuple):
    """The heads' outputs, each row of them for one observation."""

    policy: Tensor
    """…A: logits of discrete actions, or means of continuous ones."""
    values: Tensor
    """…: v(s)."""
    log_std: Tensor | None = None
    """A: a parameter, the same for every row; None where actions are discrete."""

    def distribution(self) -> Distribution:
        """Return π(·|s) of each row."""
        return distribution(self.policy, self.log_std)


def distribution(policy: Tensor, log_std: Tensor | None) -> Distribution:
    """Return what a policy head's outputs stand for; see ``PolicyOutputs``."""
    return Categorical(policy) if log_std is None else DiagonalGaussian(policy, log_std)
