"""Running a model in blocks that are computed anew, in bfloat16 and float16, and compiled."""

from __future__ import annotations

import importlib
import shutil

import pytest
import torch

from p2pdrl.config.task import NetworkConfig
from p2pdrl.errors import ConfigError
from p2pdrl.rl.engines import EngineOptions, LossScaled, make_engine, policy_forward
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


# --- float16 -------------------------------------------------------------------------------------


class Told:
    """An engine whose gradients are a loss scale times given ones, in float16's range."""

    def __init__(self, flat, per_loss):
        self.flat, self.per_loss, self.scales = flat, per_loss, []

    def gradients(self, batch, objective):
        loss, terms = objective(torch.ones(()), {})
        self.scales.append(float(loss))
        self.flat.gradients_D.fill_(float((loss * self.per_loss).half()))
        return terms

    def metrics(self):
        return {}


class One:
    """The loss is what the model gives."""

    target_names, terms = (), 1

    def over(self, rows):
        return self

    def __call__(self, outputs, targets):
        return outputs, outputs.detach()[None]


@pytest.fixture
def flat():
    return FlatModule(torch.nn.Linear(2, 1), CPU)


@pytest.mark.parametrize("name", ["ppo", "ppo-transformer", "classifier"])
def test_gradients_of_float16_are_near_and_not_scaled(name):
    case = CASES[name](dtype=torch.float32)
    WholeBatch(case.flat, case.forward).gradients(case.batch, case.objective)
    expected = case.flat.gradients_D.clone()
    half = CASES[name](dtype=torch.float32, precision="fp16")
    engine = make_engine(EngineOptions(microbatches=3), half.flat, half.forward, "fp16")
    terms = engine.gradients(half.batch, half.objective)
    assert 1e-6 < relative(half.flat.gradients_D, expected) < 0.01
    assert half.flat.gradients_D.dtype == terms.dtype == torch.float32
    assert engine.metrics() == {"microbatches": 3.0, "loss_scale": LossScaled.FIRST}


def test_a_gradient_below_float16s_smallest_number_is_kept(flat):
    assert torch.tensor(1e-9).half() == 0.0
    LossScaled(flat, Told(flat, 1e-9)).gradients(None, One())
    torch.testing.assert_close(flat.gradients_D, torch.full((3,), 1e-9), rtol=1e-3, atol=0)


def test_an_infinity_halves_the_scale_until_gradients_fit(flat):
    engine = LossScaled(flat, Told(flat, 10.0))  # float16 ends at 65,504
    seen = []
    for _ in range(6):
        terms = engine.gradients(None, One())
        seen.append(bool(flat.gradients_D.isfinite().all()))
        assert terms.tolist() == [1.0]
    assert seen == [False, False, False, False, True, True]
    assert engine.metrics() == {"loss_scale": LossScaled.FIRST / 16}
    torch.testing.assert_close(flat.gradients_D, torch.full((3,), 10.0))


def test_the_scale_doubles_after_two_thousand_clean_gradients(flat):
    told = Told(flat, 1e-6)
    engine = LossScaled(flat, told)
    for _ in range(2001):
        engine.gradients(None, One())
    assert told.scales[-2:] == [LossScaled.FIRST, 2 * LossScaled.FIRST]


# --- compiled ------------------------------------------------------------------------------------


def test_without_a_compiler_it_says_what_to_do(flat, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ConfigError, match=r"install one .* or set it to false"):
        make_engine(EngineOptions(compiled=True), flat, lambda inputs, _: inputs)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler: apt install g++")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # of its own jit
@pytest.mark.parametrize("name", ["ppo", "ppo-transformer"])
def test_compiled_gradients_are_the_same(name, monkeypatch):
    # else it keeps threads for the next compilation
    monkeypatch.setattr(importlib.import_module("torch._inductor.config"), "compile_threads", 1)
    case = CASES[name](dtype=torch.float32)
    WholeBatch(case.flat, case.forward).gradients(case.batch, case.objective)
    expected = case.flat.gradients_D.clone()
    engine = make_engine(EngineOptions(compiled=True), case.flat, case.forward)
    engine.gradients(case.batch, case.objective)
    assert relative(case.flat.gradients_D, expected) < 1e-5
