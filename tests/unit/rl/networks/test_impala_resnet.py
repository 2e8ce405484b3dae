"""The deep network of IMPALA: the figure's layers, counted and computed by hand."""

from __future__ import annotations

import torch
from torch.nn import functional

from p2pdrl.config.task import NetworkConfig
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.networks.impala_resnet import ImpalaResNet
from p2pdrl.rl.networks.layers import Convolution, initialise
from p2pdrl.rl.policy import ActorCritic


def section(inputs, outputs):
    """Parameters of one convolution and two residual blocks of two each, 3 x 3 with biases."""
    return (9 * inputs + 1) * outputs + 4 * (9 * outputs + 1) * outputs


def test_parameters_for_four_frames_of_84_x_84():
    trunk = ImpalaResNet((4, 84, 84), (16, 32, 32), (256,))
    # 84 is halved to 42, 21 and 11
    by_hand = section(4, 16) + section(16, 32) + section(32, 32) + (11 * 11 * 32 + 1) * 256
    assert by_hand == 9_872 + 41_632 + 46_240 + 991_488
    assert sum(p.numel() for p in trunk.parameters()) == by_hand == 1_089_232
    assert sum(isinstance(layer, Convolution) for layer in trunk.modules()) == 15
    policy = ActorCritic(
        EnvSpec((4, 84, 84), "uint8", Discrete(6)), NetworkConfig(kind="impala_resnet"), None
    )
    assert sum(p.numel() for p in policy.parameters()) == 1_089_232 + 257 * 7


def test_widths_scale():
    trunk = ImpalaResNet((4, 84, 84), (32, 64, 64, 64), (512, 128))
    by_hand = section(4, 32) + section(32, 64) + 2 * section(64, 64) + (6 * 6 * 64 + 1) * 512 + 513 * 128
    assert sum(p.numel() for p in trunk.parameters()) == by_hand
    assert trunk.features == 128


def test_forward_by_hand():
    trunk = ImpalaResNet((3, 13, 10), (4, 5), (7,))
    initialise(trunk, torch.Generator().manual_seed(0))
    obs = torch.randint(256, (2, 3, 13, 10), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    weights = iter(trunk.parameters())

    def convolve(x):
        return functional.conv2d(x, next(weights), next(weights), padding=1)

    x = obs.float() / 255
    for _ in range(2):
        x = functional.max_pool2d(convolve(x), 3, stride=2, padding=1)
        for _ in range(2):
            inner = convolve(functional.relu(x))
            x = x + convolve(functional.relu(inner))
    x = functional.relu(x).flatten(1)
    assert x.shape == (2, 5 * 4 * 3)
    x = functional.relu(functional.linear(x, next(weights), next(weights)))
    torch.testing.assert_close(trunk(obs), x)
    assert next(weights, None) is None


def test_features_begin_neither_dead_nor_huge():
    trunk = ImpalaResNet((4, 84, 84), (16, 32, 32), (256,))
    initialise(trunk, torch.Generator().manual_seed(0))
    obs = torch.randint(256, (8, 4, 84, 84), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    size = trunk(obs).square().mean().sqrt()
    assert 0.1 < size < 10
