"""MinAtar's network against one written with torch's layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdrl.errors import ConfigError
from p2pdrl.rl.networks.layers import initialise
from p2pdrl.rl.networks.minatar_cnn import MinAtarCNN


@pytest.mark.parametrize("channels", [4, 10])
@pytest.mark.parametrize(("dtype", "most"), [(torch.bool, 1.0), (torch.uint8, 255.0), (torch.float32, 1.0)])
def test_it_is_one_convolution_and_a_dense_layer(channels, dtype, most):
    trunk = MinAtarCNN((10, 10, channels), (128,), most)
    initialise(trunk, torch.Generator().manual_seed(0))
    numbers = sum(parameter.numel() for parameter in trunk.parameters())
    assert numbers == 16 * (9 * channels + 1) + 128 * (16 * 8 * 8 + 1)
    theirs = nn.Sequential(
        nn.Conv2d(channels, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 128), nn.ReLU()
    )
    with torch.no_grad():
        for parameter, ours in zip(theirs.parameters(), trunk.parameters(), strict=True):
            parameter.copy_(ours)
    obs = (255.0 * torch.rand(5, 10, 10, channels, generator=torch.Generator().manual_seed(1))).floor()
    obs = (obs > 127.0 if dtype == torch.bool else obs).to(dtype)
    torch.testing.assert_close(trunk(obs), theirs(obs.permute(0, 3, 1, 2).float() / most))


def test_pictures_smaller_than_the_filters_are_refused():
    with pytest.raises(ConfigError, match="3 x 3 or more, got 2 x 5"):
        MinAtarCNN((2, 5, 1), (8,))
