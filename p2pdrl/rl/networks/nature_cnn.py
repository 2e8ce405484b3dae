"""The convolutional network of DQN (Mnih 2015, Methods: model architecture).

Shape suffixes: B rows, X the observation's own dimensions, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from p2pdrl.errors import ConfigError
from p2pdrl.rl.networks.layers import RELU_GAIN, Convolution, Pixels, Trunk, in_pairs, mlp

__all__ = ["SMALLEST", "NatureCNN"]

SMALLEST = 36
"""Side of a picture in pixels that leaves the third convolution one pixel to give."""


def _last_side(side: int) -> int:
    """Side in pixels of what the third convolution gives for pictures of ``side``.

    Sending a tensor without data through the layers would have torch load its compiler, for a second.
    """
    for kernel, stride in ((8, 4), (4, 2), (3, 1)):
        side = (side - kernel) // stride + 1
    return side


class NatureCNN(Trunk):
    """Three convolutions and dense layers, relu between them.

    Args:
        hidden: widths of the dense layers behind the convolutions; the paper has one of 512.
        most: what the greatest value of a pixel is; see `Pixels`.

    Raises:
        ConfigError: the pictures are too small.
    """

    def __init__(self, obs_shape: tuple[int, ...], hidden: Sequence[int], most: float = 255.0) -> None:
        super().__init__()
        # on a CPU a gradient takes two thirds of the time of contiguous images, but acting a tenth more
        self.pixels = Pixels(obs_shape, most, memory_format=torch.channels_last, for_gradients=True)
        channels, height, width = self.pixels.shape
        if min(height, width) < SMALLEST:
            raise ConfigError(
                f"the Nature CNN wants pictures of 36 x 36 or more, got {height} x {width}; take minatar_cnn"
            )
        self.convolutions = nn.Sequential(
            Convolution(channels, 32, 8, RELU_GAIN, stride=4),
            nn.ReLU(),
            Convolution(32, 64, 4, RELU_GAIN, stride=2),
            nn.ReLU(),
            Convolution(64, 64, 3, RELU_GAIN),
            nn.ReLU(),
            nn.Flatten(),
        )
        flat = 64 * _last_side(height) * _last_side(width)
        self.dense = mlp((flat, *hidden), "relu")
        self.features = hidden[-1] if hidden else flat

    def layers(self) -> list[nn.Module]:
        """Return one module per convolution and per dense layer."""
        first, second, third, flatten = in_pairs(self.convolutions)
        return [
            nn.Sequential(self.pixels, first),
            second,
            nn.Sequential(third, flatten),
            *in_pairs(self.dense),
        ]

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF of pictures."""
        features: Tensor = self.dense(self.convolutions(self.pixels(obs_BX)))
        return features
