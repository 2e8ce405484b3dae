from __future__ import annotations

import tracemalloc
from itertools import pairwise
from typing import get_args

import numpy as np
import pytest
import torch

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.tensors.optimizers import OptimizerName, ShardOptimizer, make_optimizer

torch.set_num_threads(1)

NAMES = get_args(OptimizerName)
SIZE = (1 << 15) + 300
MOMENTUM, DECAY, EPS = 0.85, 0.97, 1e-5
every = pytest.mark.parametrize("name", NAMES)


def reference(name: OptimizerName, parameters: torch.Tensor, rate: float) -> torch.optim.Optimizer:
    match name:
        case "sgd":
            return torch.optim.SGD([parameters], rate)
        case "momentum":
            return torch.optim.SGD([parameters], rate, momentum=MOMENTUM)
        case "rmsprop":
            return torch.optim.RMSprop([parameters], rate, alpha=DECAY, eps=EPS)
        case "adagrad":
            return torch.optim.Adagrad([parameters], rate, eps=EPS)
        case "adam":
            return torch.optim.Adam([parameters], rate, betas=(MOMENTUM, DECAY), eps=EPS)


def made(name: OptimizerName, size: int = SIZE, dtype: type = np.float32) -> ShardOptimizer:
    return make_optimizer(name, size, momentum=MOMENTUM, decay=DECAY, eps=EPS, dtype=dtype)


def gradients(count: int, dtype: type = np.float32, size: int = SIZE) -> np.ndarray:
    """Of magnitudes from 1e-6 to 1, a tenth of them zero."""
    rng = np.random.default_rng(0)
    scale = 10.0 ** rng.uniform(-6, 0, size)
    scale[rng.random(size) < 0.1] = 0
    return (rng.standard_normal((count, size)) * scale).astype(dtype)


@every
@pytest.mark.parametrize(("dtype", "tolerance"), [(np.float32, 1e-6), (np.float64, 1e-12)])
def test_fifty_steps_are_torchs(name: OptimizerName, dtype: type, tolerance: float) -> None:
    """The learning rate changes on the way; the tolerance is relative to the way travelled, or to 1."""
    start = np.random.default_rng(1).standard_normal(SIZE).astype(dtype)
    mine, theirs = start.copy(), torch.from_numpy(start.copy()).requires_grad_()
    optimizer, golden = made(name, dtype=dtype), reference(name, theirs, 0.01)
    for step, gradient in enumerate(gradients(50, dtype)):
        rate = 0.01 * (1 - step / 100)
        golden.param_groups[0]["lr"] = rate
        theirs.grad = torch.from_numpy(gradient)
        golden.step()
        before = gradient.copy()
        optimizer.step(mine, gradient, rate)
        np.testing.assert_array_equal(gradient, before)
    assert optimizer.steps == 50
    np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=tolerance, atol=tolerance)
    assert np.abs(mine - start).max() > 0.01


@every
def test_a_shard_handed_over_goes_on_as_before(name: OptimizerName) -> None:
    first, second, alone = made(name), made(name), made(name)
    x, y = np.ones((2, SIZE), np.float32)
    for step, gradient in enumerate(gradients(8)):
        if step == 5:
            second.load({key: value.copy() for key, value in first.state().items()})
        (first if step < 5 else second).step(x, gradient, 0.01)
        alone.step(y, gradient, 0.01)
    np.testing.assert_array_equal(x, y)
    assert second.steps == alone.steps == 8


@every
def test_pieces_of_a_vector_step_as_the_whole(name: OptimizerName) -> None:
    """Shards on several servers come to what one server would."""
    whole, edges = made(name), (0, 7, 20_000, SIZE)
    x, y = np.ones((2, SIZE), np.float32)
    shards = [made(name, stop - start) for start, stop in pairwise(edges)]
    for gradient in gradients(3):
        whole.step(x, gradient, 0.01)
        for shard, (start, stop) in zip(shards, pairwise(edges), strict=True):
            shard.step(y[start:stop], gradient[start:stop], 0.01)
    np.testing.assert_array_equal(x, y)


def test_loading_is_a_copy_and_keeps_means_of_squares_from_going_below_zero() -> None:
    optimizer = made("adam", 2)
    state = {"m": np.ones(2, np.float32), "v": np.array([-1, 4], np.float32), "steps": np.array(-3)}
    optimizer.load(state)
    state["m"][:] = 9
    assert optimizer.state()["m"].tolist() == [1, 1]
    assert optimizer.state()["v"].tolist() == [0, 4]
    assert optimizer.steps == 0
    x = np.zeros(2, np.float32)
    optimizer.step(x, np.zeros(2, np.float32), 0.1)
    assert np.isfinite(x).all()


@pytest.mark.parametrize("name", ["momentum", "rmsprop", "adagrad", "adam"])
def test_a_state_that_does_not_fit_is_refused_whole(name: OptimizerName) -> None:
    good = made(name, 3)
    good.step(np.zeros(3, np.float32), np.ones(3, np.float32), 0.1)
    optimizer = made(name, 3)
    for key, value in good.state().items():
        bad: list[np.ndarray | None] = [None, value.astype(np.float16), np.zeros(4, value.dtype)]
        if key != "steps":
            bad += [np.full(3, np.nan, np.float32), np.array([0, 0, np.inf], np.float32)]
        for wrong in bad:
            state = {**good.state(), key: wrong}
            if wrong is None:
                del state[key]
            with pytest.raises(LayoutMismatchError, match=key):
                optimizer.load(state)  # type: ignore[arg-type]
    assert optimizer.steps == 0
    assert not any(value.any() for value in optimizer.state().values())


def test_vectors_that_do_not_fit_are_refused() -> None:
    optimizer, three = made("adam", 3), np.zeros(3, np.float32)
    for args in ((three, np.zeros(4, np.float32)), (np.zeros(3), three), (three, np.zeros(3))):
        with pytest.raises(LayoutMismatchError):
            optimizer.step(args[0], args[1], 0.1)
    assert optimizer.steps == 0
    with pytest.raises(ValueError, match="float16"):
        made("sgd", 3, np.float16)
    with pytest.raises(ValueError, match="below 1"):
        make_optimizer("adam", 3, momentum=1.0)


@every
def test_nothing_of_the_shards_length_is_allocated(name: OptimizerName) -> None:
    size = 1 << 20
    optimizer, x, gradient = made(name, size), np.ones(size, np.float32), np.ones(size, np.float32)
    tracemalloc.start()
    try:
        optimizer.step(x, gradient, 0.01)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 17
