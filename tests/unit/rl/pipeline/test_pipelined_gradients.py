"""A pipeline's gradients are those of the model in one piece."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from torch import nn

from p2pdrl.pipeline.plan import PipelinePlan
from p2pdrl.rl.algorithms.regression import TARGETS, CrossEntropy
from p2pdrl.rl.engines import module_forward
from p2pdrl.rl.flat import FlatModule
from p2pdrl.rl.gradients import Accumulated, Minibatch, WholeBatch
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.messages import RowSpec
from p2pdrl.rl.pipeline.parts import module_parts
from p2pdrl.tensors.optimizers import SGD

from ..gradient_cases import reference
from .pipelines import (
    A2C,
    BOUNDS,
    CPU,
    MODELS,
    PPO,
    Pipeline,
    framed_ring,
    make_case,
    make_joint_case,
    make_plan,
    relative,
    step_with,
)

MICROBATCHES = (1, 2, 4, 8)
LAYOUTS = [
    *[("gpipe", stages, stages) for stages in (1, 2, 3, 4)],
    *[("1f1b", stages, stages) for stages in (1, 2, 3, 4)],
    ("interleaved", 2, 1),
    ("interleaved", 4, 2),
]


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


def joint_reference(case):
    """The gradient of each loss by its own part of the parameters, and the terms."""
    policy, inputs = case.module, case.batch.inputs
    obs, y, w = inputs[:, : -policy.dim], case.batch.targets["targets"], case.batch.targets["weights"]
    error = y - policy.q_values(inputs)[0]
    critic_loss = (w * error**2).mean()
    actor_loss = -policy.q_values(torch.cat((obs, policy.actor(obs)), 1))[0].mean()
    by_name = {}
    for loss, prefix in ((critic_loss, "critics."), (actor_loss, "actor.")):
        own = {name: value for name, value in policy.named_parameters() if name.startswith(prefix)}
        by_name |= dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
    gradient = torch.cat([by_name[name].flatten() for name, _ in policy.named_parameters()])
    terms = torch.stack((critic_loss, (y - error).mean(), error.abs().mean(), actor_loss)).detach()
    return gradient, terms


@pytest.mark.parametrize(("schedule", "stages", "ranks"), [*LAYOUTS, ("interleaved", 8, 4)])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_an_actor_and_its_critic_are_cut_together(schedule, stages, ranks, dtype):
    case, parts = make_joint_case(dtype)
    assert len(parts.blocks) == 8
    expected, expected_terms = joint_reference(case)
    for microbatches in MICROBATCHES:
        with Pipeline(parts, make_plan(parts, stages, microbatches, schedule, ranks)) as pipeline:
            for _ in range(2):
                terms = pipeline.head.gradients(case.batch, case.objective)
                step_with(pipeline, learning_rate=0.0, max_grad_norm=1e9)
                assert relative(pipeline.gradient(parts), expected) < BOUNDS[dtype]
                assert relative(terms, expected_terms) < BOUNDS[dtype]


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
        Optimizer(SGD(), flat),
        inputs=RowSpec((5,), torch.float64),
        targets=RowSpec((), torch.int64, 4),
        most_rows=32,
    )
    targets = torch.randint(4, (32,), generator=generator)
    batch = Minibatch(torch.randn(32, 5, generator=generator).double(), {TARGETS: targets}, 32)
    WholeBatch(flat, module_forward(layers)).gradients(batch, parts.objective)
    with Pipeline(parts, PipelinePlan(4, (1, 2, 3), "interleaved", microbatches, 2)) as pipeline:
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
            pipeline.head.gradients(case.batch, case.objective)  # in which it looks what is kept
            step_with(pipeline, max_grad_norm=1e9)
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
