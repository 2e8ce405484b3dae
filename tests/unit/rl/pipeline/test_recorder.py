"""What ranks note about themselves."""

from __future__ import annotations

import itertools

import pytest
import torch

from p2pdrl.pipeline.trace import TraceSpan
from p2pdrl.rl.gradients import cut
from p2pdrl.rl.pipeline.messages import Opening
from p2pdrl.rl.pipeline.runner import Recorder, ScheduleRunner
from p2pdrl.rl.pipeline.stage_parameters import StageParameters

from .pipelines import CPU, Pipeline, make_case, make_plan, step_with


def test_the_oldest_spans_go_first():
    recorder = Recorder(most=3)
    for number in range(5):
        recorder.add(TraceSpan("step", float(number), number + 0.5))
    assert [span.start_s for span in recorder.spans()] == [2.0, 3.0, 4.0]
    assert [span.start_s for span in recorder.spans(3.5)] == [4.0]


def run_alone(schedule, stages, microbatches, **options):
    """One rank that holds all; clocks count from 0 by 1."""
    import msgspec

    case, parts = make_case("mlp", torch.float32)
    plan = make_plan(parts, stages, microbatches, schedule, ranks=1)
    ticks = itertools.count()
    recorder = Recorder()
    runner = ScheduleRunner(
        StageParameters(parts, plan, 0, CPU, **options), None, 1.0, lambda: float(next(ticks)), recorder
    )
    batches = cut(case.batch, microbatches)
    encoded = msgspec.msgpack.encode(case.objective)
    rows = len(case.batch.inputs)
    opening = Opening(0, 5, case.batch.rows, rows, microbatches, "float32", encoded)
    runner.begin(opening, batches)
    runner.run()
    return case, parts, plan, recorder


def test_each_action_is_noted_with_its_time():
    _, _, plan, recorder = run_alone("interleaved", 2, 3)
    spans = recorder.spans()
    assert [(s.what, s.stage, s.microbatch) for s in spans] == list(plan.actions(0, 3))
    assert [(s.start_s, s.end_s) for s in spans] == [(float(n), n + 1.0) for n in range(len(spans))]
    assert {s.step for s in spans} == {5}


KEPT = 5 + 16 + 14 + 12 + 10 + 8 + 4
"""Floats of one row: 5 inputs, what each tanh of policy and value function gives, 3 logits and a value."""


def test_kept_activations_are_counted_by_hand():
    """gpipe in one stage keeps all three microbatches: 11 rows, float32."""
    _, _, _, recorder = run_alone("gpipe", 1, 3)
    assert recorder.activation_bytes == 11 * 4 * KEPT


def test_computed_anew_only_what_comes_and_goes_is_kept():
    """11 rows of 5 inputs and 4 outputs, and of one microbatch of 4 rows what is between."""
    _, _, _, recorder = run_alone("gpipe", 1, 3, checkpoint_activations=True)
    assert recorder.activation_bytes == 4 * (11 * (5 + 4) + 4 * (KEPT - 5 - 4))


def test_1f1b_keeps_one_at_a_time():
    case, _, _, recorder = run_alone("1f1b", 1, 3)
    most = max(len(batch.inputs) for batch in cut(case.batch, 3))
    assert recorder.activation_bytes == most * 4 * KEPT


def test_a_stage_of_the_same_rank_shares_what_passes():
    """What one stage gives and the next takes is counted once."""
    _, _, _, recorder = run_alone("interleaved", 2, 1)
    assert recorder.activation_bytes == 11 * 4 * KEPT


@pytest.mark.parametrize("nbytes", [[3, 9, 2], [9]])
def test_the_peak_stays(nbytes):
    recorder = Recorder()
    for each in nbytes:
        recorder.kept(each)
    assert recorder.activation_bytes == 9


def test_all_ranks_of_a_pipeline_record_their_actions():
    case, parts = make_case("mlp", torch.float32)
    plan = make_plan(parts, 2, 3)
    with Pipeline(parts, plan) as pipeline:
        for _ in range(2):
            pipeline.head.gradients(case.batch, case.objective)
            step_with(pipeline)
        pipeline.head.collect(state=False)
        head, (server,) = pipeline.head, pipeline.servers
        for rank, stage in ((0, head), (1, server)):
            spans = stage.recorder.spans()
            words = [action.kind for action in plan.actions(rank, 3)] + ["sums", "step"]
            assert [span.what for span in spans] == 2 * words
            assert [span.step for span in spans] == [0] * len(words) + [1] * len(words)
            assert all(span.start_s <= span.end_s for span in spans)
            assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(spans))
            assert stage.metrics()["activation_bytes"] > 0
            assert "activation_bytes" not in stage.metrics()  # nothing ran since
