"""A pipeline's gradients, steps and states are those of the model in one piece."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.pipeline.plan import Plan
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.forward import module_forward
from p2pdrl.rl.gradients import Accumulated, Batch, WholeBatch
from p2pdrl.rl.networks.lstm import Context
from p2pdrl.rl.objectives.regression import TARGETS, CrossEntropy
from p2pdrl.rl.optimizers import SGD, Adagrad, Adam, Momentum, RMSProp
from p2pdrl.rl.stages.parts import module_parts
from p2pdrl.rl.stages.pipelined import Pipelined
from p2pdrl.rl.stages.rows import RowSpec
from p2pdrl.rl.stepping import OwnStepper

from ..gradient_cases import reference
from .pipelines import (
    A2C,
    CPU,
    MODELS,
    PPO,
    TIMEOUT_S,
    Pipeline,
    framed_ring,
    make_case,
    make_plan,
    step_with,
)

BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-5}
MICROBATCHES = (1, 2, 4, 8)
LAYOUTS = [
    *[("gpipe", stages, stages) for stages in (1, 2, 3, 4)],
    *[("1f1b", stages, stages) for stages in (1, 2, 3, 4)],
    ("interleaved", 2, 1),
    ("interleaved", 4, 2),
]


def relative(found, expected):
    """The largest difference, in the scale of the largest number."""
    return float((found - expected).abs().max() / expected.abs().max())


def some_by_default():
    """All layouts with the smallest model, all models with the deepest cuts, float32 with a few of them."""
    for name, layout, dtype in itertools.product(MODELS, LAYOUTS, BOUNDS):
        deep = layout[1] == 4 and (dtype == torch.float64 or name in ("resnet", "lstm"))
        quick = deep or (name == "mlp" and dtype == torch.float64)
        yield pytest.param(name, *layout, dtype, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "schedule", "stages", "ranks", "dtype"), list(some_by_default()))
def test_gradients_and_terms_are_the_full_batchs(name, schedule, stages, ranks, dtype):
    case, parts = make_case(name, dtype)
    expected, expected_terms = reference(case)
    for microbatches in MICROBATCHES:
        plan = make_plan(parts, stages, microbatches, schedule, ranks)
        with Pipeline(parts, plan) as pipeline:
            for _ in range(2):  # a second time: nothing is left of the first
                terms = pipeline.head.gradients(case.batch, case.objective)
                norm = step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
                assert relative(pipeline.gradient(parts), expected) < BOUNDS[dtype]
                assert relative(terms, expected_terms) < BOUNDS[dtype]
                assert norm == pytest.approx(float(expected.norm()), rel=BOUNDS[dtype])
        assert not terms.requires_grad


@pytest.mark.parametrize(("stages", "ranks"), [(6, 3), (6, 2), (6, 1), (4, 2)])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 6, 8])
def test_interleaved_on_more_ranks_and_over_bytes(stages, ranks, microbatches):
    case, parts = make_case("mlp")
    expected, _ = reference(case)
    plan = make_plan(parts, stages, microbatches, "interleaved", ranks)
    with Pipeline(parts, plan, framed_ring) as pipeline:
        for _ in range(2):
            pipeline.head.gradients(case.batch, case.objective)
            step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
            assert relative(pipeline.gradient(parts), expected) < 1e-12


@pytest.mark.parametrize("name", ["lstm", "mlp-control", "cnn"])
def test_over_bytes_too_targets_and_context_arrive(name):
    case, parts = make_case(name, torch.float32, A2C)
    expected, expected_terms = reference(case)
    with Pipeline(parts, make_plan(parts, 3, 4), framed_ring) as pipeline:
        terms = pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
        assert relative(pipeline.gradient(parts), expected) < 1e-5
        assert relative(terms, expected_terms) < 1e-5


def test_where_the_chain_is_cut_makes_no_difference_to_the_last_bit():
    found = set()
    for stages in (1, 2, 3, 4, 6):
        case, parts = make_case("mlp", torch.float32)
        with Pipeline(parts, make_plan(parts, stages, 3)) as pipeline:
            for _ in range(3):
                pipeline.head.gradients(case.batch, case.objective)
                step_with(pipeline, max_grad_norm=1e9)
            found.add(pipeline.head.collect(state=True).vector_D.tobytes())
    assert len(found) == 1


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_fewer_rows_than_microbatches(rows):
    case, parts = make_case("mlp", rows=rows)
    expected, _ = reference(case)
    plan = make_plan(parts, 4, 8, "interleaved", 2)
    with Pipeline(parts, plan) as pipeline:
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
        assert relative(pipeline.gradient(parts), expected) < 1e-12
        assert pipeline.head.metrics()["microbatches"] == rows


def test_batches_of_changing_size():
    case, parts = make_case("mlp")
    with Pipeline(parts, make_plan(parts, 3, 2)) as pipeline:
        for rows in (11, 3, 7, 1, 11):
            batch = case.batch._replace(
                inputs=case.batch.inputs[:rows],
                targets={name: target[:rows] for name, target in case.batch.targets.items()},
                rows=rows,
            )
            expected, _ = reference(dataclasses.replace(case, batch=batch))
            pipeline.head.gradients(batch, case.objective)
            step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
            assert relative(pipeline.gradient(parts), expected) < 1e-12


class Views(nn.Module):
    def forward(self, x):
        return x.unflatten(1, (2, 3)).flatten(1)


@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_blocks_that_only_look_at_their_input_otherwise(microbatches):
    """Gradients pass through them in the memory in which they came."""
    generator = torch.Generator().manual_seed(0)
    layers = [nn.Linear(5, 6), nn.Linear(6, 6), Views(), nn.Linear(6, 4)]
    flat = FlatModule(nn.Sequential(*layers), CPU, torch.float64)
    flat.parameters_D.copy_(torch.randn(flat.layout.size, generator=generator))
    parts = module_parts(
        flat.module,
        layers,
        CrossEntropy(),
        SGD(flat.parameters_D, flat.gradients_D),
        inputs=RowSpec((5,), torch.float64),
        targets=RowSpec((), torch.int64, 4),
        most_rows=32,
    )
    targets = torch.randint(4, (32,), generator=generator)
    batch = Batch(torch.randn(32, 5, generator=generator).double(), {TARGETS: targets}, 32)
    WholeBatch(flat, module_forward(layers)).gradients(batch, parts.objective)
    with Pipeline(parts, Plan(4, (1, 2, 3), "interleaved", microbatches, 2)) as pipeline:
        for _ in range(5):
            pipeline.head.gradients(batch, parts.objective)
            step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
            assert relative(pipeline.gradient(parts), flat.gradients_D) < 1e-12


def test_the_objective_of_each_batch_counts():
    case, parts = make_case("mlp")
    other = dataclasses.replace(PPO, clip=0.01, entropy_coef=0.3)
    expected, _ = reference(dataclasses.replace(case, objective=other))
    with Pipeline(parts, make_plan(parts, 2, 2)) as pipeline:
        pipeline.head.gradients(case.batch, other)
        step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
        assert relative(pipeline.gradient(parts), expected) < 1e-12


# --- steps ---------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adam": Adam,
    "rmsprop": lambda *tensors: RMSProp(*tensors, 0.99, 1e-5),
    "sgd": SGD,
    "sparse sgd": lambda *tensors: SGD(*tensors, sparse=True),
    "nesterov": lambda *tensors: Momentum(*tensors, nesterov=True),
    "adagrad": Adagrad,
}


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_after_some_steps_parameters_and_optimizer_are_those_of_the_unsplit_run(
    optimizer, dtype, max_grad_norm
):
    case, parts = make_case("mlp", dtype)
    own = OPTIMIZERS[optimizer](case.flat.parameters_D, case.flat.gradients_D)
    parts = dataclasses.replace(parts, optimizer=own)
    engine, stepper = WholeBatch(case.flat, case.forward), OwnStepper()
    rates = [0.01 * 0.9**number for number in range(5)]
    with Pipeline(parts, make_plan(parts, 4, 3, "interleaved", 2)) as pipeline:
        for rate in rates:
            terms = engine.gradients(case.batch, case.objective)
            norm = stepper.step(
                case.flat,
                own,
                learning_rate=rate,
                max_grad_norm=max_grad_norm,
                samples=case.batch.rows,
                left=0,
            )
            split_terms = pipeline.head.gradients(case.batch, case.objective)
            split_norm = step_with(pipeline, rate, max_grad_norm)
            assert relative(split_terms, terms) < 10 * BOUNDS[dtype]
            assert split_norm == pytest.approx(norm, rel=10 * BOUNDS[dtype])
        found = pipeline.head.collect(state=True)
    assert found.step == 5
    # optimizers divide small gradients by their own size, and their rounding with them
    bound = 1e-12 if dtype == torch.float64 else 1e-4
    assert relative(torch.from_numpy(found.vector_D), case.flat.parameters_D) < bound
    state = own.state()
    assert found.optimizer.keys() == state.keys()
    assert found.optimizer["optimizer.steps"] == 5
    for name, array in state.items():
        np.testing.assert_allclose(found.optimizer[name], array, rtol=0, atol=bound * np.abs(array).max())


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_is_skipped_by_all(bad):
    case, parts = make_case("mlp")
    with Pipeline(parts, make_plan(parts, 3, 2)) as pipeline:
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)
        before = pipeline.head.collect(state=True)
        targets = {**case.batch.targets, "returns": case.batch.targets["returns"].clone()}
        targets["returns"][3] = bad
        pipeline.head.gradients(case.batch._replace(targets=targets), case.objective)
        assert not math.isfinite(step_with(pipeline))
        after = pipeline.head.collect(state=True)
        assert after.step == before.step + 1 == 2
        assert after.optimizer["optimizer.steps"] == 1
        np.testing.assert_array_equal(after.vector_D, before.vector_D)
        pipeline.head.gradients(case.batch, case.objective)
        assert math.isfinite(step_with(pipeline))


# --- slices --------------------------------------------------------------------------------------


def test_slices_are_put_together_and_spread():
    case, parts = make_case("lstm", torch.float32)
    with Pipeline(parts, make_plan(parts, 4, 2), framed_ring) as pipeline:
        for update in range(3):
            pipeline.head.gradients(case.batch, case.objective)
            step_with(pipeline)
            found = pipeline.head.collect(state=update > 0, spread=update == 2)
            assert (found.optimizer is None) == (update == 0)
        whole = torch.from_numpy(found.vector_D)
        for share in pipeline.shares:
            own = parts.block_map.take(whole.numpy(), share.plan.numbers(share.rank))
            np.testing.assert_array_equal(own, share.parameters_P.numpy())
    for results in pipeline.results.values():
        first, second, spread = results
        assert first is second is None
        assert spread.step == found.step == 3
        np.testing.assert_array_equal(spread.vector_D, found.vector_D)
        assert spread.optimizer.keys() == found.optimizer.keys()
        for name, array in found.optimizer.items():
            np.testing.assert_array_equal(spread.optimizer[name], array)


def test_a_pipeline_goes_on_where_another_left_off_even_if_it_is_cut_otherwise():
    runs = []
    for cuts in ((2, 2), (4, 3)):
        case, parts = make_case("mlp", torch.float32)
        for generation, stages in enumerate(cuts):
            with Pipeline(parts, make_plan(parts, stages, 2), generation=generation) as pipeline:
                for _ in range(2):
                    pipeline.head.gradients(case.batch, case.objective)
                    step_with(pipeline, max_grad_norm=1e9)
                found = pipeline.head.collect(state=True)
            case.flat.set_(found.vector_D)
            parts.optimizer.load(found.optimizer)
        runs.append(found)
    once, again = runs
    np.testing.assert_array_equal(once.vector_D, again.vector_D)
    assert once.optimizer["optimizer.steps"] == again.optimizer["optimizer.steps"] == 4
    np.testing.assert_array_equal(once.optimizer["optimizer.v"], again.optimizer["optimizer.v"])


def test_the_end_of_an_update_brings_the_algorithm_what_it_would_have():
    whole, _ = make_case("mlp", torch.float32)
    own = Adam(whole.flat.parameters_D, whole.flat.gradients_D)
    engine, stepper = Accumulated(whole.flat, whole.forward, 2), OwnStepper()
    case, parts = make_case("mlp", torch.float32)
    how = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "samples": 11}
    with Pipeline(parts, make_plan(parts, 3, 2), state_every=2, spread=True) as pipeline:
        for update in range(1, 5):
            begun = case.flat.parameters_D.clone()
            for left in (2, 1, 0):
                assert torch.equal(case.flat.parameters_D, begun)
                engine.gradients(whole.batch, whole.objective)
                stepper.step(whole.flat, own, left=left, **how)
                pipeline.head.gradients(case.batch, case.objective)
                pipeline.head.step(case.flat, parts.optimizer, left=left, **how)
            assert relative(case.flat.parameters_D, whole.flat.parameters_D) < 1e-4
            assert parts.optimizer.steps == 3 * (update - update % 2)
        found, expected = parts.optimizer.state(), own.state()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-4 * np.abs(array).max())
    for results in pipeline.results.values():
        assert [result is None for result in results] == [True, False, True, False]
        np.testing.assert_array_equal(results[-1].vector_D, case.flat.numpy())


# --- precision and memory ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mlp", "resnet", "transformer", "lstm"])
def test_in_bf16_a_pipeline_is_as_near_to_float32_as_the_unsplit_model(name):
    exact, _ = make_case(name, torch.float32)
    WholeBatch(exact.flat, exact.forward).gradients(exact.batch, exact.objective)
    case, parts = make_case(name, torch.float32, precision="bf16")
    Accumulated(case.flat, case.forward, 2).gradients(case.batch, case.objective)
    unsplit = relative(case.flat.gradients_D, exact.flat.gradients_D)
    with Pipeline(parts, make_plan(parts, 3, 2), framed_ring) as pipeline:
        assert {spec.dtype for spec in parts.outputs} == {torch.bfloat16}
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
        split = relative(pipeline.gradient(parts), exact.flat.gradients_D)
    assert 1e-4 < unsplit < 0.1
    assert 1e-4 < split < max(2 * unsplit, 0.03)


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "transformer", "lstm"])
@pytest.mark.parametrize(("schedule", "ranks"), [("gpipe", 3), ("1f1b", 3), ("interleaved", 1)])
def test_activations_computed_anew_are_the_same(name, schedule, ranks, precision):
    found, calls = [], []
    for anew in (False, True):
        case, parts = make_case(name, torch.float32, precision=precision)
        plan = make_plan(parts, 3, 4, schedule, ranks)
        with Pipeline(parts, plan, checkpoint_activations=anew) as pipeline:
            forwards = [[] for _ in pipeline.shares]
            for share, counted in zip(pipeline.shares, forwards, strict=True):
                first = next(iter(share._stages.values()))[0]
                first.register_forward_pre_hook(lambda *_, counted=counted: counted.append(1))
            pipeline.head.gradients(case.batch, case.objective)
            step_with(pipeline, max_grad_norm=1e9)
            found.append(pipeline.head.collect(state=False).vector_D.tobytes())
        calls.append([len(counted) for counted in forwards])
    assert found[0] == found[1]
    plain, twice = calls
    # with 1f1b the last rank's backward follows its forward: nothing would be saved
    factors = [2, 2, 1] if schedule == "1f1b" else [2] * ranks
    assert twice == [factor * count for factor, count in zip(factors, plain, strict=True)]


# --- misuse --------------------------------------------------------------------------------------


def test_what_another_stepper_would_do_is_refused():
    case, parts = make_case("mlp")
    with Pipeline(parts, make_plan(parts, 1, 1)) as pipeline:
        with pytest.raises(RuntimeError, match="no gradient"):
            step_with(pipeline)
        pipeline.head.gradients(case.batch, case.objective)
        with pytest.raises(RuntimeError, match="by the pipeline itself"):
            pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)
        with pytest.raises(ValueError, match="spread"):
            pipeline.head.collect(state=False, spread=True)


@pytest.mark.parametrize(
    "change",
    [
        lambda batch: batch._replace(inputs=batch.inputs.float()),
        lambda batch: batch._replace(inputs=batch.inputs[:, :, :-1]),
        lambda batch: batch._replace(inputs=torch.cat((batch.inputs, batch.inputs))),
        lambda batch: batch._replace(context=Context()),
        lambda batch: batch._replace(targets={"actions": batch.targets["actions"]}),
        lambda batch: batch._replace(
            targets={**batch.targets, "returns": batch.targets["returns"][..., None]}
        ),
    ],
)
def test_a_batch_that_is_not_as_promised_is_refused_before_anything_is_sent(change):
    case, parts = make_case("lstm")
    with Pipeline(parts, make_plan(parts, 2, 2)) as pipeline:
        with pytest.raises(LayoutMismatchError):
            pipeline.head.gradients(change(case.batch), case.objective)
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)


def test_the_number_of_microbatches_can_be_measured():
    """By a clock on which three ranks' share of the work shrinks with the bubble, and messages cost."""
    case, parts = make_case("mlp")
    time, said = [0.0], []
    with Pipeline(parts, make_plan(parts, 3, 6)) as pipeline:
        tuned = Pipelined(
            pipeline.shares[0],
            pipeline.head._rank._links,
            generation=7,
            timeout_s=TIMEOUT_S,
            tune=True,
            clock=lambda: time[0],
            say=said.append,
        )
        expected, _ = reference(case)
        used = []
        pipeline.head = tuned
        original = tuned._rank.gather

        def gather(terms):
            number = tuned._microbatches
            used.append(number)
            time[0] += (number + 2) / number + 0.3 * number
            return original(terms)

        tuned._rank.gather = gather
        for _ in range(20):
            tuned.gradients(case.batch, case.objective)
            step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
            assert relative(pipeline.gradient(parts), expected) < 1e-12
    assert used[:6] == [1, 2, 4, 1, 2, 4]
    assert used[18:] == [2, 2]
    assert said == ["microbatches = 2 of [1, 2, 4] is the fastest"]


def test_metrics_tell_of_stages_and_waiting():
    case, parts = make_case("mlp")
    plan = make_plan(parts, 2, 4)
    with Pipeline(parts, plan) as pipeline:
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)
        metrics = pipeline.head.metrics()
        assert metrics.pop("bubble") > 0.0
        assert metrics.pop("step_s") > 0.0
        floats = 6 * (sum(case.batch.inputs.shape[1:]) + sum(parts.outputs[plan.cuts[0] - 1].shape))
        assert metrics.pop("activation_bytes") == 8 * floats  # two microbatches of three rows
        assert metrics == {"microbatches": 4.0, "stages": 2.0}
        assert pipeline.head.metrics()["bubble"] == 0.0
    assert pipeline.servers[0].metrics()["bubble"] >= 0.0
