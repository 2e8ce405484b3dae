"""The convolutional network of MinAtar (Young 2019, arXiv 1903.03176, section 4), for images of some 10 × 10.

A quarter of DQN's final layers: one convolution of 16 filters of 3 × 3 with stride 1, and a dense layer of
128 units.

Shape suffixes: B rows, X the observation's own dimensions, F features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from p2pdrl.errors import ConfigError
from p2pdrl.rl.networks.layers import RELU_GAIN, Convolution, Pixels, Trunk, in_pairs, mlp

__all__ = ["MinAtarCNN"]

FILTERS = 16
KERNEL = 3


class MinAtarCNN(Trunk):
    """One convolution and dense layers, relu between them.

    Args:
        hidden: widths of the dense layers behind the convolution; the paper has one of 128.
        most: what the greatest value of a pixel is; see `Pixels`.

    Raises:
        ConfigError: the pictures are too small.
    """

    def __init__(self, obs_shape: tuple[int, ...], hidden: Sequence[int], most: float = 255.0) -> None:
        super().__init__()
        # a single convolution is quicker without the way back from channels last
        self.pixels = Pixels(obs_shape, most, memory_format=torch.contiguous_format)
        channels, height, width = self.pixels.shape
        if min(height, width) < KERNEL:
            raise ConfigError(f"MinAtar's CNN wants pictures of 3 x 3 or more, got {height} x {width}")
        self.convolution = Convolution(channels, FILTERS, KERNEL, RELU_GAIN)
        self.flatten = nn.Sequential(nn.ReLU(), nn.Flatten())
        widths = (FILTERS * (height - KERNEL + 1) * (width - KERNEL + 1), *hidden)
        self.dense = mlp(widths, "relu")
        self.features = widths[-1]

    def layers(self) -> list[nn.Module]:
        """Return one module for the convolution and one per dense layer."""
        return [nn.Sequential(self.pixels, self.convolution, self.flatten), *in_pairs(self.dense)]

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF."""
        features: Tensor = self.dense(self.flatten(self.convolution(self.pixels(obs_BX))))
        return features
