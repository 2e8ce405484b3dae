"""What breaks a pipeline ends it on every rank at once, and leaves parameters after the last whole step."""

from __future__ import annotations

import dataclasses
import math
import threading

import msgspec
import numpy as np
import pytest
import torch

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.rl.pipeline.links import receive_any, ring
from p2pdrl.rl.pipeline.messages import (
    Activation,
    Gradient,
    Opening,
    Slice,
    StepMessage,
    Sums,
    TensorSlot,
    UpdateOver,
)
from p2pdrl.rl.pipeline.rank import Pipelined, StageServer
from p2pdrl.rl.pipeline.stage_parameters import StageParameters

from .pipelines import CPU, PPO, TIMEOUT_S, Pipeline, make_case, make_plan, step_with


class Breaking:
    """Links of one rank that break when something is to be sent."""

    def __init__(self, inner, breaks):
        self._inner = inner
        self._breaks = breaks

    def send(self, way, message, tensors=()):
        if self._breaks(message):
            self._inner.close()
        self._inner.send(way, message, tensors)

    def receive(self, way, room, timeout_s):
        return self._inner.receive(way, room, timeout_s)

    def close(self):
        self._inner.close()


def breaking(rank, breaks):
    def make(ranks):
        links = ring(ranks)
        links[rank] = Breaking(links[rank], breaks)
        return links

    return make


def at_step(number, kind):
    """True once a message of a kind comes in a minibatch's round."""
    steps = []

    def breaks(message):
        if isinstance(message, StepMessage):
            steps.append(message)
        return len(steps) == number and isinstance(message, kind)

    return breaks


def two_steps(pipeline, case):
    for _ in range(2):
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)


@pytest.mark.parametrize(
    ("rank", "kind"), [(0, Activation), (1, Activation), (1, Gradient), (2, Gradient), (1, Sums), (2, Sums)]
)
def test_a_broken_minibatch_can_be_done_again(rank, kind):
    """The last rank sends no steps on, so it breaks in the first minibatch, the others in the second."""
    done = 0 if rank == 2 else 1
    case, parts = make_case("mlp", torch.float32)
    plan = make_plan(parts, 3, 4)
    with Pipeline(parts, plan) as whole:
        for _ in range(3):
            whole.head.gradients(case.batch, case.objective)
            step_with(whole)
        expected = whole.head.collect(state=True)

    first = Pipeline(parts, plan, breaking(rank, at_step(done, kind)), generation=1)
    with first:
        with pytest.raises(PeerUnreachableError, match=r"closed|waiting for"):
            two_steps(first, case)
        first.join()
        assert [share.steps for share in first.shares] == [done] * 3
        assert all(isinstance(error, PeerUnreachableError) for error in first.errors.values())
        with pytest.raises(PeerUnreachableError, match="generation 1 of the pipeline has ended"):
            first.head.gradients(case.batch, case.objective)

    with Pipeline(parts, plan, generation=2, shares=first.shares) as second:
        for _ in range(3 - done):
            second.head.gradients(case.batch, case.objective)
            step_with(second)
        found = second.head.collect(state=True)
    assert found.step == expected.step == 3
    np.testing.assert_array_equal(found.vector_D, expected.vector_D)
    np.testing.assert_array_equal(found.optimizer["optimizer.m"], expected.optimizer["optimizer.m"])


def test_ranks_may_differ_by_the_step_that_was_on_its_way_and_their_numbers_tell():
    case, parts = make_case("mlp")
    plan = make_plan(parts, 3, 2)
    before = [share.parameters_P.clone() for share in Pipeline(parts, plan).shares]
    pipeline = Pipeline(parts, plan, breaking(1, lambda message: isinstance(message, StepMessage)))
    with pipeline:
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)  # what comes of it is heard with the next message
        pipeline.join()
        with pytest.raises(PeerUnreachableError):
            pipeline.head.gradients(case.batch, case.objective)
    moved = [
        not torch.equal(share.parameters_P, old) for share, old in zip(pipeline.shares, before, strict=True)
    ]
    assert [share.steps for share in pipeline.shares] == [1, 0, 0]
    assert moved == [True, False, False]


def test_a_rank_that_is_late_ends_the_pipeline():
    case, parts = make_case("mlp")
    plan, links = make_plan(parts, 2, 2), ring(2)
    head = Pipelined(StageParameters(parts, plan, 0, CPU), links[0], generation=0, timeout_s=0.01)
    with pytest.raises(
        PeerTimeoutError, match=r"waiting for Gradient\(stage=0, microbatch=0\): no message .* 0.01 s"
    ):
        head.gradients(case.batch, case.objective)
    server = StageServer(
        StageParameters(parts, plan, 1, CPU),
        links[1],
        generation=0,
        timeout_s=TIMEOUT_S,
        idle_timeout_s=TIMEOUT_S,
    )
    with pytest.raises(PeerUnreachableError):  # at the latest when it answers
        server.serve()
    with pytest.raises(PeerUnreachableError, match="has ended"):
        server.serve()


def test_waiting_for_the_next_minibatch_has_a_bound_of_its_own():
    _, parts = make_case("mlp")
    plan, links = make_plan(parts, 2, 2), ring(2)
    server = StageServer(
        StageParameters(parts, plan, 1, CPU), links[1], generation=0, timeout_s=TIMEOUT_S, idle_timeout_s=0.01
    )
    with pytest.raises(PeerTimeoutError, match="waiting for the next minibatch"):
        server.serve()


def test_closing_wakes_whoever_waits():
    case, parts = make_case("mlp")
    plan, links = make_plan(parts, 2, 2), ring(2)
    head = Pipelined(StageParameters(parts, plan, 0, CPU), links[0], generation=0, timeout_s=TIMEOUT_S)
    links[1].receive = None  # nobody there
    closer = threading.Thread(target=head.close)
    closer.start()
    with pytest.raises(PeerUnreachableError):
        head.gradients(case.batch, case.objective)
    closer.join()


def test_an_error_of_ones_own_is_heard_by_the_neighbours_at_once():
    case, parts = make_case("mlp")
    with Pipeline(parts, make_plan(parts, 3, 2)) as pipeline:
        pipeline.shares[0].forward = None  # a bug
        with pytest.raises(TypeError):
            pipeline.head.gradients(case.batch, case.objective)
        pipeline.join()
        assert all(isinstance(error, PeerUnreachableError) for error in pipeline.errors.values())


# --- nonsense ------------------------------------------------------------------------------------

GOOD = Opening(
    generation=3,
    step=0,
    rows=4,
    length=4,
    parts=2,
    precision="float32",
    objective=msgspec.msgpack.encode(PPO),
)


def change(**fields):
    return Activation(1, 0, msgspec.structs.replace(GOOD, **fields))


def tensors_of(parts, plan, rows):
    """What comes to the second rank with a microbatch."""
    specs = parts.outputs[plan.cuts[0] - 1], *(spec for _, spec in parts.extras)
    return [torch.zeros(rows, *spec.shape, dtype=spec.dtype) for spec in specs]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (change(generation=2), r"\(3, 0, 'float32'\) here, a minibatch has \(2,"),
        (change(generation=4), r"a minibatch has \(4,"),
        (change(step=1), r"a minibatch has \(3, 1,"),
        (change(precision="bf16"), "'bf16'"),
        (change(length=12), "12 rows in 2 parts isn't one"),
        (change(length=1), "1 rows in 2 parts isn't one"),
        (change(length=0, parts=1), "0 rows in 1 parts isn't one"),
        (change(parts=3), "4 rows in 3 parts isn't one"),
        (change(objective=b""), "can't be read"),
        (change(objective=b"\xc1"), "can't be read"),
        (change(objective=msgspec.msgpack.encode({"clip": "much"})), "can't be read"),
        (change(objective=msgspec.msgpack.encode(dataclasses.replace(PPO, clip=1e38))), "clip of the"),
        (
            change(objective=msgspec.msgpack.encode(dataclasses.replace(PPO, value_coef=math.inf))),
            "value_coef",
        ),
        (
            change(objective=msgspec.msgpack.encode(dataclasses.replace(PPO, entropy_coef=math.nan))),
            "entropy",
        ),
        (Activation(1, 0), "came instead"),
        (Activation(0, 0, GOOD), "came instead"),
        (Activation(1, 1, GOOD), "came instead"),
        (UpdateOver(1, state=False, spread=False), "came at step 0"),
        (StepMessage(0, 1.0, 1.0, 1.0), "came instead"),
        (Gradient(1, 0), "came instead"),
    ],
)
def test_a_minibatch_that_is_not_the_next_one_is_refused(message, words):
    _, parts = make_case("mlp", torch.float32)
    plan, links = make_plan(parts, 2, 2), ring(2)
    server = StageServer(
        StageParameters(parts, plan, 1, CPU),
        links[1],
        generation=3,
        timeout_s=TIMEOUT_S,
        idle_timeout_s=TIMEOUT_S,
    )
    opening = getattr(message, "opening", None)
    rows = opening.sizes[0] if opening is not None else 2
    links[0].send("down", message, tensors_of(parts, plan, rows))
    with pytest.raises(WireError, match=f"waiting for the next minibatch: .*{words}"):
        server.serve()
    with pytest.raises(PeerUnreachableError):
        links[0].receive("up", lambda _: [], 0.0)


