"""The flat vector: views, gradients, layout."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from p2pdrl.errors import ConfigError, LayoutMismatchError
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.tensors.optimizers import Adam
from p2pdrl.tensors.shared_memory import SharedRegion

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


def train(flat, optimizer, steps):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        flat.gradients_D.zero_()
        flat.module(x).square().sum().backward()
        optimizer.step(0.01)


def test_rebinding_in_the_midst_of_training_changes_no_number():
    moved, stays = FlatModule(make(), CPU), FlatModule(make(), CPU)
    optimizers = [Optimizer(Adam(), flat) for flat in (moved, stays)]
    for flat, optimizer in zip((moved, stays), optimizers, strict=True):
        train(flat, optimizer, 3)
    old = moved.numpy()
    buffer = np.zeros(moved.layout.size, np.float32)
    moved.rebind(buffer, write=True)
    np.testing.assert_array_equal(buffer, old)
    kept = old.copy()
    for flat, optimizer in zip((moved, stays), optimizers, strict=True):
        train(flat, optimizer, 3)
    np.testing.assert_array_equal(buffer, stays.numpy())
    np.testing.assert_array_equal(old, kept)
    assert np.shares_memory(moved.numpy(), buffer)


def test_rebinding_takes_what_lies_in_the_buffer_unless_told_to_write():
    flat = FlatModule(make(), CPU)
    buffer = np.full(flat.layout.size, 2.0, np.float32)
    flat.rebind(buffer, write=False)
    assert all((parameter == 2.0).all() for parameter in flat.module.parameters())
    buffer[:] = 3.0  # another process writes
    assert all((parameter == 3.0).all() for parameter in flat.module.parameters())


def test_two_modules_step_on_one_piece_of_shared_memory():
    one, two = FlatModule(make(0), CPU), FlatModule(make(1), CPU)
    nbytes = 4 * one.layout.size
    region = SharedRegion.create(nbytes, "test")
    try:
        one.rebind(np.frombuffer(region.buf, np.float32), write=True)
        two.rebind(np.frombuffer(region.buf, np.float32), write=False)
        x = torch.randn(5, 3)
        torch.testing.assert_close(one.module(x), two.module(x), rtol=0, atol=0)
        train(two, Optimizer(Adam(), two), 2)
        torch.testing.assert_close(one.module(x), two.module(x), rtol=0, atol=0)
        for flat in (one, two):  # let go of the memory before it is unmapped
            flat.rebind(np.empty(flat.layout.size, np.float32), write=True)
    finally:
        region.close()


@pytest.mark.parametrize("kind", ["short", "double", "read-only", "strided"])
def test_buffers_that_do_not_fit_are_refused(kind):
    flat = FlatModule(make(), CPU)
    size = flat.layout.size
    buffer = {
        "short": np.zeros(size - 1, np.float32),
        "double": np.zeros(size),
        "read-only": np.frombuffer(bytes(4 * size), np.float32),
        "strided": np.zeros(2 * size, np.float32)[::2],
    }[kind]
    before = flat.numpy().copy()
    with pytest.raises(LayoutMismatchError, match="in one piece"):
        flat.rebind(buffer, write=True)
    np.testing.assert_array_equal(flat.numpy(), before)


def test_memory_is_shared_on_the_cpu_only():
    flat = FlatModule(make(), torch.device("meta"))
    with pytest.raises(ConfigError, match="meta"):
        flat.rebind(np.zeros(flat.layout.size, np.float32), write=True)


def test_gradients_memory_can_be_given_back_and_had_again():
    module, twin = make(), make()
    flat, other = FlatModule(module, CPU), FlatModule(twin, CPU)
    ours, theirs = (Optimizer(Adam(), one) for one in (flat, other))
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        for one, optimizer in ((flat, ours), (other, theirs)):
            one.gradients_D.zero_()
            one.module(x).square().sum().backward()
            optimizer.step(1e-2)
        flat.drop_gradients()
        ours.offload()
        assert flat.gradients_D.untyped_storage().nbytes() == 0
        assert all(parameter.grad is None for parameter in module.parameters())
        flat.make_gradients()
        ours.reload()
        assert not flat.gradients_D.any()
    torch.testing.assert_close(flat.parameters_D, other.parameters_D, rtol=0, atol=0)


def test_a_span_of_several_parts_has_as_few_pieces_as_there_can_be():
    flat = FlatModule(nn.ModuleDict({name: nn.Linear(2, 1) for name in "abcd"}), CPU)
    assert [len(x) for x, _ in flat.span("b", "c").pieces] == [6]
    apart = flat.span("d", "a")
    assert [len(x) for x, _ in apart.pieces] == [3, 3]
    optimizer = Optimizer(Adam(), apart)
    before = flat.numpy().copy()
    flat.gradients_D.fill_(3.0)
    assert optimizer.clipped_step(0.1, 1.0) == pytest.approx(3.0 * 6**0.5)
    assert optimizer.items()[0].shape == (6,)
    np.testing.assert_allclose(optimizer.state()["optimizer.m"], 0.1 * 6**-0.5, rtol=1e-5)
    moved = flat.numpy() != before
    assert moved.tolist() == [True] * 3 + [False] * 6 + [True] * 3
    apart.set_(np.arange(6, dtype=np.float32))
    assert flat.numpy()[moved].tolist() == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ConfigError, match="no parameter belongs to 'e'"):
        flat.span("a", "e")
