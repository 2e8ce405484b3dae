"""What autograd keeps, against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2pdrl.rl.sequential import saved_bytes


def float_bytes(*floats: int) -> int:
    return 4 * sum(floats)


def run(module, x):
    return saved_bytes(lambda: module(x), [x, *module.parameters()])


@pytest.mark.parametrize(
    ("module", "kept"),
    [
        (nn.Linear(5, 7), 0),  # its input, which is there anyway
        (nn.Tanh(), 0),  # its output, the same
        (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)), float_bytes(3 * 7)),
        (nn.Sequential(nn.Linear(5, 7), nn.GELU()), float_bytes(3 * 7)),
        (nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 2)), float_bytes(2 * 3 * 7)),
        (nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Unflatten(1, (7, 1)), nn.Flatten(), nn.Tanh()), 84),
    ],
)
def test_each_piece_of_memory_counts_once(module, kept):
    torch.manual_seed(0)
    _, found = run(module, torch.randn(3, 5))
    assert found == kept


def test_of_a_view_all_counts_that_it_is_a_view_of():
    def forward():
        wide = torch.tanh(x) * 2.0
        return wide[:, :1].exp() @ weight

    x, weight = torch.randn(3, 5), torch.randn(1, 2, requires_grad=True)
    _, found = saved_bytes(forward, [x, weight])
    assert found == float_bytes(3)
    x.requires_grad_()
    _, found = saved_bytes(lambda: torch.tanh(x)[:, :1] * weight[:, :1], [x, weight])
    assert found == float_bytes(3 * 5)


def test_the_backward_works_as_without():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2), nn.LogSoftmax(-1))
    x = torch.randn(3, 5)
    expected = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    output, _ = run(module, x)
    found = torch.autograd.grad(output.square().sum(), list(module.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
