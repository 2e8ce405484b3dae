"""A pipeline's steps and states are those of the model in one piece; what it tells, and what it refuses."""

from __future__ import annotations

import dataclasses
import math
import threading

import numpy as np
import pytest
import torch

from p2pdrl.errors import LayoutMismatchError
from p2pdrl.rl.gradients import Accumulated, OwnStepper, WholeBatch
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.optimizers import Optimizer
from p2pdrl.rl.pipeline.rank import Pipelined
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.tensors.optimizers import SGD, Adagrad, Adam, Momentum, RMSProp

from ..gradient_cases import reference
from .pipelines import BOUNDS, TIMEOUT_S, Pipeline, framed_ring, make_case, make_plan, relative, step_with

RULES = {
    "adam": Adam(),
    "rmsprop": RMSProp(),
    "sgd": SGD(),
    "sparse sgd": SGD(sparse=True),
    "nesterov": Momentum(nesterov=True),
    "adagrad": Adagrad(),
}


@pytest.mark.parametrize("max_grad_norm", [0.05, 1e3])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("rule", RULES)
def test_after_some_steps_parameters_and_optimizer_are_those_of_the_unsplit_run(rule, dtype, max_grad_norm):
    case, parts = make_case("mlp", dtype)
    own = Optimizer(RULES[rule], case.flat)
    parts = dataclasses.replace(parts, optimizer=own)
    engine, stepper = WholeBatch(case.flat, case.forward), OwnStepper()
    rates = [0.01 * 0.9**number for number in range(5)]
    with Pipeline(parts, make_plan(parts, 4, 3, "interleaved", 2)) as pipeline:
        for rate in rates:
            terms = engine.gradients(case.batch, case.objective)
            norm = stepper.step(
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
    own = Optimizer(Adam(), whole.flat)
    engine, stepper = Accumulated(whole.flat, whole.forward, 2), OwnStepper()
    case, parts = make_case("mlp", torch.float32)
    how = {"learning_rate": 1e-2, "max_grad_norm": 1e9, "samples": 11}
    with Pipeline(parts, make_plan(parts, 3, 2), state_every=2, spread=True) as pipeline:
        for update in range(1, 5):
            begun = case.flat.parameters_D.clone()
            for left in (2, 1, 0):
                assert torch.equal(case.flat.parameters_D, begun)
                engine.gradients(whole.batch, whole.objective)
                stepper.step(own, left=left, **how)
                pipeline.head.gradients(case.batch, case.objective)
                pipeline.head.step(parts.optimizer, left=left, **how)
            assert relative(case.flat.parameters_D, whole.flat.parameters_D) < 1e-4
            assert parts.optimizer.steps == 3 * (update - update % 2)
        found, expected = parts.optimizer.state(), own.state()
        for name, array in expected.items():
            np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-4 * np.abs(array).max())
    for results in pipeline.results.values():
        assert [result is None for result in results] == [True, False, True, False]
        np.testing.assert_array_equal(results[-1].vector_D, case.flat.numpy())


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
        lambda batch: batch._replace(context=RecurrentContext()),
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


# --- what it tells -------------------------------------------------------------------------------


def test_the_number_of_microbatches_can_be_measured():
    """By a clock on which three ranks' share of the work shrinks with the bubble, and messages cost."""
    case, parts = make_case("mlp")
    time, said = [0.0], []
    with Pipeline(parts, make_plan(parts, 3, 6)) as pipeline:
        tuned = Pipelined(
            pipeline.shares[0],
            pipeline.head._links,
            generation=7,
            timeout_s=TIMEOUT_S,
            tune=True,
            clock=lambda: time[0],
            say=said.append,
        )
        expected, _ = reference(case)
        used = []
        pipeline.head = tuned
        original = tuned._gather

        def gather(terms):
            number = tuned._microbatches
            used.append(number)
            time[0] += (number + 2) / number + 0.3 * number
            return original(terms)

        tuned._gather = gather
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
        inside = range(plan.cuts[0])  # its last block's is what goes out
        floats = 6 * (sum(case.batch.inputs.shape[1:]) + sum(sum(parts.outputs[i].shape) for i in inside))
        assert metrics.pop("activation_bytes") == 8 * floats  # two microbatches of three rows
        assert metrics == {"microbatches": 4.0, "stages": 2.0}
        assert pipeline.head.metrics()["bubble"] == 0.0
    assert pipeline.servers[0].metrics()["bubble"] >= 0.0


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_with_one_microbatch_every_rank_idles_while_each_of_the_others_computes(ranks, monkeypatch):
    """On a clock that only forwards move, by a second each. The last rank idles before its part alone."""
    now_s = 0.0
    waiting = [threading.Event() for _ in range(ranks)]

    def forward(share, *args, plain=StageParameters.forward, **options):
        nonlocal now_s
        waiting[share.rank].clear()
        if share.rank > 0:  # the clock doesn't move while the rank before is about to read it
            assert waiting[share.rank - 1].wait(TIMEOUT_S)
        now_s += 1.0
        return plain(share, *args, **options)

    def watched(links, rank):
        def receive(way, *args, plain=links.receive):
            if way == "up":
                waiting[rank].set()
            return plain(way, *args)

        links.receive = receive

    monkeypatch.setattr(StageParameters, "forward", forward)
    case, parts = make_case("mlp")
    with Pipeline(parts, make_plan(parts, ranks, 1)) as pipeline:
        members = [pipeline.head, *pipeline.servers]
        pipeline.head._clock = lambda: now_s
        for rank, member in enumerate(members):
            member._clock = member.runner._clock = lambda: now_s
            if ranks > 1:
                watched(member._links, rank)
        for _ in range(3):
            pipeline.head.gradients(case.batch, case.objective)
            step_with(pipeline)
            pipeline.head.collect(state=False)  # all have stepped
        for member in members:
            metrics = member.metrics()
            assert metrics["bubble"] == pytest.approx(1.0 - 1.0 / ranks)
            assert metrics["step_s"] == pytest.approx(ranks)
            assert member.metrics()["bubble"] == 0.0  # nothing since
