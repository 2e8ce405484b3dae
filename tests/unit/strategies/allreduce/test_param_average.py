"""The outer optimizer, against torch's in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.strategies.allreduce.param_average import CHUNK, OuterOptimizer

SIZE = CHUNK + 9


@pytest.mark.parametrize(
    ("rate", "momentum", "nesterov"), [(1.0, 0.0, True), (0.7, 0.9, True), (0.5, 0.8, False)]
)
def test_it_is_sgd_on_the_negative_difference(rate, momentum, nesterov):
    rng = np.random.default_rng(3)
    x = rng.standard_normal(SIZE).astype(np.float32)
    v = np.zeros(SIZE if momentum else 0, np.float32)
    reference = torch.from_numpy(x.astype(np.float64))
    sgd = torch.optim.SGD([reference], lr=rate, momentum=momentum, nesterov=nesterov and momentum > 0)
    outer = OuterOptimizer(rate, momentum, nesterov=nesterov)
    for _ in range(5):
        delta = rng.standard_normal(SIZE).astype(np.float32)
        own = rng.standard_normal(SIZE).astype(np.float32)
        before = x.astype(np.float64)
        reference.grad = torch.from_numpy(-delta.astype(np.float64))
        sgd.step()
        changed = outer.step(x, v, delta, own)
        assert np.abs(x - reference.numpy()).max() < 5e-6
        assert changed == pytest.approx(np.linalg.norm(x - (before + own)), rel=1e-5)


def test_a_plain_step_leads_to_the_mean():
    x = np.array([1.0, 2.0], np.float32)
    changed = OuterOptimizer(1.0, 0.0, nesterov=True).step(
        x, x[:0], np.array([0.5, -1.0], np.float32), np.array([0.5, 1.0], np.float32)
    )
    assert x.tolist() == [1.5, 1.0]
    assert changed == 2.0
