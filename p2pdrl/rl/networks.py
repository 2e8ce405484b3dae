"""Networks: from observations to features, with orthogonal initialisation.

``policy`` builds them. Weights come from the generator that is handed in, so that every node of a swarm
begins with the same ones.

Shape suffixes: B batch, X the observation's own dimensions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.envs import EnvSpec

__all__ = ["NatureCNN", "linear", "mlp", "resolve_kind"]

Layer = TypeVar("Layer", nn.Linear, nn.Conv2d)


def resolve_kind(config: NetworkConfig, spec: EnvSpec) -> str:
    """Return ``mlp`` or ``nature_cnn``: what ``auto`` stands for in this environment.

    Raises:
        ConfigError: a CNN was asked for observations that aren't images.
    """
    if config.kind == "nature_cnn" and not spec.is_image:
        raise ConfigError(
            f"network.kind = 'nature_cnn' wants images (3 dimensions of uint8), "
            f"observations are {spec.obs_shape} of {spec.obs_dtype}; use 'mlp' or 'auto'"
        )
    if config.kind == "auto":
        return "nature_cnn" if spec.is_image else "mlp"
    return config.kind


def linear(inputs: int, outputs: int, gain: float, generator: torch.Generator) -> nn.Linear:
    """Return a dense layer with orthogonal weights scaled by ``gain`` and zero bias (Saxe 2014)."""
    return _initialise(nn.Linear(inputs, outputs, device="meta"), gain, generator)


def mlp(widths: Sequence[int], activation: str, generator: torch.Generator) -> nn.Sequential:
    """Return dense layers of the given widths, each followed by ``activation`` (``tanh`` or ``relu``)."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers.append(linear(inputs, outputs, math.sqrt(2.0), generator))
        layers.append(nn.Tanh() if activation == "tanh" else nn.ReLU())
    return nn.Sequential(*layers)


class NatureCNN(nn.Module):
    """The convolutional network of DQN (Mnih 2015, Methods: model architecture).

    Args:
        obs_shape: CHW (frames stacked), or HWC when the last dimension is the small one.
        hidden: widths of the dense layers behind the convolutions; the paper has one of 512.
        generator: source of the initial weights.
    """

    def __init__(self, obs_shape: tuple[int, ...], hidden: Sequence[int], generator: torch.Generator) -> None:
        super().__init__()
        self._channels_last = obs_shape[-1] < min(obs_shape[:2])
        channels = obs_shape[-1] if self._channels_last else obs_shape[0]
        height, width = obs_shape[:2] if self._channels_last else obs_shape[1:]
        if min(height, width) < 36:
            raise ConfigError(f"the Nature CNN wants pictures of 36 x 36 or more, got {height} x {width}")
        gain = math.sqrt(2.0)
        self.convolutions = nn.Sequential(
            _initialise(nn.Conv2d(channels, 32, 8, stride=4, device="meta"), gain, generator),
            nn.ReLU(),
            _initialise(nn.Conv2d(32, 64, 4, stride=2, device="meta"), gain, generator),
            nn.ReLU(),
            _initialise(nn.Conv2d(64, 64, 3, stride=1, device="meta"), gain, generator),
            nn.ReLU(),
            nn.Flatten(),
        )
        with torch.no_grad():
            flat = self.convolutions(torch.zeros(1, channels, height, width)).shape[1]
        self.dense = mlp((flat, *hidden), "relu", generator)

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF of pictures (uint8 0…255)."""
        pixels = obs_BX.permute(0, 3, 1, 2) if self._channels_last else obs_BX
        features: Tensor = self.dense(self.convolutions(pixels.to(torch.float32) / 255.0))
        return features


def _initialise(layer: Layer, gain: float, generator: torch.Generator) -> Layer:
    """Give memory and weights to a layer made on the meta device, which draws nothing by itself."""
    layer.to_empty(device="cpu")
    nn.init.orthogonal_(layer.weight, gain, generator=generator)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer
