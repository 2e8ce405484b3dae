"""Exported policies against the policy itself, on a thousand observations of each kind of space."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig, TaskConfig
from p2pdrl.errors import P2PDRLError, UsageError
from p2pdrl.rl import export as exporting
from p2pdrl.tensors.checkpoint import to_bytes

from .spaces import TASKS, checkpoint, observations

ROWS = 1000
HAS_ONNX = all(importlib.util.find_spec(name) for name in exporting.ONNX_PACKAGES)
needs_onnx = pytest.mark.skipif(not HAS_ONNX, reason="needs the extra p2pdrl[onnx]")
QUICK = ("vector-masked", "dict-masked", "lstm")
"""Are exported by each run of the tests; all, whose compilation takes seconds each, by the slow ones."""


def by_name(obs: Any, mask: Any, path: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Arrays of a batch by the names of the inputs that they go into."""
    if isinstance(obs, dict | tuple):
        entries = obs.items() if isinstance(obs, dict) else enumerate(obs)
        found: dict[str, np.ndarray] = {}
        for key, value in entries:
            found |= by_name(value, None, (*path, str(key)))
    else:
        name = "_".join(path) or "observation"
        found = {f"observation_{name}" if name.isdecimal() else name: np.asarray(obs)}
    return found if mask is None else {**found, "action_mask": mask}


def feeds(module: Any, name: str, rows: int = ROWS) -> tuple[dict[str, np.ndarray], Any, dict[str, Any]]:
    """What goes into an exported policy, and the observations and options that the policy is asked with."""
    obs, mask = observations(TASKS[name], rows, seed=5)
    given = by_name(obs, mask)
    more = {} if mask is None else {"mask": mask}
    if module.inputs[-1].role == "state":
        size = module.inputs[-1].shape
        given["recurrent_state"] = np.random.default_rng(1).normal(0, 0.3, (rows, *size)).astype(np.float32)
        more["state"] = given["recurrent_state"]
    shaped = {
        info.name: given[info.name].reshape(-1, *info.shape).astype(info.dtype) for info in module.inputs
    }
    return shaped, obs, more


