"""Trunks: the layers chained are the trunk."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.rl.networks.impala_resnet import ImpalaResNet
from p2pdrl.rl.networks.layers import DenseTrunk, initialise
from p2pdrl.rl.networks.minatar_cnn import MinAtarCNN
from p2pdrl.rl.networks.nature_cnn import NatureCNN
from p2pdrl.rl.networks.transformer import Transformer

TRUNKS = {
    "dense": (DenseTrunk((2, 3), (5, 4), "relu"), (2, 3), 2),
    "dense without layers": (DenseTrunk((2, 3), (), "relu"), (2, 3), 1),
    "nature cnn": (NatureCNN((3, 36, 36), (5,)), (3, 36, 36), 4),
    "nature cnn without dense layers": (NatureCNN((3, 36, 36), ()), (3, 36, 36), 3),
    "minatar cnn": (MinAtarCNN((7, 6, 5), (5, 4)), (7, 6, 5), 3),
    "minatar cnn without dense layers": (MinAtarCNN((7, 6, 5), ()), (7, 6, 5), 1),
    "resnet": (ImpalaResNet((9, 9, 2), (3, 4), (5, 6)), (9, 9, 2), 8),
    "transformer": (
        Transformer((6,), is_image=False, layers=3, heads=1, width=4, patch=2),
        (6,),
        8,
    ),
}


@pytest.mark.parametrize(("trunk", "obs_shape", "layers"), TRUNKS.values(), ids=TRUNKS)
def test_layers_chained_are_the_trunk(trunk, obs_shape, layers):
    initialise(trunk, torch.Generator().manual_seed(0))
    obs = torch.rand((2, *obs_shape), generator=torch.Generator().manual_seed(1)) * 255
    x = obs
    assert len(trunk.layers()) == layers
    for layer in trunk.layers():
        x = layer(x)
    torch.testing.assert_close(trunk(obs), x)
    assert x.shape == (2, trunk.features)
    owned = [parameter for layer in trunk.layers() for parameter in layer.parameters()]
    assert [id(p) for p in owned] == [id(p) for p in trunk.parameters()]
