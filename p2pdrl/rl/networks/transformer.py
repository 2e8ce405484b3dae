"""A small transformer (Vaswani 2017, arXiv 1706.03762) over the parts of one observation.

Nothing is remembered from step to step: the tokens are parts of a single observation. A vector is cut into
groups of neighbouring features, each with a projection of its own (as the FT-Transformer does with groups of
one: Gorishniy 2021, arXiv 2106.11959), since feature 3 may be an angle and feature 4 a speed. A picture is
cut into square patches, which share one projection and are told apart by learned positions (ViT: Dosovitskiy
2021, arXiv 2010.11929). The layers normalise first (pre-LN: Xiong 2020, arXiv 2002.04745), which needs no
warm-up of the learning rate; the mean over the tokens gives the features. There is no dropout: computing
log-probabilities again must give the same ones.

Shape suffixes: B rows, X the observation's own dimensions, L tokens, P numbers of one token, W width,
H heads, F features.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from p2pdrl.errors import ConfigError
from p2pdrl.rl.networks.layers import RELU_GAIN, Dense, Norm, Pixels, Trunk

__all__ = ["Transformer"]

EXPANSION = 4
"""Width of the feed-forward layers, in widths."""
MOST_VECTOR_TOKENS = 32
"""Tokens that a vector is cut into at most where nobody says how."""
LARGEST_PATCH = 16
"""Side of a patch, in pixels, where nobody says; ViT's. Pictures it doesn't divide get smaller ones."""
SMALLEST_PATCH = 4


class Groups(nn.Module):
    """Cuts vectors into tokens of ``size`` features; the last is filled up with zeros.

    Args:
        size: P.
    """

    def __init__(self, features: int, size: int, width: int) -> None:
        super().__init__()
        tokens = math.ceil(features / size)
        self._size = size
        self._filling = tokens * size - features
        self.weight = nn.Parameter(torch.empty(tokens, size, width, device="meta"))
        self.bias = nn.Parameter(torch.empty(tokens, width, device="meta"))

    def draw(self, generator: torch.Generator) -> None:
        """Set weights and biases; the biases tell tokens apart while their features are zero."""
        nn.init.normal_(self.weight, std=1.0 / math.sqrt(self._size), generator=generator)
        nn.init.normal_(self.bias, std=0.5, generator=generator)

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return tokens_BLW."""
        filled = functional.pad(obs_BX.flatten(1), (0, self._filling))
        groups_BLP = filled.reshape(filled.shape[0], -1, self._size)
        return torch.einsum("blp,lpw->blw", groups_BLP, self.weight) + self.bias


class Patches(nn.Module):
    """Cuts pictures into square patches of ``side`` pixels, row by row.

    Args:
        shape: C, H, W of the pixels; the side divides both H and W.
    """

    def __init__(self, shape: tuple[int, int, int], side: int, width: int) -> None:
        super().__init__()
        channels, height, breadth = shape
        self._side = side
        self.project = Dense(channels * side * side, width, 1.0)
        self.positions = nn.Parameter(torch.empty((height // side) * (breadth // side), width, device="meta"))

    def draw(self, generator: torch.Generator) -> None:
        """Set the positions."""
        nn.init.normal_(self.positions, std=0.5, generator=generator)

    def forward(self, pixels: Tensor) -> Tensor:
        """Return tokens_BLW."""
        patches_BPL = functional.unfold(pixels, self._side, stride=self._side)
        tokens: Tensor = self.project(patches_BPL.transpose(1, 2))
        return tokens + self.positions


class Attention(nn.Module):
    """x + attention of every token to every token, on normalised x.

    Args:
        heads: H; divides W.
        gain: of the last projection: scales what the layer adds at first.
    """

    def __init__(self, width: int, heads: int, gain: float) -> None:
        super().__init__()
        self._heads = heads
        self.norm = Norm(width)
        self.inputs = Dense(width, 3 * width, 1.0)
        self.outputs = Dense(width, width, gain)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        # 3 (queries, keys, values) x B x H x L x W/H
        parts = self.inputs(self.norm(x_BLW)).unflatten(-1, (3, self._heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(*parts.unbind())
        added: Tensor = self.outputs(mixed.transpose(1, 2).flatten(2))
        return x_BLW + added


class FeedForward(nn.Module):
    """x + two dense layers with a gelu between them, on normalised x.

    Args:
        gain: of the second layer: scales what it adds at first.
    """

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.widen = Dense(width, EXPANSION * width, RELU_GAIN)
        self.narrow = Dense(EXPANSION * width, width, gain)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """Return tokens of the same shape."""
        added: Tensor = self.narrow(functional.gelu(self.widen(self.norm(x_BLW))))
        return x_BLW + added


class Pool(nn.Module):
    """The mean over the normalised tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)

    def forward(self, x_BLW: Tensor) -> Tensor:
        """Return features_BF; F is W."""
        normalised: Tensor = self.norm(x_BLW)
        return normalised.mean(1)


class Transformer(Trunk):
    """Tokens, then pairs of attention and feed-forward layers, then their mean.

    Args:
        obs_shape: of a vector (any shape) or a picture (CHW, or HWC when the last is the small one).
        is_image: which of the two.
        patch: features of one token, or the side of a patch in pixels; 0 chooses.
        most: what the greatest value of a pixel is; see `Pixels`.

    Raises:
        ConfigError: heads don't divide the width, or patches the picture.
    """

    def __init__(
        self,
        obs_shape: tuple[int, ...],
        *,
        is_image: bool,
        layers: int,
        heads: int,
        width: int,
        patch: int,
        most: float = 255.0,
    ) -> None:
        super().__init__()
        if width % heads:
            raise ConfigError(f"a transformer's width ({width}) must be a multiple of its heads ({heads})")
        self.tokens: nn.Module
        if is_image:
            pixels = Pixels(obs_shape, most)
            side = _side(pixels.shape, patch)
            self.tokens = nn.Sequential(pixels, Patches(pixels.shape, side, width))
        else:
            features = math.prod(obs_shape)
            self.tokens = Groups(features, patch or math.ceil(features / MOST_VECTOR_TOKENS), width)
        # GPT-2's rule: what the 2 x layers branches add together stays of the size of a token
        gain = 1.0 / math.sqrt(2 * layers)
        self.mixing = nn.Sequential()
        for _ in range(layers):
            self.mixing.append(Attention(width, heads, gain))
            self.mixing.append(FeedForward(width, gain))
        self.pool = Pool(width)
        self.features = width

    def layers(self) -> list[nn.Module]:
        """Return the cutting into tokens, each attention, each feed-forward pair, and the mean."""
        return [self.tokens, *self.mixing, self.pool]

    def forward(self, obs_BX: Tensor) -> Tensor:
        """Return features_BF."""
        features: Tensor = self.pool(self.mixing(self.tokens(obs_BX)))
        return features


def _side(shape: tuple[int, int, int], patch: int) -> int:
    """Return the side of a patch: what was asked for, or the largest up to 16 that fits."""
    _, height, width = shape
    common = math.gcd(height, width)
    if patch:
        if common % patch:
            raise ConfigError(
                f"network.patch = {patch} must divide both sides of the pictures, {height} x {width}; "
                f"the numbers that do are the divisors of {common}"
            )
        return patch
    side = max(size for size in range(1, LARGEST_PATCH + 1) if common % size == 0)
    if side < SMALLEST_PATCH:
        raise ConfigError(
            f"no patch of {SMALLEST_PATCH} to {LARGEST_PATCH} pixels divides both sides of the pictures, "
            f"{height} x {width}; set network.patch, or crop them"
        )
    return side
