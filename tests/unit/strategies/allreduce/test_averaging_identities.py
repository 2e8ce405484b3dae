"""Averaging workers against one big batch, which torch steps through in float64 on its own.

Every worker has rows of one linear regression, in different numbers; its gradient is the mean over them.
"""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from p2pdrl.config.strategy import GradAverageConfig, ParamAverageConfig
from p2pdrl.config.task import RegressionConfig
from p2pdrl.rl.sources.rows import make_rows, shard_batch

from .bowls import Bowls, until

pytestmark = pytest.mark.looptime

ROUNDS = 50
SIZE = 6
ROWS = (3, 5, 8, 4)
GRADIENTS = GradAverageConfig(compression="none", deadline_s=4.0)
EACH_STEP = ParamAverageConfig(compression="none", every_updates=1, deadline_s=4.0)
OPTIMIZERS = {
    "sgd": lambda x: torch.optim.SGD([x], lr=0.05),
    "momentum": lambda x: torch.optim.SGD([x], lr=0.02, momentum=0.9),
    "adam": lambda x: torch.optim.Adam([x], lr=0.02, eps=1e-5),
}


class Stepper:
    """A learner's optimizer, in float64."""

    def __init__(self, name: str) -> None:
        self._x = torch.zeros(SIZE, dtype=torch.float64)
        self._optimizer = OPTIMIZERS[name](self._x)

    def __call__(self, x, gradient):
        self._x.copy_(torch.from_numpy(x.astype(np.float64)))
        self._x.grad = torch.from_numpy(gradient.astype(np.float64))
        self._optimizer.step()
        return self._x.numpy().astype(np.float32)


def problem(seed=0):
    rng = np.random.default_rng(seed)
    start = rng.standard_normal(SIZE).astype(np.float32)
    return start, [(rng.standard_normal((m, SIZE)), rng.standard_normal(m)) for m in ROWS]


def big_batch(name, start, data):
    """The vector after each step on all rows at once."""
    a = torch.from_numpy(np.concatenate([a for a, _ in data]))
    b = torch.from_numpy(np.concatenate([b for _, b in data]))
    x = torch.from_numpy(start.astype(np.float64)).requires_grad_()
    optimizer, history = OPTIMIZERS[name](x), []
    for _ in range(ROUNDS):
        optimizer.zero_grad()
        (0.5 * ((a @ x - b) ** 2).mean()).backward()
        optimizer.step()
        history.append(x.detach().numpy().copy())
    return history


async def workers(config, name, start, data):
    """Each worker's vectors after each of `ROUNDS` rounds."""
    async with Bowls(config, nodes=0, size=SIZE) as bowls:
        for a, b in data:
            gradient = lambda x, a=a, b=b: a.T @ (a @ x - b) / len(b)  # noqa: E731
            node = bowls.add(gradient=gradient, samples=len(b), step=Stepper(name))
            node.learner.x = start.copy()
            node.learner.publish()
        bowls.swarm.introduce()
        await bowls.start()
        await until(lambda: min(node.strategy.outcomes.get("ok", 0) for node in bowls.nodes) > ROUNDS)
        # all took their mean, or that of the one who had, when gradients began to be averaged: an update each
        begun = int(isinstance(config, GradAverageConfig))
        return [node.learner.history[begun:][:ROUNDS] for node in bowls.nodes]


@pytest.mark.parametrize(("name", "within"), [("sgd", 1e-6), ("momentum", 1e-6), ("adam", 1e-5)])
async def test_averaged_gradients_are_one_big_batch(name, within):
    start, data = problem()
    expected = big_batch(name, start, data)
    for history in await workers(GRADIENTS, name, start, data):
        assert np.abs(np.array(history) - expected).max() < within * 2


def shards(rows=45, count=4, learners=3):
    """A data set's parts for so many learners: with 4 shards the first has two."""
    config = RegressionConfig(features=SIZE, rows=rows, sample="shards", shards=count, batch_size=rows)
    whole, _ = make_rows(config, 5)
    own = [shard_batch(config, rank, learners, 0) for rank in range(learners)]
    return [(whole.inputs_RF[n].astype(np.float64), whole.targets_R[n].astype(np.float64)) for n in own]


@pytest.mark.parametrize(("name", "within"), [("sgd", 1e-6), ("momentum", 1e-6), ("adam", 1e-5)])
@pytest.mark.parametrize("count", [3, 4], ids=["equal", "unequal"])
async def test_gradients_over_shards_are_that_of_the_whole_data_set(name, within, count):
    start, _ = problem()
    data = shards(count=count)
    assert len({len(b) for _, b in data}) == (1 if count == 3 else 2)
    expected = big_batch(name, start, data)
    for history in await workers(GRADIENTS, name, start, data):
        assert np.abs(np.array(history) - expected).max() < within


@pytest.mark.parametrize("reduce", ["mean", "sum"])
async def test_a_mean_counts_members_and_a_sum_adds_them(reduce):
    start, _ = problem()
    data = shards()
    x, expected = start.astype(np.float64), []
    for _ in range(ROUNDS):
        gradients = [a.T @ (a @ x - b) / len(b) for a, b in data]
        x = x - 0.05 * (np.sum(gradients, axis=0) if reduce == "sum" else np.mean(gradients, axis=0))
        expected.append(x)
    config = msgspec.structs.replace(GRADIENTS, reduce=reduce)
    for history in await workers(config, "sgd", start, data):
        assert np.abs(np.array(history) - expected).max() < 1e-6
    counted = np.array(big_batch("sgd", start, data))
    assert np.abs(np.array(expected) - counted).max() > 1e-2


async def test_replicas_stay_equal_though_each_would_take_another_learning_rate():
    rates = (0.3, 0.1, 0.2, 0.05, 0.02)
    async with Bowls(GRADIENTS, nodes=0, size=SIZE) as bowls:
        for rate in rates:
            bowls.add(learning_rate=rate)
        bowls.swarm.introduce()
        await bowls.start()
        await until(lambda: min(node.strategy.outcomes.get("ok", 0) for node in bowls.nodes) > ROUNDS)
        histories = [node.learner.history[1:][:ROUNDS] for node in bowls.nodes]
        mean = np.mean([node.target for node in bowls.nodes], axis=0, dtype=np.float64)
        assert {node.learner.told_learning_rate for node in bowls.nodes} == {0.1}
    for history in histories[1:]:
        assert np.array(history).tobytes() == np.array(histories[0]).tobytes()
    x = np.array(histories[0], dtype=np.float64)
    expected = x[:-1] - 0.1 * (x[:-1] - mean)
    assert np.abs(x[1:] - expected).max() < 1e-6


async def test_parameters_averaged_each_step_of_sgd_are_one_big_batch():
    start, data = problem()
    expected = big_batch("sgd", start, data)
    for history in await workers(EACH_STEP, "sgd", start, data):
        assert np.abs(np.array(history) - expected).max() < 2e-6


async def test_parameters_averaged_each_step_of_adam_are_something_else():
    """They end 0.45 times as far from the big batch's end as that is from the start; see `param_average`."""
    start, data = problem()
    expected = np.array(big_batch("adam", start, data))
    way = np.linalg.norm(expected[-1] - start)
    for history in await workers(EACH_STEP, "adam", start, data):
        assert np.linalg.norm(history[-1] - expected[-1]) / way == pytest.approx(0.4475, abs=0.002)
