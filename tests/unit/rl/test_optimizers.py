"""Flat optimizers against torch.optim."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl import optimizers
from p2pdrl.rl.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    RMSProp,
    clip_gradients,
    gradient_norm,
    sum_of_squares,
)

D = 50


PAIRS = {
    "adam": (lambda p, g: Adam(p, g, 1e-5), lambda p: torch.optim.Adam([p], 0.01, eps=1e-5)),
    "rmsprop": (
        lambda p, g: RMSProp(p, g, 0.99, 1e-5),
        lambda p: torch.optim.RMSprop([p], 0.01, alpha=0.99, eps=1e-5),
    ),
    "sgd": (SGD, lambda p: torch.optim.SGD([p], 0.01)),
    "sparse_sgd": (lambda p, g: SGD(p, g, sparse=True), lambda p: torch.optim.SGD([p], 0.01)),
    "momentum": (lambda p, g: Momentum(p, g, 0.9), lambda p: torch.optim.SGD([p], 0.01, momentum=0.9)),
    "nesterov": (
        lambda p, g: Momentum(p, g, 0.9, nesterov=True),
        lambda p: torch.optim.SGD([p], 0.01, momentum=0.9, nesterov=True),
    ),
    "adagrad": (lambda p, g: Adagrad(p, g, 1e-8), lambda p: torch.optim.Adagrad([p], 0.01, eps=1e-8)),
}
SQUARES = ["adam", "rmsprop", "adagrad"]


def ours_and_torchs(name):
    start = torch.randn(D, generator=torch.Generator().manual_seed(0))
    mine, theirs = start.clone(), start.clone().requires_grad_()
    gradients = torch.zeros(D)
    make, make_reference = PAIRS[name]
    return mine, gradients, make(mine, gradients), theirs, make_reference(theirs)


@pytest.mark.parametrize("name", PAIRS)
def test_same_steps_as_torch(name):
    mine, gradients, optimizer, theirs, reference = ours_and_torchs(name)
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        gradients.copy_(torch.randn(D, generator=generator))
        theirs.grad = gradients.clone()
        optimizer.step(0.01)
        reference.step()
    torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_of_pieces_do_what_the_whole_ones_does(name):
    mine, gradients, optimizer, _, _ = ours_and_torchs(name)
    optimizer.step(0.01)
    pieces = []
    for span in (slice(0, 20), slice(20, 21), slice(21, D)):
        parameters, own_gradients = mine[span].clone(), torch.zeros_like(gradients[span])
        piece = optimizer.over(parameters, own_gradients)
        assert piece.steps == 0
        piece.load({k: v[span] if v.ndim else v for k, v in optimizer.state().items()})
        pieces.append((span, parameters, own_gradients, piece))
    generator = torch.Generator().manual_seed(2)
    for _ in range(3):
        gradients.copy_(torch.randn(D, generator=generator))
        optimizer.step(0.01)
        for span, _, own_gradients, piece in pieces:
            own_gradients.copy_(gradients[span])
            piece.step(0.01)
    for span, parameters, _, piece in pieces:
        assert torch.equal(parameters, mine[span])
        assert piece.steps == optimizer.steps == 4


@pytest.mark.parametrize("name", PAIRS)
def test_steps_in_pieces_are_those_of_one_piece_to_the_bit(name, monkeypatch):
    """Longer than a piece, and no multiple of it: 16 elements a thread."""
    size = 16 * torch.get_num_threads()
    found = []
    for piece in (optimizers._PIECE, 16):
        monkeypatch.setattr(optimizers, "_PIECE", piece)
        generator = torch.Generator().manual_seed(3)
        parameters = torch.randn(3 * size + 5, generator=generator)
        gradients = torch.zeros_like(parameters)
        optimizer = PAIRS[name][0](parameters, gradients)
        for _ in range(4):
            gradients.copy_(torch.randn(len(gradients), generator=generator))
            optimizer.step(0.01)
        found.append((parameters, *optimizer._vectors.values()))
        assert optimizer._scratch.numel() in (0, min(piece * torch.get_num_threads(), len(parameters)))
    for whole, in_pieces in zip(*found, strict=True):
        assert torch.equal(whole, in_pieces)


@pytest.mark.parametrize("name", SQUARES)
def test_a_step_takes_no_memory_but_one_piece(name, monkeypatch):
    monkeypatch.setattr(optimizers, "_PIECE", 16)
    parameters = torch.ones(1000)
    gradients = torch.ones(1000)
    optimizer = PAIRS[name][0](parameters, gradients)
    optimizer.step(0.01)
    scratch = optimizer._scratch
    with torch.profiler.profile(profile_memory=True) as profile:
        optimizer.step(0.01)
    assert optimizer._scratch is scratch
    assert not any(event.self_cpu_memory_usage > 64 for event in profile.events())


@pytest.mark.parametrize("name", PAIRS)
def test_state_carries_over(name):
    mine, gradients, optimizer, _, _ = ours_and_torchs(name)
    gradients.fill_(0.5)
    for _ in range(3):
        optimizer.step(0.01)
    state = {key: value.copy() for key, value in optimizer.state().items()}
    for item in optimizer.items():
        assert state[item.name].shape == item.shape
        assert str(state[item.name].dtype) == item.dtype

    _, other_gradients, other, _, _ = ours_and_torchs(name)
    other.load(state)
    copy = mine.clone()
    other._parameters_D.copy_(copy)
    other_gradients.fill_(0.25)
    gradients.fill_(0.25)
    optimizer.step(0.01)
    other.step(0.01)
    torch.testing.assert_close(other._parameters_D, mine, rtol=0, atol=0)


def _stepped(name):
    _, gradients, optimizer, _, _ = ours_and_torchs(name)
    gradients.fill_(0.5)
    for _ in range(3):
        optimizer.step(0.01)
    return optimizer


@pytest.mark.parametrize("name", PAIRS)
def test_set_aside_the_state_is_what_lies_elsewhere_and_then_goes_on_from_there(name):
    optimizer, twin = _stepped(name), _stepped(name)
    before = {key: np.array(x) for key, x in optimizer.state().items()}
    optimizer.set_aside(aside=True)
    assert {key: x.tolist() for key, x in optimizer.state().items()} == {
        key: x.tolist() for key, x in before.items()
    }
    elsewhere = {key: np.array(x) for key, x in before.items()}
    optimizer.refer(elsewhere)
    assert all(np.shares_memory(x, elsewhere[key]) for key, x in optimizer.state().items())
    assert optimizer.steps == twin.steps
    other = {key: x + 1 for key, x in before.items()}
    optimizer.load(other)
    assert all(x is other[key] for key, x in optimizer.state().items())
    with pytest.raises(LayoutMismatchError):
        optimizer.refer({**other, "optimizer.steps": np.zeros(2, np.int64)})
    optimizer.load(elsewhere)
    optimizer.set_aside(aside=False)
    for x in elsewhere.values():
        x[...] = 0  # whoever had the memory has it for himself again
    with pytest.raises(RuntimeError, match="its state in memory of its own"):
        optimizer.refer(elsewhere)
    optimizer.step(1e-2)
    twin.step(1e-2)
    for key, x in twin.state().items():
        np.testing.assert_array_equal(optimizer.state()[key], x)


def test_state_of_another_size_is_refused():
    _, _, optimizer, _, _ = ours_and_torchs("adam")
    state = optimizer.state()
    state["optimizer.m"] = np.zeros(3, dtype=np.float32)
    with pytest.raises(LayoutMismatchError, match=r"optimizer\.m"):
        optimizer.load(state)


def test_clipping_keeps_small_gradients_and_scales_large_ones():
    small, large = torch.tensor([0.3, 0.4]), torch.tensor([30.0, 40.0])
    assert clip_gradients(small, 1.0) == pytest.approx(0.5)
    assert clip_gradients(large, 1.0) == pytest.approx(50.0)
    torch.testing.assert_close(small, torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(large, torch.tensor([0.6, 0.8]))


def test_norms_of_many_gradients_are_exact():
    """NumPy's sum in float64 is the reference; on one thread torch's norm is 3.6e-4 too small here."""
    gradients_D = 5e-4 * torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    expected = math.sqrt(np.square(gradients_D.numpy(), dtype=np.float64).sum())
    assert gradient_norm(gradients_D) == pytest.approx(expected, rel=3e-5)
    pieces = torch.split(gradients_D, 3_300_000)
    assert math.sqrt(sum(map(sum_of_squares, pieces))) == pytest.approx(expected, rel=3e-5)
    assert clip_gradients(gradients_D, expected / 2) == pytest.approx(expected, rel=3e-5)
    after = math.sqrt(np.square(gradients_D.numpy(), dtype=np.float64).sum())
    assert after == pytest.approx(expected / 2, rel=3e-5)


@pytest.mark.parametrize("size", [1000, (1 << 20) + 1])
def test_norms_of_one_span_are_torchs_and_what_is_not_finite_is_left(size):
    gradients_D = torch.randn(size, generator=torch.Generator().manual_seed(1))
    exact = float(torch.linalg.vector_norm(gradients_D, dtype=torch.float64))
    assert gradient_norm(gradients_D) == pytest.approx(exact, rel=3e-5)
    if size == 1000:
        assert gradient_norm(gradients_D) == float(torch.linalg.vector_norm(gradients_D))
    for odd in (math.nan, math.inf):
        gradients_D[-1] = odd
        before = gradients_D.clone()
        assert clip_gradients(gradients_D, 1.0) == pytest.approx(odd, nan_ok=True)
        assert torch.equal(gradients_D.nan_to_num(), before.nan_to_num())
    assert gradient_norm(torch.zeros(0)) == 0.0


@pytest.mark.parametrize("name", SQUARES)
def test_a_peers_impossible_state_does_no_harm(name):
    mine, gradients, optimizer, _, _ = ours_and_torchs(name)
    state = {key: np.array(value) for key, value in optimizer.state().items()}
    state["optimizer.v"] = np.full(D, -1.0, np.float32)
    for steps in (-5, 2**63 - 1):
        state["optimizer.steps"] = np.array(steps)
        optimizer.load(state)
        gradients.fill_(0.5)
        optimizer.step(0.01)
        assert torch.isfinite(mine).all()
        assert 0 < optimizer.state()["optimizer.steps"] < 2**62


def test_sparse_steps_write_nothing_where_the_gradient_is_zero():
    parameters, gradients = torch.full((4,), float("nan")), torch.tensor([0.0, 2.0, 0.0, -4.0])
    parameters[1::2] = 1.0
    seen = parameters.view(torch.int32).clone()
    seen[0] = 0x7FC0BEEF  # a NaN of our own: any arithmetic on it would make another one
    parameters.view(torch.int32).copy_(seen)
    SGD(parameters, gradients, sparse=True).step(0.25)
    assert parameters.view(torch.int32)[0] == 0x7FC0BEEF
    assert parameters[1::2].tolist() == [0.5, 2.0]


def test_a_sparse_step_on_nothing_is_no_step():
    parameters = torch.ones(4)
    SGD(parameters, torch.zeros(4), sparse=True).step(1.0)
    assert parameters.tolist() == [1.0] * 4
