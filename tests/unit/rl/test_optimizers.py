"""The rules under both executors, torch's and NumPy's, against torch.optim; norms and clipping."""

from __future__ import annotations

import math
import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
import torch

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl import optimizers
from p2pdrl.rl.flat import FlatSpan
from p2pdrl.rl.optimizers import Optimizer, clip_gradients, gradient_norm, sum_of_squares
from p2pdrl.tensors.optimizers import (
    SGD,
    Adagrad,
    Adam,
    Momentum,
    RMSProp,
    ShardOptimizer,
    UpdateRule,
    update_rule,
)

RULES: dict[str, tuple[UpdateRule, type[torch.optim.Optimizer], dict[str, object]]] = {
    "sgd": (SGD(), torch.optim.SGD, {}),
    "sparse_sgd": (SGD(sparse=True), torch.optim.SGD, {}),
    "momentum": (Momentum(0.85), torch.optim.SGD, {"momentum": 0.85}),
    "nesterov": (Momentum(0.9, nesterov=True), torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "rmsprop": (RMSProp(0.97, 1e-5), torch.optim.RMSprop, {"alpha": 0.97, "eps": 1e-5}),
    "adagrad": (Adagrad(1e-5), torch.optim.Adagrad, {"eps": 1e-5}),
    "adam": (Adam(0.85, 0.97, 1e-5), torch.optim.Adam, {"betas": (0.85, 0.97), "eps": 1e-5}),
}
STATEFUL = [name for name, (rule, *_) in RULES.items() if rule.slots]
SQUARES = ["adam", "rmsprop", "adagrad"]
SIZE = (1 << 15) + 300
"""Longer than a piece of NumPy's, and no multiple of it."""
D = 50
every = pytest.mark.parametrize("name", RULES)


class OnTorch:
    """Steps ``x`` by torch; takes gradients as arrays."""

    def __init__(self, rule, x):
        self.gradients_D = torch.zeros(x.size, dtype=torch.from_numpy(x).dtype)
        self.optimizer = Optimizer(rule, FlatSpan((torch.from_numpy(x), self.gradients_D)))

    def step(self, gradient, rate):
        self.gradients_D.copy_(torch.from_numpy(gradient))
        self.optimizer.step(rate)


class OnNumpy:
    """Steps ``x`` by NumPy."""

    def __init__(self, rule, x):
        self.x = x
        self.optimizer = ShardOptimizer(rule, x.size, x.dtype)

    def step(self, gradient, rate):
        self.optimizer.step(self.x, gradient, rate)


both = pytest.mark.parametrize("executor", [OnTorch, OnNumpy])


def copied(state):
    return {key: np.array(value) for key, value in state.items()}


@both
def test_rmsprops_epsilon_may_lie_under_the_root(executor):
    x = np.random.default_rng(1).standard_normal(SIZE).astype(np.float64)
    expected, v = x.copy(), np.zeros(SIZE)
    mine = executor(RMSProp(0.9, 0.01, eps_in_root=True), x)
    for gradient in gradients(5, np.float64):
        v = 0.9 * v + 0.1 * gradient**2
        expected -= 0.05 * gradient / np.sqrt(v + 0.01)
        mine.step(gradient, 0.05)
    np.testing.assert_allclose(x, expected, rtol=1e-12)


def gradients(count, dtype=np.float32, size=SIZE):
    """Of magnitudes from 1e-6 to 1, a tenth of them zero."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-6, 0, size)
    scale[rng.random(size) < 0.1] = 0
    return (rng.standard_normal((count, size)) * scale).astype(dtype)


@both
@every
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 2e-6), (np.float64, 1e-12)])
def test_fifty_steps_are_those_of_torch_optim(executor, name, dtype, tolerance):
    """The learning rate changes on the way; the tolerance is relative to the way travelled, or to 1."""
    rule, reference_class, settings = RULES[name]
    start = np.random.default_rng(1).standard_normal(SIZE).astype(dtype)
    x, theirs = start.copy(), torch.from_numpy(start.copy()).requires_grad_()
    mine, reference = executor(rule, x), reference_class([theirs], 0.01, **settings)
    for step, gradient in enumerate(gradients(50, dtype)):
        rate = 0.01 * (1 - step / 100)
        reference.param_groups[0]["lr"] = rate
        theirs.grad = torch.from_numpy(gradient)
        reference.step()
        before = gradient.copy()
        mine.step(gradient, rate)
        np.testing.assert_array_equal(gradient, before)
    assert mine.optimizer.steps == 50
    np.testing.assert_allclose(x, theirs.detach().numpy(), rtol=tolerance, atol=tolerance)
    assert np.abs(x - start).max() > 0.01


@both
@every
def test_an_optimizer_with_the_state_of_another_goes_on_as_that_would(executor, name):
    x, y = np.ones((2, SIZE), np.float32)
    first, second, alone = (executor(RULES[name][0], v) for v in (x, x, y))
    for step, gradient in enumerate(gradients(8)):
        if step == 5:
            second.optimizer.load(copied(first.optimizer.state()))
        (first if step < 5 else second).step(gradient, 0.01)
        alone.step(gradient, 0.01)
    np.testing.assert_array_equal(x, y)
    assert second.optimizer.steps == alone.optimizer.steps == 8


@both
@every
def test_pieces_of_a_vector_step_as_the_whole(executor, name):
    """Shards on several servers, or stages of a pipeline, come to what one optimizer would."""
    x, y = np.ones((2, SIZE), np.float32)
    rule, edges = RULES[name][0], (0, 7, 20_000, SIZE)
    whole = executor(rule, x)
    shards = [executor(rule, y[start:stop]) for start, stop in pairwise(edges)]
    for gradient in gradients(3):
        whole.step(gradient, 0.01)
        for shard, (start, stop) in zip(shards, pairwise(edges), strict=True):
            shard.step(gradient[start:stop], 0.01)
    np.testing.assert_array_equal(x, y)


@both
@pytest.mark.parametrize("name", SQUARES)
def test_a_peers_impossible_state_does_no_harm(executor, name):
    x = np.zeros(D, np.float32)
    mine = executor(RULES[name][0], x)
    for steps in (-5, (1 << 53) + 1):
        state = copied(mine.optimizer.state())
        for key, value in state.items():
            value[...] = steps if key.endswith("steps") else -1.0
        mine.optimizer.load(state)
        mine.step(np.full(D, 0.5, np.float32), 0.01)
        assert np.isfinite(x).all()
        assert 0 < mine.optimizer.steps < 2**62


@both
@pytest.mark.parametrize("name", STATEFUL)
def test_loading_is_a_copy(executor, name):
    optimizer = executor(RULES[name][0], np.zeros(D, np.float32)).optimizer
    state = copied(optimizer.state())
    for value in state.values():
        value[...] = 1
    optimizer.load(state)
    for value in state.values():
        value[...] = 9
    assert all((value == 1).all() for value in optimizer.state().values())


@both
def test_sparse_steps_write_nothing_where_the_gradient_is_zero(executor):
    x = np.array([np.nan, 1.0, np.nan, 1.0], np.float32)
    x.view(np.uint32)[0] = 0x7FC0BEEF  # a NaN of our own: any arithmetic on it would make another one
    mine = executor(SGD(sparse=True), x)
    mine.step(np.array([0.0, 2.0, 0.0, -4.0], np.float32), 0.25)
    assert x.view(np.uint32)[0] == 0x7FC0BEEF
    assert x[1::2].tolist() == [0.5, 2.0]
    mine.step(np.zeros(4, np.float32), 1.0)
    assert x[1::2].tolist() == [0.5, 2.0]


def test_servers_rules_by_name():
    named = {"momentum": 0.85, "decay": 0.97, "eps": 1e-5}
    for name in ("sgd", "momentum", "rmsprop", "adagrad", "adam"):
        assert update_rule(name, **named) == RULES[name][0]
    with pytest.raises(ValueError, match="below 1"):
        update_rule("adam", momentum=1.0)


# torch


@every
def test_an_optimizer_over_other_tensors_has_the_rule_and_the_name(name):
    x = np.ones(D, np.float32)
    mine = OnTorch(RULES[name][0], x)
    mine.optimizer.name = "optimizer.actor"
    mine.step(gradients(1, size=D)[0], 0.01)
    parameters_D, gradients_D = torch.from_numpy(x[:20].copy()), mine.gradients_D[:20]
    piece = mine.optimizer.over(FlatSpan((parameters_D, gradients_D)))
    assert piece.steps == 0
    piece.load({key: v[:20] if v.ndim else v for key, v in mine.optimizer.state().items()})
    mine.optimizer.step(0.01)
    piece.step(0.01)
    np.testing.assert_array_equal(parameters_D.numpy(), x[:20])
    assert [item.name for item in piece.items()] == [item.name for item in mine.optimizer.items()]


@every
def test_steps_in_pieces_are_those_of_one_piece_to_the_bit(name, monkeypatch):
    """Longer than a piece, and no multiple of it: 16 elements a thread."""
    size = 48 * torch.get_num_threads() + 5
    found = []
    for piece in (optimizers._PIECE, 16):
        monkeypatch.setattr(optimizers, "_PIECE", piece)
        x = np.random.default_rng(3).standard_normal(size).astype(np.float32)
        mine = OnTorch(RULES[name][0], x)
        for gradient in gradients(4, size=size):
            mine.step(gradient, 0.01)
        found.append((x, *mine.optimizer.state().values()))
    for whole, in_pieces in zip(*found, strict=True):
        np.testing.assert_array_equal(whole, in_pieces)


@pytest.mark.parametrize("name", SQUARES)
def test_a_step_of_tensors_takes_no_memory_but_one_piece(name, monkeypatch):
    monkeypatch.setattr(optimizers, "_PIECE", 16)
    mine = OnTorch(RULES[name][0], np.ones(1000, np.float32))
    mine.optimizer.step(0.01)
    with torch.profiler.profile(profile_memory=True) as profile:
        mine.optimizer.step(0.01)
    assert not any(event.self_cpu_memory_usage > 64 for event in profile.events())


@every
def test_the_state_is_laid_out_as_its_items_say(name):
    optimizer = OnTorch(RULES[name][0], np.ones(D, np.float32)).optimizer
    state = optimizer.state()
    assert state.keys() == {item.name for item in optimizer.items()}
    for item in optimizer.items():
        assert (state[item.name].shape, str(state[item.name].dtype)) == (item.shape, item.dtype)


@every
def test_offloaded_the_state_is_what_lies_elsewhere_and_then_goes_on_from_there(name):
    mine, twin = (OnTorch(RULES[name][0], np.ones(D, np.float32)) for _ in range(2))
    for gradient in gradients(3, size=D):
        mine.step(gradient, 0.01)
        twin.step(gradient, 0.01)
    optimizer = mine.optimizer
    before = copied(optimizer.state())
    optimizer.offload()
    assert {key: x.tolist() for key, x in optimizer.state().items()} == {
        key: x.tolist() for key, x in before.items()
    }
    elsewhere = copied(before)
    optimizer.offload_to(elsewhere)
    assert all(np.shares_memory(x, elsewhere[key]) for key, x in optimizer.state().items())
    assert optimizer.steps == twin.optimizer.steps
    other = {key: x + 1 for key, x in before.items()}
    optimizer.load(other)
    assert all(x is other[key] for key, x in optimizer.state().items())
    with pytest.raises(LayoutMismatchError):
        optimizer.offload_to({**other, "optimizer.steps": np.zeros(2, np.int64)})
    optimizer.load(elsewhere)
    optimizer.reload()
    for x in elsewhere.values():
        x[...] = 0  # whoever had the memory has it for himself again
    with pytest.raises(RuntimeError, match="its state in memory of its own"):
        optimizer.offload_to(elsewhere)
    optimizer.step(1e-2)
    twin.optimizer.step(1e-2)
    for key, x in twin.optimizer.state().items():
        np.testing.assert_array_equal(optimizer.state()[key], x)


def test_state_of_another_size_is_refused():
    optimizer = OnTorch(Adam(), np.zeros(D, np.float32)).optimizer
    with pytest.raises(LayoutMismatchError, match=r"optimizer\.m"):
        optimizer.load({**optimizer.state(), "optimizer.m": np.zeros(3, np.float32)})


# NumPy


@pytest.mark.parametrize("name", STATEFUL)
def test_a_shards_state_that_does_not_fit_is_refused_whole(name):
    rule = RULES[name][0]
    good = ShardOptimizer(rule, 3)
    good.step(np.zeros(3, np.float32), np.ones(3, np.float32), 0.1)
    optimizer = ShardOptimizer(rule, 3)
    for key, value in good.state().items():
        bad = [None, value.astype(np.float16), np.zeros(4, value.dtype)]
        if key != "steps":
            bad += [np.full(3, np.nan, np.float32), np.array([0, 0, np.inf], np.float32)]
        for wrong in bad:
            state = {**good.state(), key: wrong}
            if wrong is None:
                del state[key]
            with pytest.raises(LayoutMismatchError, match=key):
                optimizer.load(state)
    assert optimizer.steps == 0
    assert not any(value.any() for value in optimizer.state().values())


def test_vectors_that_do_not_fit_a_shard_are_refused():
    optimizer, three = ShardOptimizer(Adam(), 3), np.zeros(3, np.float32)
    for x, g in ((three, np.zeros(4, np.float32)), (np.zeros(3), three), (three, np.zeros(3))):
        with pytest.raises(LayoutMismatchError):
            optimizer.step(x, g, 0.1)
    assert optimizer.steps == 0
    with pytest.raises(ValueError, match="float16"):
        ShardOptimizer(SGD(), 3, np.float16)


@pytest.mark.parametrize("name", [name for name in RULES if name != "sparse_sgd"])
def test_nothing_of_the_shards_length_is_allocated(name):
    size = 1 << 20
    x, gradient = np.ones((2, size), np.float32)
    optimizer = ShardOptimizer(RULES[name][0], size)
    tracemalloc.start()
    try:
        optimizer.step(x, gradient, 0.01)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 17


# norms


def test_clipping_keeps_small_gradients_and_scales_large_ones():
    small, large = torch.tensor([0.3, 0.4]), torch.tensor([30.0, 40.0])
    assert clip_gradients(1.0, small) == pytest.approx(0.5)
    assert clip_gradients(1.0, large) == pytest.approx(50.0)
    torch.testing.assert_close(small, torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(large, torch.tensor([0.6, 0.8]))


def test_norms_of_many_gradients_are_exact():
    """NumPy's sum in float64 is the reference; on one thread torch's norm is 3.6e-4 too small here."""
    gradients_D = 5e-4 * torch.randn(10_000_000, generator=torch.Generator().manual_seed(0))
    expected = math.sqrt(np.square(gradients_D.numpy(), dtype=np.float64).sum())
    assert gradient_norm(gradients_D) == pytest.approx(expected, rel=3e-5)
    pieces = torch.split(gradients_D, 3_300_000)
    assert math.sqrt(sum(map(sum_of_squares, pieces))) == pytest.approx(expected, rel=3e-5)
    assert clip_gradients(expected / 2, gradients_D) == pytest.approx(expected, rel=3e-5)
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
        assert clip_gradients(1.0, gradients_D) == pytest.approx(odd, nan_ok=True)
        assert torch.equal(gradients_D.nan_to_num(), before.nan_to_num())
    assert gradient_norm(torch.zeros(0)) == 0.0


@pytest.mark.parametrize("name", STATEFUL)
def test_two_that_share_their_state_and_parameters_are_one_where_they_take_turns(name):
    rule, *_ = RULES[name]
    start = np.random.default_rng(2).standard_normal(SIZE).astype(np.float32)
    alone, shared = start.copy(), start.copy()
    one = OnTorch(rule, alone)
    pair = [OnTorch(rule, shared) for _ in range(2)]
    first = gradients(3)
    for gradient in first:
        one.step(gradient, 0.01)
        pair[0].step(gradient, 0.01)
    arrays = {item.name: np.zeros(item.shape, item.dtype) for item in one.optimizer.items()}
    for member in pair:  # the first one's state is what both go on with
        member.optimizer.share(arrays, write=member is pair[0])
    for step, gradient in enumerate(gradients(10)):
        one.step(gradient, 0.01)
        pair[step % 2].step(gradient, 0.01)
    np.testing.assert_array_equal(shared, alone)
    assert [member.optimizer.steps for member in pair] == [13, 13]

    pair[0].optimizer.keep()  # from here on each has its own
    pair[1].step(gradients(1)[0], 0.01)
    assert [member.optimizer.steps for member in pair] == [13, 14]
    np.testing.assert_equal(copied(pair[0].optimizer.state()), copied(one.optimizer.state()))


def test_shared_state_of_another_shape_is_refused():
    mine = OnTorch(Adam(), np.zeros(SIZE, np.float32))
    with pytest.raises(LayoutMismatchError, match=r"optimizer\.m should be of shape"):
        mine.optimizer.share({"optimizer.m": np.zeros(3, np.float32)}, write=True)
