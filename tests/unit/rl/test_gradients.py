"""Every engine's gradient is the full batch's, however the batch is cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from p2pdrl.config.task import A2CConfig, EnvConfig, NetworkConfig, PPOConfig, RegressionConfig, TaskConfig
from p2pdrl.rl.engines import EngineOptions
from p2pdrl.rl.gradients import Accumulated, Minibatch, OwnStepper, WholeBatch, cut
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.registry import build_trainer
from p2pdrl.tensors.optimizers import SGD

from .gradient_cases import CASES, reference

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}


def relative(found, expected):
    """The largest difference, in the scale of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 8, 100])
@pytest.mark.parametrize("name", CASES)
def test_gradients_and_terms_are_the_full_batchs(name, microbatches, dtype):
    case = CASES[name](dtype=dtype)
    expected, expected_terms = reference(case)
    engine = Accumulated(case.flat, case.forward, microbatches)
    for _ in range(2):  # a second time: nothing is left of the first
        terms = engine.gradients(case.batch, case.objective)
        assert relative(case.flat.gradients_D, expected) < BOUNDS[dtype]
        assert relative(terms, expected_terms) < BOUNDS[dtype]
    assert not terms.requires_grad


@pytest.mark.parametrize("name", CASES)
def test_the_whole_batch_is_one_microbatch_to_the_last_bit(name):
    found = []
    for engine in (WholeBatch, lambda *arguments: Accumulated(*arguments, 1)):
        case = CASES[name](dtype=torch.float32)
        terms = engine(case.flat, case.forward).gradients(case.batch, case.objective)
        found.append((case.flat.gradients_D.numpy().tobytes(), terms.numpy().tobytes()))
    assert found[0] == found[1]


@pytest.mark.parametrize("max_grad_norm", [1e-3, 1e3])
@pytest.mark.parametrize("microbatches", [2, 3, 4, 8])
def test_clipping_sees_the_full_batchs_norm(microbatches, max_grad_norm):
    steps = []
    for engine in (None, microbatches):
        case = CASES["ppo"]()
        run = WholeBatch if engine is None else lambda *arguments: Accumulated(*arguments, microbatches)
        run(case.flat, case.forward).gradients(case.batch, case.objective)
        before = case.flat.parameters_D.clone()
        norm = OwnStepper().step(
            Optimizer(SGD(), case.flat),
            learning_rate=1.0,
            max_grad_norm=max_grad_norm,
            samples=case.batch.rows,
            left=0,
        )
        steps.append((norm, case.flat.parameters_D - before))
    (norm, step), (cut_norm, cut_step) = steps
    assert cut_norm == pytest.approx(norm, rel=1e-12)
    assert relative(cut_step, step) < 1e-12
    assert float(step.norm()) == pytest.approx(min(norm, max_grad_norm), rel=1e-9)


def test_what_is_not_a_number_stays_so():
    case = CASES["a2c"]()
    case.batch.targets["returns"][5] = float("nan")
    terms = Accumulated(case.flat, case.forward, 4).gradients(case.batch, case.objective)
    assert torch.isnan(terms[1])
    assert not torch.isfinite(case.flat.gradients_D.norm())


# --- the cut -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "parts", "sizes"),
    [(8, 4, [2, 2, 2, 2]), (10, 4, [3, 3, 2, 2]), (3, 8, [1, 1, 1]), (1, 2, [1]), (0, 2, [0]), (5, 1, [5])],
)
def test_parts_differ_by_one_row_at_most_and_none_is_empty(rows, parts, sizes):
    batch = Minibatch(torch.arange(rows), {"x": 10 * torch.arange(rows)}, rows)
    pieces = cut(batch, parts)
    assert [len(piece.inputs) for piece in pieces] == sizes
    assert torch.equal(torch.cat([piece.inputs for piece in pieces]), batch.inputs)
    assert torch.equal(torch.cat([piece.targets["x"] for piece in pieces]), batch.targets["x"])
    assert all(piece.rows == rows for piece in pieces)


def test_environments_are_cut_and_time_is_not():
    context = RecurrentContext(torch.zeros(5, 7, dtype=torch.bool), torch.arange(5.0)[:, None])
    batch = Minibatch(torch.zeros(5, 7, 2), {"x": torch.zeros(5, 7)}, 35, context)
    first, second = cut(batch, 2)
    assert first.inputs.shape == (3, 7, 2)
    assert second.targets["x"].shape == (2, 7)
    assert isinstance(first.context, RecurrentContext)
    assert first.context.starts_BT.shape == (3, 7)
    assert second.context.state_BS.tolist() == [[3.0], [4.0]]
    alone = cut(batch._replace(context=RecurrentContext(None, context.state_BS)), 2)[1]
    assert alone.context.starts_BT is None


def test_parts_are_views():
    batch = Minibatch(torch.zeros(6, 3), {"x": torch.zeros(6)}, 6)
    cut(batch, 4)[1].inputs.fill_(1.0)
    assert batch.inputs.sum() == 6.0


# --- whole trainings -----------------------------------------------------------------------------

ENV = EnvConfig(num_envs=4)
TASKS = {
    "ppo": TaskConfig(env=ENV, algorithm=PPOConfig(unroll_steps=32, epochs=2, minibatches=3)),
    "a2c": TaskConfig(env=EnvConfig(id="Pendulum-v1", num_envs=4), algorithm=A2CConfig()),
    "ppo-lstm": TaskConfig(
        env=ENV,
        network=NetworkConfig(hidden=(8,), core="lstm", core_size=8),
        algorithm=PPOConfig(unroll_steps=32, epochs=2, minibatches=2),
    ),
    "least_squares": TaskConfig(algorithm=RegressionConfig()),
    "classifier": TaskConfig(algorithm=RegressionConfig(kind="classifier", hidden=(16,))),
}
WAYS = {
    "accumulated": EngineOptions(microbatches=3),
    "checkpointed": EngineOptions(checkpoint_activations=True),
    "both": EngineOptions(microbatches=4, checkpoint_activations=True),
    "auto": EngineOptions(microbatches="auto"),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", TASKS)
def test_a_seed_gives_the_same_curve_however_gradients_come_about(name, way):
    runs = []
    for options in (EngineOptions(), WAYS[way]):
        trainer = build_trainer(TASKS[name], 3, "cpu", engine=options)
        metrics = [trainer.step().metrics for _ in range(5)]
        trainer.close()
        runs.append((trainer.flat.copy(), metrics))
    (flat, curve), (other_flat, other_curve) = runs
    np.testing.assert_allclose(other_flat, flat, rtol=1e-4, atol=1e-5)
    for metrics, others in zip(curve, other_curve, strict=True):
        assert set(others) - set(metrics) <= {"microbatches"}
        for key, value in metrics.items():
            assert others[key] == pytest.approx(value, rel=1e-3, abs=1e-4), key


def test_the_engine_may_be_replaced():
    trainer = build_trainer(TASKS["a2c"], 3, "cpu")
    seen = []

    class Watching:
        def __init__(self, inner):
            self._inner = inner

        def gradients(self, batch, objective):
            seen.append(batch.rows)
            return self._inner.gradients(batch, objective)

        def metrics(self):
            return {"bubble": 0.25}

    trainer.engine = Watching(trainer.engine)
    stats = trainer.step()
    trainer.close()
    assert seen == [stats.env_steps]
    assert stats.metrics["bubble"] == 0.25
