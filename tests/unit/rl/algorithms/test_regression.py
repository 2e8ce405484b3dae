"""The losses of regressions against formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.rl.algorithms.regression import CrossEntropy, LeastSquares


def test_least_squares():
    outputs = torch.tensor([[1.0], [2.0], [4.0]])
    targets = {"targets": torch.tensor([0.0, 2.0, 1.0])}
    loss, terms = LeastSquares()(outputs, targets)
    assert float(loss) == 0.5 * (1 + 0 + 9)
    assert terms.tolist() == [5.0]
    masked, _ = LeastSquares()(outputs, {**targets, "valid": torch.tensor([True, True, False])})
    assert float(masked) == 0.5


def test_cross_entropy():
    logits = np.random.default_rng(0).normal(size=(6, 4))
    classes = np.array([0, 3, 1, 1, 2, 0])
    loss, terms = CrossEntropy()(torch.from_numpy(logits), {"targets": torch.from_numpy(classes)})
    expected = (np.log(np.exp(logits).sum(1)) - logits[np.arange(6), classes]).sum()
    assert float(loss) == pytest.approx(expected, rel=1e-12)
    assert terms.shape == (1,)


def test_over_rows_makes_parts_of_means():
    objective = LeastSquares()
    outputs = torch.tensor([[1.0], [2.0], [4.0]])
    targets = torch.tensor([0.0, 2.0, 1.0])
    shares = [objective.over(3)(outputs[piece], {"targets": targets[piece]})[0] for piece in ([0], [1, 2])]
    assert float(sum(shares)) == pytest.approx(5.0 / 3.0)
    assert objective == LeastSquares()  # itself unchanged
