"""Layers and how their weights begin."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdrl.rl.networks.layers import Convolution, Dense, Norm, Pixels, initialise, mlp


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("layer", [Dense(7, 5, 3.0), Dense(5, 7, 3.0), Convolution(2, 4, 3, 3.0)])
def test_weights_are_orthogonal_and_scaled(layer):
    initialise(layer, generator())
    weight = layer.weight.detach().flatten(1)
    small = weight if len(weight) <= weight.shape[1] else weight.T
    torch.testing.assert_close(small @ small.T, 9.0 * torch.eye(len(small)))
    assert (layer.bias == 0).all()


def test_norms_begin_as_identity():
    norm = nn.Sequential(Norm(4))
    initialise(norm, generator())
    x = torch.randn(3, 4, generator=generator())
    expected = (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
    torch.testing.assert_close(norm(x), expected)


def test_nothing_is_drawn_from_the_global_stream():
    before = torch.get_rng_state()
    initialise(mlp((3, 4, 5), "tanh"), generator())
    assert torch.equal(before, torch.get_rng_state())


def test_mlps_alternate():
    net = mlp((3, 4, 5), "tanh")
    assert [type(layer) for layer in net] == [Dense, nn.Tanh, Dense, nn.Tanh]
    assert [type(layer) for layer in mlp((3, 4), "relu")] == [Dense, nn.ReLU]
    assert len(mlp((3,), "relu")) == 0


@pytest.mark.parametrize(
    ("obs_shape", "shape"), [((4, 84, 80), (4, 84, 80)), ((84, 80, 3), (3, 84, 80)), ((9, 9, 9), (9, 9, 9))]
)
def test_pixels_are_scaled_channels_first(obs_shape, shape):
    pixels = Pixels(obs_shape)
    assert pixels.shape == shape
    obs = torch.randint(256, (2, *obs_shape), generator=generator(), dtype=torch.uint8)
    seen = pixels(obs)
    assert seen.shape == (2, *shape)
    first = obs if obs_shape[0] < obs_shape[2] else obs.permute(0, 3, 1, 2)
    torch.testing.assert_close(seen, first.float() / 255)
    assert pixels(obs.double()).dtype == torch.float64
    torch.testing.assert_close(Pixels(obs_shape, 51.0)(obs), first.float() / 51)
    truth = first > 100
    assert torch.equal(Pixels(obs_shape, 1.0)(obs > 100), truth.float())


@pytest.mark.parametrize("order", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("obs_shape", [(4, 9, 8), (9, 8, 3)])
def test_pixels_are_the_same_in_any_order_in_memory(obs_shape, order):
    obs = torch.randint(256, (2, *obs_shape), generator=generator(), dtype=torch.uint8)
    for most, given in ((255.0, obs), (51.0, obs), (1.0, obs > 100), (255.0, obs.double())):
        ordered = Pixels(obs_shape, most, memory_format=order)(given)
        assert torch.equal(ordered, Pixels(obs_shape, most)(given))
        assert given.is_floating_point() or ordered.is_contiguous(memory_format=order)


def test_pixels_may_be_reordered_for_gradients_only():
    pixels = Pixels((4, 9, 8), memory_format=torch.channels_last, for_gradients=True)
    obs = torch.randint(256, (2, 4, 9, 8), generator=generator(), dtype=torch.uint8)
    assert pixels(obs).is_contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        assert pixels(obs).is_contiguous()
