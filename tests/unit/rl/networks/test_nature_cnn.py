"""The Nature CNN."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from p2pdrl.errors import ConfigError
from p2pdrl.rl.networks.layers import initialise
from p2pdrl.rl.networks.nature_cnn import NatureCNN


def test_parameters_of_the_papers_network():
    # (4·8·8 + 1)·32 + (32·4·4 + 1)·64 + (64·3·3 + 1)·64 + (64·7·7 + 1)·512
    trunk = NatureCNN((4, 84, 84), (512,))
    assert sum(p.numel() for p in trunk.parameters()) == 8_224 + 32_832 + 36_928 + 1_606_144
    assert trunk.features == 512


def test_forward_by_hand():
    trunk = NatureCNN((4, 40, 36), (10, 9))
    initialise(trunk, torch.Generator().manual_seed(0))
    obs = torch.randint(256, (2, 4, 40, 36), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    x = obs.float() / 255
    weights = list(trunk.parameters())
    for stride, weight, bias in zip((4, 2, 1), weights[0:6:2], weights[1:6:2], strict=True):
        x = functional.relu(functional.conv2d(x, weight, bias, stride))
    x = x.flatten(1)
    for weight, bias in zip(weights[6::2], weights[7::2], strict=True):
        x = functional.relu(functional.linear(x, weight, bias))
    torch.testing.assert_close(trunk(obs), x)


def test_without_dense_layers():
    trunk = NatureCNN((4, 84, 84), ())
    assert trunk.features == 64 * 7 * 7


def test_small_pictures_are_refused():
    with pytest.raises(ConfigError, match="36 x 36"):
        NatureCNN((3, 20, 20), (8,))
