"""Noisy networks: dense layers whose weights are random, by deviations that are learned (Fortunato 2018).

With factorised Gaussian noise (arXiv 1706.10295, section 3, equations 10 and 11) a layer of p inputs and q
outputs draws p + q numbers instead of p q + q:

    y = (μ + σ ⊙ ε) x + μ_b + σ_b ⊙ ε_b,   ε_{j,i} = f(ε_j) f(ε_i),   ε_b = f(ε_j),   f(x) = sgn(x) √|x|.

As ε is a product, the noisy part of y is f(ε_j) ⊙ (σ (f(ε_i) ⊙ x) + σ_b): rows of one batch may each have
noise of their own. ``q_network`` makes a network's dense layers noisy, and tells them their noise.

Shape suffixes: B rows, p inputs, q outputs, P noise of all layers of a network.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pdrl.rl.networks.layers import Dense

__all__ = ["NoisyDense", "factorised_noise", "make_noisy", "noise_size", "using_noise"]


class NoisyDense(nn.Linear):
    """A dense layer with noise in its weights.

    Initial values are those of section 3.2: μ uniform within ±1/√p, σ constant at σ_0/√p.

    Args:
        sigma: σ_0; the paper has 0.5.

    Attributes:
        noise: f(ε_i) and f(ε_j), each of one row for all or of as many as there are inputs; None leaves the
            mean weights.
    """

    noise: tuple[Tensor, Tensor] | None = None

    def __init__(self, inputs: int, outputs: int, sigma: float) -> None:
        super().__init__(inputs, outputs, device="meta")
        self._sigma = sigma
        self.weight_sigma = nn.Parameter(torch.empty(outputs, inputs, device="meta"))
        self.bias_sigma = nn.Parameter(torch.empty(outputs, device="meta"))

    def draw(self, generator: torch.Generator) -> None:
        """Set means and deviations."""
        bound = 1.0 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound, generator=generator)
        nn.init.uniform_(self.bias, -bound, bound, generator=generator)
        nn.init.constant_(self.weight_sigma, self._sigma * bound)
        nn.init.constant_(self.bias_sigma, self._sigma * bound)

    def forward(self, x: Tensor) -> Tensor:
        """Return y (Bq) of x (Bp)."""
        mean = functional.linear(x, self.weight, self.bias)
        if self.noise is None:
            return mean
        into, out = self.noise
        return torch.addcmul(mean, out, functional.linear(x * into, self.weight_sigma, self.bias_sigma))


def make_noisy(module: nn.Module, sigma: float) -> list[NoisyDense]:
    """Put noisy layers in place of all ``Dense`` ones inside a module; return them."""
    made = []
    for owner in list(module.modules()):
        for name, child in list(owner.named_children()):
            if isinstance(child, Dense):
                noisy = NoisyDense(child.in_features, child.out_features, sigma)
                setattr(owner, name, noisy)
                made.append(noisy)
    return made


def noise_size(layers: Sequence[NoisyDense]) -> int:
    """Return P."""
    return sum(layer.in_features + layer.out_features for layer in layers)


def factorised_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Return f(ε) of standard normal ε, on the generator's device."""
    noise = torch.randn(shape, generator=generator, device=generator.device)
    return noise.sign() * noise.abs().sqrt()


@contextmanager
def using_noise(layers: Sequence[NoisyDense], noise: Tensor | None) -> Iterator[None]:
    """Let layers compute with this noise, P or BP, from ``factorised_noise``; None is the mean weights."""
    if noise is not None:
        sizes = [size for layer in layers for size in (layer.in_features, layer.out_features)]
        parts = iter(torch.split(noise, sizes, -1))
        for layer in layers:
            layer.noise = (next(parts), next(parts))
    try:
        yield
    finally:
        for layer in layers:
            layer.noise = None
