"""What the first rank gives to all: what was fetched, or what became of it since."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from p2pdrl.errors import WireError
from p2pdrl.rl.pipeline.links import ring
from p2pdrl.rl.pipeline.messages import Slice, TensorSlot, UpdateOver, Whole
from p2pdrl.rl.pipeline.rank import StageServer
from p2pdrl.rl.pipeline.stage_parameters import StageParameters

from .pipelines import CPU, TIMEOUT_S, Pipeline, framed_ring, make_case, make_plan, step_with


def trained(pipeline, case, steps=1):
    for _ in range(steps):
        pipeline.head.gradients(case.batch, case.objective)
        step_with(pipeline)


@pytest.mark.parametrize("make_links", [ring, framed_ring])
def test_all_go_on_with_what_it_became(make_links):
    case, parts = make_case("mlp", torch.float32)
    with Pipeline(parts, make_plan(parts, 3, 2), make_links) as pipeline:
        trained(pipeline, case, 2)
        whole = pipeline.head.fetch(state=True, spread=True, last=True)
        optimizer = {name: np.array(array) for name, array in whole.optimizer.items()}
        optimizer["optimizer.m"] += 0.25
        optimizer["optimizer.steps"] = np.array(70, np.int64)
        other = replace(whole, vector_D=whole.vector_D + 1.0, optimizer=optimizer, version=12)
        pipeline.head.give(other, changed=True)
        found = pipeline.head.collect(state=True)
        np.testing.assert_array_equal(found.vector_D, other.vector_D)
        for name, array in optimizer.items():
            np.testing.assert_array_equal(found.optimizer[name], array)
        trained(pipeline, case)
    for results in pipeline.results.values():
        assert (results[0].version, results[0].last) == (12, True)
        np.testing.assert_array_equal(results[0].vector_D, other.vector_D)
        np.testing.assert_array_equal(results[0].optimizer["optimizer.steps"], 70)


def test_what_didnt_change_is_loaded_by_nobody(monkeypatch):
    case, parts = make_case("mlp")  # float64, which an optimizer's state isn't loaded as
    with Pipeline(parts, make_plan(parts, 3, 2)) as pipeline:
        monkeypatch.setattr(StageParameters, "load", None)
        trained(pipeline, case)
        pipeline.head.collect(state=True, spread=True)
        trained(pipeline, case)


def test_what_is_held_is_given_later():
    case, parts = make_case("mlp", torch.float32)
    pipeline = Pipeline(parts, make_plan(parts, 2, 2), state_every=2, spread=True)
    pipeline.head._hold = True
    how = {"learning_rate": 1e-2, "max_grad_norm": 1.0, "samples": 11, "left": 0}
    with pipeline:
        for update in (1, 2):
            assert pipeline.head.held is None
            pipeline.head.gradients(case.batch, case.objective)
            pipeline.head.step(parts.optimizer, **how)  # as an algorithm does
            assert (pipeline.head.held is not None) == (update == 2)
        assert len(pipeline.results[1]) == 1
        pipeline.head.give(replace(pipeline.head.held, version=3))
        assert pipeline.head.held is None
        pipeline.head.collect(state=False)
    assert pipeline.results[1][1].version == 3


@pytest.mark.parametrize("message", [Whole(0, 1), Whole(1, 0, changed=True), Slice(1, 0, 0)])
def test_what_doesnt_fit_is_refused(message):
    _, parts = make_case("mlp", torch.float32)
    plan, links = make_plan(parts, 2, 2), ring(2)
    server = StageServer(
        StageParameters(parts, plan, 1, CPU),
        links[1],
        generation=0,
        timeout_s=TIMEOUT_S,
        idle_timeout_s=TIMEOUT_S,
    )
    links[0].send("down", UpdateOver(0, state=True, spread=True))
    vectors = [torch.zeros(parts.block_map.layout.size) for _ in range(3)]
    links[0].send("down", message, vectors)
    with pytest.raises(WireError):
        server.serve()
    own = [torch.zeros(parts.block_map.size(plan.numbers(1))) for _ in range(3)]
    assert links[0].receive("up", lambda _: [TensorSlot(one) for one in own], 0.0) == Slice(1, 0, 0)
