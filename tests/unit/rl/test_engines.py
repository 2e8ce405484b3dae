"""What a node asks for is what it gets."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.rl import engines
from p2pdrl.rl.engines import EngineOptions, has_bf16, make_engine
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


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("flags\t\t: fpu sse2 avx2 fma", False),
        ("flags\t\t: fpu avx512f avx512_bf16", True),
        ("flags\t\t: fpu amx_bf16 amx_tile", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        (None, True),  # a system that doesn't tell
    ],
)
def test_processors_tell_whether_they_have_bfloat16(text, known, tmp_path):
    file = tmp_path / "cpuinfo"
    if text is not None:
        file.write_text(text)
    assert has_bf16(torch.device("cpu"), file) == known


@pytest.mark.parametrize("known", [True, False])
def test_a_precision_that_makes_it_slower_is_told(known, monkeypatch):
    monkeypatch.setattr(engines, "has_bf16", lambda _: known)
    case = CASES["classifier"]()
    said = []
    for precision in ("float32", "bf16"):
        make_engine(EngineOptions(say=said.append), case.flat, case.forward, precision)
    assert [("several times slower" in text) for text in said] == [True] * (not known)
