"""The deep residual network of IMPALA (Espeholt 2018, arXiv 1802.01561, Figure 3, right).

Sections of one convolution, a pooling that halves the picture, and two residual blocks; then a dense layer.

Shape suffixes: B rows, X the observation's own dimensions, C channels, H and W pixels, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from p2pdrl.rl.networks.layers import RELU_GAIN, Convolution, Pixels, Trunk, in_pairs, mlp

__all__ = ["ImpalaResNet"]

RESIDUAL_BLOCKS = 2
"""In each section."""


class Residual(nn.Module):
    """x + conv(relu(conv(relu(x)))), both 3 × 3.

    Args:
        gain: of the second convolution: scales what the block adds at first.
    """

    def __init__(self, channels: int, gain: float) -> None:
        super().__init__()
        self.first = Convolution(channels, channels, 3, RELU_GAIN, padding=1)
        self.second = Convolution(channels, channels, 3, gain, padding=1)

    def forward(self, x_BCHW: Tensor) -> Tensor:
        """Return a picture of the same shape."""
        added: Tensor = self.second(torch.relu(self.first(torch.relu(x_BCHW))))
        return x_BCHW + added


class ImpalaResNet(Trunk):
    """Fifteen convolutions in three sections, and a dense layer.

    Args:
        channels: of each section; the paper has 16, 32, 32.
        hidden: widths of the dense layers; the paper has one of 256.
        most: what the greatest value of a pixel is; see `Pixels`.
    """

    def __init__(
        self, obs_shape: tuple[int, ...], channels: Sequence[int], hidden: Sequence[int], most: float = 255.0
    ) -> None:
        super().__init__()
        # two thirds of the time of contiguous images for a gradient on a CPU
        self.pixels = Pixels(obs_shape, most, memory_format=torch.channels_last)
        inputs, height, width = self.pixels.shape
        # what the branches add together stays of the size of what they are added to
        gain = 1.0 / math.sqrt(RESIDUAL_BLOCKS * len(channels))
        sections: list[nn.Module] = []
        for outputs in channels:
            # pad where TensorFlow's SAME does, so that 84 x 84 becomes 42, 21, 11
            pool = nn.MaxPool2d(3, stride=2, padding=1)
            sections.append(nn.Sequential(Convolution(inputs, outputs, 3, RELU_GAIN, padding=1), pool))
            sections.extend(Residual(outputs, gain) for _ in range(RESIDUAL_BLOCKS))
            inputs, height, width = outputs, (height + 1) // 2, (width + 1) // 2
        self.sections = nn.Sequential(*sections)
        self.flatten = nn.Sequential(nn.ReLU(), nn.Flatten())
        widths = (inputs * height * width, *hidden)
        self.dense = mlp(widths, "relu")
        self.features = widths[-1]

    def layers(self) -> list[nn.Module]:
        """Return one module per section's head, residual block and dense layer."""
        first, *middle, last = self.sections
        return [
            nn.Sequential(self.pixels, first),
            *middle,
            nn.Sequential(last, self.flatten),
            *in_pairs(self.dense),
        ]

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF of pictures."""
        features: Tensor = self.dense(self.flatten(self.sections(self.pixels(obs_BX))))
        return features
