"""Measured costs: whose seconds, how many bytes, and that nothing else changes."""

from __future__ import annotations

import itertools

import pytest
import torch

from p2pdrl.rl.block_costs import measure_blocks
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.sequential import block_map, blocks

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
        assert cost.activation_bytes == 4 * x.numel()
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
