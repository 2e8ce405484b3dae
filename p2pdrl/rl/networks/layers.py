"""Layers that know how their weights begin, and what a trunk is: the part of a policy up to its features.

All networks are made of them. A layer is made on the meta device, without memory; ``initialise`` gives it
memory and draws its weights, so that a network's shape can be known, and a part of it built, where the
whole has no room. Weights come from the generator that is handed in: every node of a swarm begins
with the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from p2pdrl.rl.observations import channels_last

__all__ = [
    "RELU_GAIN",
    "Convolution",
    "Dense",
    "DenseTrunk",
    "Drawn",
    "Norm",
    "Pixels",
    "Trunk",
    "give_memory",
    "in_pairs",
    "initialise",
    "mlp",
]

RELU_GAIN = math.sqrt(2.0)
"""Keeps the variance through a relu (He 2015, arXiv 1502.01852)."""


class Drawn(Protocol):
    """A module with parameters of its own, apart from those of modules inside it."""

    def draw(self, generator: torch.Generator) -> None:
        """Set the own parameters to initial values; they have memory already."""


class Dense(nn.Linear):
    """A dense layer with orthogonal weights scaled by ``gain`` and zero bias (Saxe 2014, arXiv 1312.6120)."""

    def __init__(self, inputs: int, outputs: int, gain: float, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias=bias, device="meta")
        self._gain = gain

    def draw(self, generator: torch.Generator) -> None:
        """Set weight and bias."""
        _orthogonal(self, self._gain, generator)


class Convolution(nn.Conv2d):
    """A convolution with orthogonal weights scaled by ``gain`` and zero bias."""

    def __init__(
        self, inputs: int, outputs: int, kernel: int, gain: float, *, stride: int = 1, padding: int = 0
    ) -> None:
        super().__init__(inputs, outputs, kernel, stride=stride, padding=padding, device="meta")
        self._gain = gain

    def draw(self, generator: torch.Generator) -> None:
        """Set weight and bias."""
        _orthogonal(self, self._gain, generator)


class Norm(nn.LayerNorm):
    """Layer normalisation (Ba 2016, arXiv 1607.06450) over the last dimension: one and zero at first."""

    def __init__(self, width: int) -> None:
        super().__init__(width, device="meta")

    def draw(self, generator: torch.Generator) -> None:
        """Set weight and bias; draws nothing."""
        del generator
        self.reset_parameters()


class Pixels(nn.Module):
    """Brings pictures (bytes, truth values or numbers, channels first or last) to 0…1, the channels first.

    Args:
        obs_shape: CHW (frames stacked), or HWC when no dimension is smaller than the last.
        most: the greatest value of a pixel, which becomes 1.
        memory_format: order in memory of what comes out of bytes and truth values on a CPU, which decides how
            convolutions compute there; None leaves the order as it is.
        for_gradients: have that order only where gradients are computed.

    Attributes:
        shape: C, H, W of what comes out.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        most: float = 255.0,
        *,
        memory_format: torch.memory_format | None = None,
        for_gradients: bool = False,
    ) -> None:
        super().__init__()
        self._memory_format = memory_format
        self._for_gradients = for_gradients
        self._channels_last = channels_last(obs_shape)
        self._most = most
        first, second, third = obs_shape
        self.shape = (third, first, second) if self._channels_last else (first, second, third)

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return pixels in torch's default type; those that are floating already keep theirs."""
        pixels = obs_BX.permute(0, 3, 1, 2) if self._channels_last else obs_BX
        order = None if self._for_gradients and not torch.is_grad_enabled() else self._memory_format
        if order is not None and pixels.device.type == "cpu" and not pixels.is_floating_point():
            # one pass brings them into order and type, one in place scales them
            ordered = torch.empty(pixels.shape, dtype=torch.float32, memory_format=order).copy_(pixels)
            return ordered if self._most == 1.0 else ordered.div_(self._most)
        pixels = pixels if pixels.is_floating_point() else pixels.to(torch.float32)
        return pixels if self._most == 1.0 else pixels / self._most


def mlp(widths: Sequence[int], activation: str) -> nn.Sequential:
    """Return dense layers of the given widths, each followed by ``activation`` (``tanh`` or ``relu``)."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(Dense(inputs, outputs, RELU_GAIN))
        layers.append(nn.Tanh() if activation == "tanh" else nn.ReLU())
    return nn.Sequential(*layers)


def initialise(module: nn.Module, generator: torch.Generator) -> None:
    """Give memory and initial weights to a network made on the meta device.

    Each module with parameters of its own is ``Drawn``, in the order of ``module.modules()``.
    """
    for layer in module.modules():
        if next(layer.parameters(recurse=False), None) is None:
            continue
        give_memory(layer)
        cast("Drawn", layer).draw(generator)


def give_memory(layer: nn.Module) -> None:
    """Do what ``layer.to_empty`` does to one on the meta device; torch imports all of sympy for that."""
    for name, parameter in list(layer.named_parameters(recurse=False)):
        memory = torch.empty(parameter.shape, dtype=parameter.dtype)
        setattr(layer, name, nn.Parameter(memory, parameter.requires_grad))
    for name, buffer in list(layer.named_buffers(recurse=False)):
        setattr(layer, name, torch.empty(buffer.shape, dtype=buffer.dtype))


def _orthogonal(layer: nn.Linear | nn.Conv2d, gain: float, generator: torch.Generator) -> None:
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)


class Trunk(nn.Module):
    """The part of a policy from observations to F features: ``registry`` picks one, ``policy`` calls it."""

    features: int

    def layers(self) -> list[nn.Module]:
        """Return modules, each one tensor in, one out, that chained give ``forward``.

        Every parameter is in exactly one of them, and no more of them in one than belong together.
        """
        raise NotImplementedError

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF."""
        raise NotImplementedError


class DenseTrunk(Trunk):
    """Dense layers that policy and value function share: what a memory sits on for vectors.

    Args:
        hidden: widths; none passes the observations on.
        activation: ``tanh`` or ``relu``.
    """

    def __init__(self, obs_shape: tuple[int, ...], hidden: Sequence[int], activation: str) -> None:
        super().__init__()
        widths = (math.prod(obs_shape), *hidden)
        self.flatten = nn.Flatten()
        self.dense = mlp(widths, activation)
        self.features = widths[-1]

    def layers(self) -> list[nn.Module]:
        """Return one module per dense layer."""
        pairs = in_pairs(self.dense)
        return [nn.Sequential(self.flatten, *pairs[:1]), *pairs[1:]]

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF."""
        features: Tensor = self.dense(self.flatten(obs_BX))
        return features


def in_pairs(layers: nn.Sequential) -> list[nn.Module]:
    """Return each layer together with the non-linearity behind it."""
    members = list(layers)
    return [nn.Sequential(*members[i : i + 2]) for i in range(0, len(members), 2)]
