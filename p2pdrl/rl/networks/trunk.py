"""What a trunk is: the part of a policy between the observations and whatever follows.

``registry`` picks one, ``policy`` calls it, ``sequential`` cuts it layer by layer.

Shape suffixes: B rows, X the observation's own dimensions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from p2pdrl.rl.networks.layers import mlp

__all__ = ["DenseTrunk", "Trunk", "in_pairs"]


class Trunk(nn.Module):
    """From observations to features.

    Attributes:
        features: F.
    """

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
        obs_shape: flattened, whatever it is.
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
