"""Generalized state-dependent exploration (gSDE; Raffin 2021, arXiv 2005.05719, section 4).

The noise of an action is a linear function of the policy's features φ(s), whose weights are drawn rarely:

    a = μ(s) + ε φ(s),  ε_ij ~ N(0, σ_ij²)

Between two draws the same state gets the same noise, and close states similar ones, so actions follow
each other smoothly. Seen at a single step an action is Gaussian, with the variance of equation 9:

    π_j(a_j | s) = N(μ_j(s), σ̂_j(s)²),  σ̂_j(s)² = Σ_i (σ_ij φ_i(s))²

Log-probabilities and entropies are those; σ is learned through them, the features are not (φ is taken as it
is). ``policy`` calls all of it.

Shape suffixes: … leading dimensions, T steps, B environments, F features, A action dimensions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["held_noise", "perturbation", "state_log_std"]

SMALLEST_VARIANCE = 1e-6
"""Added to σ̂²: features that are all zero would leave no deviation."""


def held_noise(
    shape: tuple[int, ...], features: int, actions: int, hold: int, generator: torch.Generator
) -> Tensor:
    """Return standard normal noise of shape (*shape, features, actions), held for some steps in a row.

    Args:
        shape: B, whose noise is all new, or T, B.
        hold: steps that share their noise, counted from the first; 0 for all, which then share one
            piece of memory.
    """

    def draw(*leading: int) -> Tensor:
        return torch.randn((*leading, features, actions), generator=generator, device=generator.device)

    if len(shape) == 1:
        return draw(*shape)
    steps = shape[0]
    if hold == 0 or hold >= steps:
        return draw(1, *shape[1:]).expand(steps, *(-1 for _ in (*shape[1:], features, actions)))
    return draw(math.ceil(steps / hold), *shape[1:]).repeat_interleave(hold, 0)[:steps]


def perturbation(features_BF: Tensor, log_std_FA: Tensor, noise_BFA: Tensor) -> Tensor:
    """Return ε φ(s), B x A, from standard normal noise."""
    return torch.einsum("bf,bfa->ba", features_BF, log_std_FA.exp() * noise_BFA)


def state_log_std(features: Tensor, log_std_FA: Tensor) -> Tensor:
    """Return log σ̂(s) of each row, …A, of features …F."""
    variance = features.detach().square() @ (2.0 * log_std_FA).exp()
    return 0.5 * (variance + SMALLEST_VARIANCE).log()
