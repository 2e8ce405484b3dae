"""The inference process' answers against the policy itself, through shared memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.config.task import EnvConfig, NetworkConfig, RegressionConfig, TaskConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError, WorkerError
from p2pdrl.rl.inference import PolicyInference
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.inference_slots import InferenceSlots
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.workers.inference import InferenceWorker
from p2pdrl.workers.protocol import Infer, Inferred

ROWS = 4096


class Bench:
    """A worker, the daemon's end of its memory, and the policy that it should act like."""

    def __init__(self, task: TaskConfig, seed: int = 3) -> None:
        self.trainer = build_trainer(task, 1, "cpu")
        with torch.no_grad():  # far from uniform, so that actions differ
            generator = torch.Generator().manual_seed(5)
            for parameter in self.trainer.policy.parameters():
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        self.inference = PolicyInference(task, seed)
        shape = self.inference.obs_shape
        self.vector = np.concatenate(
            [one.detach().numpy().reshape(-1) for one in self.trainer.policy.parameters()]
        )
        self.region = SharedRegion.create(SharedPolicy.nbytes_of(len(self.vector), shape), "policy")
        self.shared = SharedPolicy(self.region, len(self.vector), shape)
        self.worker = InferenceWorker(self.inference, self.region, len(self.vector))
        spec = self.inference.spec
        slots_region = SharedRegion.create(InferenceSlots.nbytes_of(spec, ROWS, 2), "slots")
        self.slots = InferenceSlots(slots_region, spec, ROWS, 2)
        self.worker.use_slots(slots_region, ROWS, 2)

    def publish(self, version: int = 7, mean=None, scale=None) -> None:
        shape = self.inference.obs_shape
        mean = np.zeros(shape) if mean is None else mean
        scale = np.ones(shape) if scale is None else scale
        self.shared.write(self.vector, ActingPolicy(version, 0.5, mean, scale))

    def ask(self, obs, greedy: int, slot: int = 0):
        count = len(obs)
        self.slots[slot].obs_NX[:count] = obs
        assert self.worker.infer(Infer(slot, count, greedy)) == Inferred(slot, 7)
        found = self.slots[slot]
        return (
            found.actions_NA[:count].copy(),
            found.log_probs_N[:count].copy(),
            found.values_N[:count].copy(),
        )


def some(count, size=4, seed=0):
    return np.random.default_rng(seed).normal(size=(count, size)).astype(np.float32)


def test_greedy_actions_log_probs_and_values_are_the_policys():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = some(64)
    actions, log_probs, values = bench.ask(obs, greedy=64)
    with torch.inference_mode():
        outputs = bench.trainer.policy.outputs(torch.from_numpy(obs))
        logits = outputs.policy.numpy().astype(np.float64)
    assert actions.tolist() == logits.argmax(1).tolist()
    assert len(set(actions.tolist())) == 2
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(log_probs, expected[np.arange(64), actions], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, outputs.values.numpy(), rtol=1e-6)


def test_sampled_actions_have_the_policys_distribution():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = some(1)
    actions, log_probs, _ = bench.ask(np.repeat(obs, ROWS, 0), greedy=0)
    with torch.inference_mode():
        logits = bench.trainer.policy.outputs(torch.from_numpy(obs)).policy[0].double().numpy()
    p = np.exp(logits) / np.exp(logits).sum()
    assert abs((actions == 1).mean() - p[1]) < 4 * np.sqrt(p[0] * p[1] / ROWS)
    np.testing.assert_allclose(np.exp(log_probs), p[actions], rtol=1e-4)


def test_a_batch_may_hold_both_kinds():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = np.repeat(some(1), 600, 0)
    actions, _, _ = bench.ask(obs, greedy=200, slot=1)
    assert len(set(actions[:200].tolist())) == 1
    assert len(set(actions[200:].tolist())) == 2


def test_observations_are_normalised_by_the_moments_given():
    bench = Bench(TaskConfig(env=EnvConfig(normalize_observations=True)))
    own, others = Moments.zeros((4,)), Moments.zeros((4,))
    own.update(some(50, seed=1) * 3 + 1)
    others.update(some(70, seed=2) * 5 - 2)
    merged = np.concatenate([some(50, seed=1) * 3 + 1, some(70, seed=2) * 5 - 2]).astype(np.float64)
    mean, scale = Moments.merge([own, others]).standardization
    bench.publish(mean=mean, scale=scale)
    obs = some(32) * 20
    actions, _, values = bench.ask(obs, greedy=32)
    seen = np.clip((obs - merged.mean(0)) / np.sqrt(merged.var(0) + 1e-8), -10, 10).astype(np.float32)
    with torch.inference_mode():
        outputs = bench.trainer.policy.outputs(torch.from_numpy(seen))
    assert actions.tolist() == outputs.policy.argmax(1).tolist()
    np.testing.assert_allclose(values, outputs.values.numpy(), rtol=1e-4, atol=1e-5)


def test_continuous_actions_are_within_the_environments_bounds():
    bench = Bench(TaskConfig(env=EnvConfig(id="Pendulum-v1")))
    bench.publish()
    spec = bench.inference.spec
    assert (spec.action_shape, spec.action_dtype) == ((1,), "float32")
    obs = some(200, 3) * 10
    actions, _, _ = bench.ask(obs, greedy=0)
    assert np.abs(actions).max() <= 2.0
    with torch.inference_mode():
        means = bench.trainer.policy.outputs(torch.from_numpy(obs)).policy.numpy()
    greedy, _, _ = bench.ask(obs, greedy=200)
    np.testing.assert_allclose(greedy, means.clip(-2, 2), rtol=1e-5, atol=1e-6)


def test_newer_parameters_are_used_from_the_next_batch_on():
    bench = Bench(TaskConfig())
    bench.publish()
    obs = some(8)
    _, _, before = bench.ask(obs, greedy=8)
    bench.vector = bench.vector * 0
    bench.shared.write(bench.vector, ActingPolicy(9, 0.0, np.zeros(0), np.zeros(0)))
    assert bench.worker.infer(Infer(0, 8, 8)) == Inferred(0, 9)
    assert not np.array_equal(bench.slots[0].values_N[:8], before)
    assert not bench.slots[0].values_N[:8].any()


def test_what_cant_work_is_refused():
    with pytest.raises(ConfigError, match="memory"):
        PolicyInference(TaskConfig(network=NetworkConfig(core="lstm")), 1)
    with pytest.raises(ConfigError, match="regression"):
        PolicyInference(TaskConfig(algorithm=RegressionConfig()), 1)
    bench = Bench(TaskConfig())
    with pytest.raises(LayoutMismatchError, match="parameters"):
        InferenceWorker(bench.inference, bench.region, 3)
    with pytest.raises(WorkerError, match="no policy"):
        bench.worker.infer(Infer(0, 1, 1))
    fresh = InferenceWorker(bench.inference, bench.region, len(bench.vector))
    with pytest.raises(WorkerError, match="before the memory"):
        fresh.infer(Infer(0, 1, 1))
