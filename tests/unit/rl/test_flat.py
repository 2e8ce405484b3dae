"""The flat vector: views, gradients, layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl.flat import FlatModule

CPU = torch.device("cpu")


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def test_flattening_keeps_what_the_module_computes():
    module, twin = make(), make()
    FlatModule(module, CPU)
    x = torch.randn(5, 3)
    torch.testing.assert_close(module(x), twin(x))


def test_gradients_are_gathered_in_one_vector():
    module, twin = make(), make()
    flat = FlatModule(module, CPU)
    x = torch.randn(5, 3)
    for _ in range(2):  # the second pass must accumulate into the same memory
        flat.gradients_D.zero_()
        module(x).square().sum().backward()
    twin(x).square().sum().backward()
    expected = torch.cat([p.grad.reshape(-1) for p in twin.parameters()])
    torch.testing.assert_close(flat.gradients_D, expected)


def test_layout_names_shapes_and_places():
    flat = FlatModule(make(), CPU)
    assert [(entry.name, entry.shape) for entry in flat.layout.entries] == [
        ("0.weight", (4, 3)),
        ("0.bias", (4,)),
        ("2.weight", (2, 4)),
        ("2.bias", (2,)),
    ]
    views = flat.layout.views(flat.numpy())
    for name, parameter in flat.module.named_parameters():
        np.testing.assert_array_equal(views[name], parameter.detach().numpy())


def test_numpy_is_a_view_and_changes_reach_the_module():
    flat = FlatModule(make(), CPU)
    before = flat.numpy().copy()
    flat.add_(np.ones_like(before))
    np.testing.assert_allclose(flat.numpy(), before + 1)
    flat.set_(np.zeros_like(before))
    assert all(not parameter.any() for parameter in flat.module.parameters())


def test_read_only_vectors_are_taken():
    flat = FlatModule(make(), CPU)
    vector = np.full(flat.layout.size, 2.0, dtype=np.float32)
    vector.flags.writeable = False
    flat.set_(vector)
    assert flat.numpy().min() == 2.0


@pytest.mark.parametrize("method", ["add_", "set_"])
def test_other_lengths_are_refused(method):
    flat = FlatModule(make(), CPU)
    with pytest.raises(LayoutMismatchError, match="parameters"):
        getattr(flat, method)(np.zeros(3, dtype=np.float32))
