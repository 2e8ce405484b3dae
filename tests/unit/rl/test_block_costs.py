"""Measured costs: whose seconds, how many bytes, and that nothing else changes."""

from __future__ import annotations

import itertools
from typing import ClassVar

import pytest
import torch
from torch import nn

from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.sequential import RowBlock, block_map, blocks, measure_blocks

from .policies import make_inputs, make_policy


def test_seconds_are_medians_of_what_the_clock_says():
    policy = make_policy("mlp")
    obs, _ = make_inputs("mlp")
    ticks = itertools.accumulate(itertools.cycle([0.0, 1.0, 10.0]))  # before, between, after
    costs = measure_blocks(blocks(policy), obs.float(), clock=lambda: next(ticks), repeats=3)
    assert [cost.name for cost in costs] == ["0", "1", "2", "3"]
    assert all((cost.forward_s, cost.backward_s) == (1.0, 10.0) for cost in costs)


@pytest.mark.parametrize("name", ["mlp for control", "impala resnet", "lstm on a transformer"])
def test_bytes_and_names(name):
    policy = make_policy(name)
    obs, context = make_inputs(name, rows=3)
    inputs = obs.to(getattr(torch, policy.spec.obs_dtype))
    context = context._replace(state_BS=None if context.state_BS is None else context.state_BS.float())
    where = block_map(policy)
    made = blocks(policy)
    costs = measure_blocks(made, inputs, context, titles=where.titles, repeats=1)
    assert tuple(cost.name for cost in costs) == where.titles
    assert [cost.parameter_bytes for cost in costs] == [4 * where.size([i]) for i in range(len(made))]
    x = inputs
    for block, cost in zip(made, costs, strict=True):
        x = block(x, context)
        assert cost.output_bytes == 4 * x.numel()
        assert cost.kept_bytes == cost.output_bytes + cost.inner_bytes
        assert cost.forward_s > 0
        assert cost.backward_s > 0
        cost.check()


def test_parameters_and_gradients_stay():
    policy = make_policy("mlp")
    flat = FlatModule(policy, torch.device("cpu"))
    flat.gradients_D.fill_(2.0)
    before = flat.parameters_D.clone()
    obs, _ = make_inputs("mlp")
    measure_blocks(blocks(policy), obs.float(), repeats=1)
    assert torch.equal(flat.parameters_D, before)
    assert (flat.gradients_D == 2.0).all()
    assert not obs.requires_grad


def rows_of(*layers):
    return [RowBlock(layer, time=False) for layer in layers]


def test_what_a_block_keeps_beside_its_output_is_told_apart():
    dense, gelu = nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 9), nn.GELU(), nn.Linear(9, 2))
    costs = measure_blocks(rows_of(dense, gelu), torch.randn(3, 5), repeats=1)
    assert [cost.output_bytes for cost in costs] == [4 * 3 * 7, 4 * 3 * 2]
    assert [cost.inner_bytes for cost in costs] == [0, 4 * 3 * (9 + 9)]  # what comes into the GELU, and out


@pytest.mark.parametrize(("name", "times"), [("mlp", 1.0), ("impala resnet", 2.0), ("transformer", 4.0)])
def test_most_networks_keep_much_more_than_their_outputs(name, times):
    obs, context = make_inputs(name)
    made = make_policy(name)
    costs = measure_blocks(blocks(made), obs.to(getattr(torch, made.spec.obs_dtype)), context, repeats=1)
    kept, given = (sum(getattr(cost, what) for cost in costs) for what in ("kept_bytes", "output_bytes"))
    assert kept == given if times == 1.0 else kept > times * given


class Doubling(torch.autograd.Function):
    wanted: ClassVar[list[bool]] = []

    @staticmethod
    def forward(ctx, x, weight):
        return 2.0 * x * weight

    @staticmethod
    def backward(ctx, given):
        Doubling.wanted.append(ctx.needs_input_grad[0])
        return given, given.sum(0)


class Double(nn.Module):
    def __init__(self, learns=True):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5), requires_grad=learns)
        self.precisions = []

    def forward(self, x):
        self.precisions.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        return Doubling.apply(x, self.weight)


def test_nobody_wants_the_gradient_of_what_was_observed():
    Doubling.wanted = []
    measure_blocks(rows_of(Double(), Double()), torch.randn(3, 5), repeats=1)
    assert Doubling.wanted == [False, False, True, True]
    Doubling.wanted = []  # nor of what leads to no parameters
    measure_blocks(rows_of(nn.Tanh(), Double(learns=False), Double(), Double()), torch.randn(3, 5), repeats=1)
    assert Doubling.wanted == [False, False, True, True]


def test_blocks_run_in_the_precision_that_is_asked_for():
    double = Double()
    made = rows_of(nn.Linear(4, 5), double, nn.LayerNorm(5), nn.Linear(5, 5))
    costs = measure_blocks(made, torch.randn(3, 4), precision="bf16", repeats=1)
    assert set(double.precisions) == {torch.bfloat16}
    assert [cost.output_bytes for cost in costs] == [2 * 3 * 5] * 4  # as they travel
    assert costs[0].inner_bytes == 2 * 3 * 4  # the input, rounded
    assert (
        costs[2].inner_bytes == 2 * 3 * 5 + 2 * 4 * 3
    )  # the same output in float32, 2 statistics of each row
    assert costs[-1].inner_bytes == 2 * (3 * 5 + 5 * 5)  # and for the input's gradient the weights, rounded
    measure_blocks(rows_of(double), torch.randn(3, 5), repeats=1)
    assert double.precisions[-1] is None