def run_file(data: bytes, form: str, module: Any, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run an exported file as somebody without p2pdrl would."""
    if form == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(data, providers=["CPUExecutionProvider"])
        names = [info.name for info in session.get_outputs()]
        return dict(zip(names, session.run(None, given), strict=True))
    tensors = [torch.from_numpy(given[info.name]) for info in module.inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program: Any = torch.jit.load(io.BytesIO(data)) if form == "torchscript" else None
        if program is None:
            program = torch.export.load(io.BytesIO(data)).module()
        return {name: found.numpy() for name, found in program(*tensors).items()}


def check(policy: Any, name: str, found: dict[str, np.ndarray], obs: Any, more: dict[str, Any]) -> None:
    """Compare with what the policy says by itself."""
    actions = policy.act(obs, deterministic=True, **more)
    if "state" in more:
        actions, after = actions
        np.testing.assert_allclose(found["next_recurrent_state"], after, rtol=1e-5, atol=1e-5)
    assert found["action"].dtype == actions.dtype
    assert found["action"].shape == actions.shape
    if actions.dtype.kind == "f":
        np.testing.assert_allclose(found["action"], actions, rtol=1e-5, atol=1e-5)
    else:
        # a tie within rounding may be broken either way
        heads = found.get("q_values", found.get("logits"))
        differs = (found["action"] != actions).reshape(ROWS, -1).any(1)
        assert differs.sum() <= 2, f"{differs.sum()} of {ROWS} actions differ"
        if actions.ndim == 1:
            picked = heads[np.arange(ROWS), actions - 1]
            np.testing.assert_allclose(picked, heads.max(1), rtol=1e-5, atol=1e-5)
    if "value" in found:
        np.testing.assert_allclose(found["value"], policy.value(obs, **more), rtol=1e-5, atol=1e-5)


def round_trip(policy: Any, name: str, form: str, folder: Any) -> dict[str, Any]:
    file = folder / {"onnx": "policy.onnx", "torch": "policy.pt2", "torchscript": "policy.pt"}[form]
    card = policy.export(file)
    module = policy.torch_module()
    given, obs, more = feeds(module, name)
    check(policy, name, run_file(file.read_bytes(), form, module, given), obs, more)
    assert card == json.loads(file.with_name(file.name + ".json").read_text())
    return card


@pytest.mark.parametrize("name", TASKS)
def test_the_module_computes_what_the_policy_does(policy_of, name):
    policy = policy_of(name)
    module = policy.torch_module()
    assert not any(parameter.requires_grad for parameter in module.parameters())
    given, obs, more = feeds(module, name)
    found = {
        key: value.numpy()
        for key, value in module(*(torch.from_numpy(given[info.name]) for info in module.inputs)).items()
    }
    assert list(found) == [info.name for info in module.outputs]
    check(policy, name, found, obs, more)


def test_the_module_has_parameters_of_its_own(policy_of):
    policy = policy_of("vector")
    obs, _ = observations(TASKS["vector"], 3)
    before = policy.value(obs)
    for parameter in policy.torch_module().parameters():
        parameter.zero_()
    np.testing.assert_array_equal(policy.value(obs), before)


@pytest.mark.parametrize("name", TASKS)
def test_torchscript_computes_what_the_policy_does(policy_of, tmp_path, name):
    round_trip(policy_of(name), name, "torchscript", tmp_path)


@pytest.mark.parametrize("name", QUICK[:1])
def test_an_exported_program_computes_what_the_policy_does(policy_of, tmp_path, name):
    round_trip(policy_of(name), name, "torch", tmp_path)


@needs_onnx
@pytest.mark.parametrize("name", QUICK)
def test_onnx_computes_what_the_policy_does(policy_of, tmp_path, name):
    round_trip(policy_of(name), name, "onnx", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["torch", pytest.param("onnx", marks=needs_onnx)])
@pytest.mark.parametrize("name", TASKS)
def test_all_policies_survive_all_formats(policy_of, tmp_path, name, form):
    round_trip(policy_of(name), name, form, tmp_path)


def test_the_card_says_what_goes_in_and_comes_out(policy_of, tmp_path):
    card = policy_of("dict-masked").export(tmp_path / "policy.pt")
    assert card["environment"] == "Still-v0"
    assert (card["algorithm"], card["env_steps"], card["mean_return"]) == ("ppo", 1234, 9.5)
    inputs = {info["name"]: info for info in card["inputs"]}
    assert inputs["tool"] == {"name": "tool", "dtype": "int64", "shape": ["batch", 1], "role": "observation"}
    assert inputs["action_mask"]["role"] == "mask"
    assert card["greatest_difference"] < 1e-5
    assert [info["name"] for info in card["outputs"]] == ["action", "logits", "value"]
    text = (tmp_path / "policy.pt.md").read_text()
    assert "| `joints` | float32 | batch × 3 | observation |" in text
    assert "1,234" in text


def test_formats_follow_endings(policy_of, tmp_path):
    with pytest.raises(UsageError, match=r"\.onnx, \.pt2, \.pt"):
        policy_of("vector").export(tmp_path / "policy.bin")


def test_missing_packages_are_told_before_any_work(monkeypatch, tmp_path, policy_of):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if "onnx" in name else real(name))
    with pytest.raises(UsageError, match=r"pip install 'p2pdrl\[onnx\]'"):
        policy_of("vector").export(tmp_path / "policy.onnx")
    assert not list(tmp_path.iterdir())


def test_a_file_that_computes_something_else_isnt_written(monkeypatch, tmp_path, policy_of):
    other = policy_of("vector").torch_module()
    for parameter in other.parameters():
        parameter.add_(0.5)
    real = torch.jit.trace
    monkeypatch.setattr(torch.jit, "trace", lambda _module, *args, **more: real(other, *args, **more))
    with pytest.raises(P2PDRLError, match="something else than the policy"):
        policy_of("vector").export(tmp_path / "policy.pt")
    assert not list(tmp_path.iterdir())


def test_what_a_compiler_cant_do_is_told(monkeypatch, tmp_path, policy_of):
    def fails(*_args, **_more):
        raise RuntimeError("no such operator")

    monkeypatch.setattr(torch.jit, "trace", fails)
    with pytest.raises(P2PDRLError, match=r"can't hold this policy \(RuntimeError: no such operator\)"):
        policy_of("vector").export(tmp_path / "policy.pt")


CARTPOLE = TaskConfig(
    env=EnvConfig(num_envs=1, normalize_observations=True), network=NetworkConfig(hidden=(8,))
)


def test_the_command_writes_what_a_checkpoint_holds(tmp_path):
    (tmp_path / "cart.safetensors").write_bytes(to_bytes(checkpoint(CARTPOLE)))
    command = [sys.executable, "-m", "p2pdrl", "export", str(tmp_path / "cart.safetensors")]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "cart.pt"), "--json"], capture_output=True, text=True, check=True
    )
    card = json.loads(done.stdout)
    assert (card["format"], card["environment"]) == ("torchscript", "CartPole-v1")
    assert (tmp_path / "cart.pt").stat().st_size == card["bytes"]
    assert done.stderr == ""
