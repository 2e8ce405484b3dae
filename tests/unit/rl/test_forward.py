"""Running a model in blocks that are computed anew, and in bfloat16."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.config.task import NetworkConfig
from p2pdrl.rl.engines import policy_forward
from p2pdrl.rl.envs import Discrete, EnvSpec
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated, WholeBatch
from p2pdrl.rl.networks.lstm import NO_CONTEXT
from p2pdrl.rl.policy import ActorCritic
from p2pdrl.rl.tuned_gradients import Meter

from .gradient_cases import CASES, CPU, reference


def relative(found, expected):
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_checkpointing_changes_nothing(name, microbatches):
    case = CASES[name](checkpoint_activations=True)
    expected, expected_terms = reference(case)
    terms = Accumulated(case.flat, case.forward, microbatches).gradients(case.batch, case.objective)
    torch.testing.assert_close(case.flat.gradients_D, expected, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(terms, expected_terms, rtol=1e-12, atol=0)


def kept_bytes(policy, forward):
    """The most that autograd keeps, parameters and the insides of checkpointed blocks aside."""
    flat = FlatModule(policy, CPU)
    begin = flat.parameters_D.data_ptr()
    meter = Meter(10**9, range(begin, begin + flat.parameters_D.nbytes))
    obs = torch.randn(64, 6, generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda kept: kept.tensor):
        outputs = forward(obs, NO_CONTEXT)
        (outputs.policy.sum() + outputs.values.sum()).backward()
    return meter.peak_bytes


def test_checkpointing_keeps_what_passes_between_blocks():
    spec = EnvSpec((6,), "float32", Discrete(3))
    network = NetworkConfig(kind="transformer", layers=4, heads=2, width=16)
    policy = ActorCritic(spec, network, 0)
    calls = []
    policy.trunk.layers()[1].register_forward_pre_hook(lambda *_: calls.append(1))
    whole = kept_bytes(policy, policy_forward(policy))
    assert len(calls) == 1
    kept = kept_bytes(policy, policy_forward(policy, checkpoint_activations=True))
    assert len(calls) == 3  # once more on the way back
    between = 8 * 64 * 6 * 16 * 4  # 4 layers of 2 blocks; 64 rows, 6 tokens of 16 numbers
    assert between < kept < 1.2 * between
    assert kept < whole / 5


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_bf16_is_near(name, checkpoint):
    case = CASES[name](dtype=torch.float32)
    WholeBatch(case.flat, case.forward).gradients(case.batch, case.objective)
    expected = case.flat.gradients_D.clone()
    half = CASES[name](dtype=torch.float32, precision="bf16", checkpoint_activations=checkpoint)
    terms = Accumulated(half.flat, half.forward, 3).gradients(half.batch, half.objective)
    assert 1e-5 < relative(half.flat.gradients_D, expected) < 0.03
    assert half.flat.gradients_D.dtype == terms.dtype == torch.float32


@pytest.mark.parametrize("name", ["ppo", "ppo-transformer", "classifier"])
def test_outputs_of_bf16_are_float32_again(name):
    case = CASES[name](dtype=torch.float32, precision="bf16")
    outputs = case.forward(case.batch.inputs, case.batch.context)
    for output in outputs if isinstance(outputs, tuple) else (outputs,):
        assert output is None or output.dtype == torch.float32


@pytest.mark.parametrize("microbatches", [2, 4])
def test_microbatches_of_bf16_are_the_whole_of_bf16(microbatches):
    """One decision for all of them: rounding of each row is its own, whatever batch it comes in."""
    case = CASES["ppo"](dtype=torch.float32, precision="bf16")
    WholeBatch(case.flat, case.forward).gradients(case.batch, case.objective)
    whole = case.flat.gradients_D.clone()
    Accumulated(case.flat, case.forward, microbatches).gradients(case.batch, case.objective)
    # gradients of weights are sums over a part's rows, rounded to bfloat16 once per part
    assert relative(case.flat.gradients_D, whole) < 0.01
