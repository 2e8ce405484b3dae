"""What a node asks for is what it gets."""

from __future__ import annotations

import pytest

from p2pdrl.rl.engines import EngineOptions, make_engine
from p2pdrl.rl.gradients import Accumulated, WholeBatch
from p2pdrl.rl.tuned_gradients import Tuned

from .gradient_cases import CASES


@pytest.mark.parametrize(
    ("options", "kind", "metrics"),
    [
        (EngineOptions(), WholeBatch, {}),
        (EngineOptions(microbatches=3), Accumulated, {"microbatches": 3.0}),
        (EngineOptions(microbatches="auto"), Tuned, {"microbatches": 2.0}),  # to be measured next
    ],
)
def test_the_engine_that_was_asked_for(options, kind, metrics):
    case = CASES["classifier"]()
    engine = make_engine(options, case.flat, case.forward)
    assert isinstance(engine, kind)
    engine.gradients(case.batch, case.objective)
    assert engine.metrics() == metrics


def test_the_automatic_one_is_told_everything():
    case = CASES["classifier"]()
    said, ticks = [], iter(range(1000))
    options = EngineOptions(
        microbatches="auto", activation_limit_bytes=10**6, clock=lambda: float(next(ticks)), say=said.append
    )
    engine = make_engine(options, case.flat, case.forward)
    for _ in range(24):
        engine.gradients(case.batch, case.objective)
    assert next(ticks) == 48  # two looks at the clock for each measurement
    assert said == ["microbatches = 1 (µs a row with 1: 76923.1, 2: 76923.1, 4: 76923.1, 8: 76923.1)"]