@pytest.mark.parametrize(
    ("way", "answer", "words"),
    [
        (0, Gradient(1, 0), r"Gradient\(stage=0, microbatch=0\)"),
        (0, Sums(0, 1.0, ()), r"Gradient\(stage=0, microbatch=0\)"),
        (1, Sums(1, 1.0, ()), "waiting for Sums"),
        (1, Sums(0, -1.0, (0.0,) * 5), "no squares"),
        (1, Sums(0, 1.0, (0.0,) * 4), "5 terms"),
        (1, Sums(0, 1.0, ()), "5 terms"),
        (1, Gradient(0, 0), "waiting for Sums"),
    ],
)
def test_answers_that_do_not_fit_are_refused(way, answer, words):
    """The other rank does its first answers right, and then says something else."""
    case, parts = make_case("mlp", torch.float32)
    plan, links = make_plan(parts, 2, 1), ring(2)
    head = Pipelined(StageParameters(parts, plan, 0, CPU), links[0], generation=0, timeout_s=TIMEOUT_S)
    gradient = torch.zeros(len(case.batch.inputs), *parts.outputs[plan.cuts[0] - 1].shape)
    if way == 1:
        links[1].send("up", Gradient(0, 0), [gradient])
    links[1].send("up", answer, [gradient] if isinstance(answer, Gradient) else [])
    with pytest.raises(WireError, match=words):
        head.gradients(case.batch, case.objective)


@pytest.mark.parametrize(
    "step",
    [
        StepMessage(1, 1.0, 1.0, 1.0),
        StepMessage(0, -1.0, 1.0, 1.0),
        StepMessage(0, 1.0, math.nan, 1.0),
        StepMessage(0, 1.0, 1.0, math.inf),
        StepMessage(0, 1.0, 1e38, 1.0),
        StepMessage(0, 1.0, -1.0, 1.0),
        StepMessage(0, 0.0, 1.0, -1.0),
    ],
)
def test_steps_that_cannot_be_taken_are_refused(step):
    _, parts = make_case("mlp", torch.float32)
    plan, links = make_plan(parts, 2, 2), ring(2)
    share = StageParameters(parts, plan, 1, CPU)
    server = StageServer(share, links[1], generation=3, timeout_s=TIMEOUT_S, idle_timeout_s=TIMEOUT_S)
    before = share.parameters_P.clone()
    tensors = tensors_of(parts, plan, 2)
    links[0].send("down", change(), tensors)
    links[0].send("down", Activation(1, 1), tensors)
    links[0].send("down", step)
    with pytest.raises(WireError, match="waiting for Step"):
        server.serve()
    assert torch.equal(share.parameters_P, before)
    assert share.steps == 0


@pytest.mark.parametrize("fault", ["rank", "step", "optimizer", "nan", "length"])
def test_slices_that_do_not_fit_are_refused(fault):
    _, parts = make_case("mlp", torch.float32)
    plan, links = make_plan(parts, 2, 1), ring(2)
    head = Pipelined(StageParameters(parts, plan, 0, CPU), links[0], generation=0, timeout_s=TIMEOUT_S)
    vector = torch.zeros(parts.block_map.size(plan.numbers(1)))
    message = Slice(1, 0, 0)
    if fault == "rank":
        message = Slice(0, 0, 0)
    elif fault == "step":
        message = Slice(1, 1, 0)
    elif fault == "optimizer":
        message = Slice(1, 0, 1)
    elif fault == "nan":
        vector[3] = torch.nan
    else:
        vector = vector[:-1]
    links[1].send("up", message, [vector])
    with pytest.raises(WireError):
        head.collect(state=False)


def test_any_message_can_be_waited_for():
    links = ring(2)
    links[0].send("down", UpdateOver(0, state=True, spread=False), [torch.ones(2)])
    into = torch.zeros(2)
    assert receive_any(links[1], "down", lambda _: [TensorSlot(into)], 0.0, "x") == UpdateOver(
        0, state=True, spread=False
    )
    assert into.tolist() == [1.0, 1.0]
    assert dataclasses.is_dataclass(PPO)
