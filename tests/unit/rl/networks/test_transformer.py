"""The transformer against PyTorch's own layers, its tokens against slices by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdrl.errors import ConfigError
from p2pdrl.rl.networks.layers import initialise
from p2pdrl.rl.networks.transformer import Attention, FeedForward, Groups, Patches, Transformer

OPTIONS = {"layers": 2, "heads": 2, "width": 8, "patch": 0}


def drawn(module, seed=0):
    initialise(module, torch.Generator().manual_seed(seed))
    return module


def randn(*shape, seed=1):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_a_pair_of_layers_is_pytorchs_encoder_layer():
    mixing, x = drawn(nn.Sequential(Attention(12, 3, 0.7), FeedForward(12, 0.7))), randn(2, 5, 12)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 48, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
    )
    attention, feed_forward = mixing
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(attention.inputs.weight)
        theirs.self_attn.in_proj_bias.copy_(attention.inputs.bias)
        for ours, name in (
            (attention.outputs, "self_attn.out_proj"),
            (attention.norm, "norm1"),
            (feed_forward.norm, "norm2"),
            (feed_forward.widen, "linear1"),
            (feed_forward.narrow, "linear2"),
        ):
            theirs.get_submodule(name).load_state_dict(ours.state_dict())
    torch.testing.assert_close(mixing(x), theirs(x))


def test_groups_have_their_own_projections_and_the_last_is_filled_up():
    groups, x = drawn(Groups(7, 3, 4)), randn(2, 7)
    tokens = groups(x)
    assert tokens.shape == (2, 3, 4)
    torch.testing.assert_close(tokens[:, 1], x[:, 3:6] @ groups.weight[1] + groups.bias[1])
    torch.testing.assert_close(tokens[:, 2], x[:, 6:] @ groups.weight[2, :1] + groups.bias[2])


def test_patches_are_squares_row_by_row():
    patches, pixels = drawn(Patches((3, 8, 12), 4, 5)), randn(2, 3, 8, 12)
    tokens = patches(pixels)
    assert tokens.shape == (2, 6, 5)
    square = pixels[:, :, 4:8, 8:12].flatten(1)  # second row, third column
    expected = square @ patches.project.weight.T + patches.project.bias + patches.positions[5]
    torch.testing.assert_close(tokens[:, 5], expected)


def test_parameters():
    trunk = Transformer((5,), is_image=False, **OPTIONS)
    tokens, norm, attention, feed_forward = 5 * (8 + 8), 2 * 8, 4 * (8 * 8 + 8), 8 * 32 + 32 + 32 * 8 + 8
    by_hand = tokens + 2 * (norm + attention + norm + feed_forward) + norm
    assert sum(p.numel() for p in trunk.parameters()) == by_hand
    assert trunk.features == 8


@pytest.mark.parametrize(("features", "tokens"), [(1, 1), (32, 32), (33, 17), (376, 32)])
def test_vectors_become_32_tokens_at_most(features, tokens):
    trunk = Transformer((features,), is_image=False, **OPTIONS)
    assert trunk.tokens(torch.zeros(2, features, device="meta")).shape == (2, tokens, 8)


@pytest.mark.parametrize(
    ("shape", "tokens"), [((4, 84, 84), 36), ((64, 64, 3), 16), ((3, 210, 160), 21 * 16), ((3, 4, 4), 1)]
)
def test_pictures_are_cut_into_the_largest_squares_that_fit(shape, tokens):
    trunk = Transformer(shape, is_image=True, **OPTIONS)
    assert trunk.tokens(torch.zeros(2, *shape, device="meta")).shape == (2, tokens, 8)


def test_the_patch_that_was_asked_for():
    picture = Transformer((4, 84, 84), is_image=True, **{**OPTIONS, "patch": 21})
    assert picture.tokens(torch.zeros(2, 4, 84, 84, device="meta")).shape == (2, 16, 8)
    vector = Transformer((84,), is_image=False, **{**OPTIONS, "patch": 10})
    assert vector.tokens(torch.zeros(2, 84, device="meta")).shape == (2, 9, 8)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"width": 10, "heads": 4}, "multiple of its heads"),
        ({"patch": 16}, "divisors of 84"),
        ({"shape": (3, 83, 84)}, "network.patch, or crop"),
    ],
)
def test_what_does_not_fit_is_refused(options, words):
    options = {**OPTIONS, "shape": (4, 84, 84), **options}
    with pytest.raises(ConfigError, match=words):
        Transformer(options.pop("shape"), is_image=True, **options)


def test_every_feature_counts():
    trunk, x = drawn(Transformer((5,), is_image=False, **OPTIONS)), randn(1, 5).requires_grad_()
    (gradient,) = torch.autograd.grad(trunk(x)[0, 0], x)
    assert (gradient.abs() > 1e-6).all()


def test_computing_it_again_gives_the_same():
    trunk, x = drawn(Transformer((5,), is_image=False, **OPTIONS)), randn(3, 5)
    assert trunk.training
    assert torch.equal(trunk(x), trunk(x))
