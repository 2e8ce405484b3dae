"""`scripts/bench_overlap.py`: how long a learner waits for its link, by hand."""

from __future__ import annotations

import importlib
import math
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[3] / "scripts"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield importlib.import_module("bench_overlap")
    sys.modules.pop("bench_overlap")


@pytest.fixture
def link(script):
    # Two nodes send and receive the vector once: an element of 2 bytes takes 1 ms, a message 5 ms more.
    return script.Link(nodes=2, bytes_per_s=2000.0, call_s=0.005, element_bytes=2)


READY = [(0.040, 10), (0.010, 10), (0.0, 10)]
"""Ten elements each are ready 40 and 10 ms before the backward pass ends, and with its end."""


def test_one_message_leaves_when_the_backward_pass_has_ended(link):
    assert link.waits_s(READY, math.inf) == pytest.approx(0.035)
    assert link.exchange_s(30) == pytest.approx(0.035)


def test_buckets_leave_one_after_the_other_as_they_fill(link):
    # From -40 to -25 ms, from -10 to 5 ms, and then the last one, to 20 ms.
    assert link.waits_s(READY, 10) == pytest.approx(0.020)
    # Two are full at -10 ms, on their way to 15 ms; the rest follows to 30 ms.
    assert link.waits_s(READY, 20) == pytest.approx(0.030)


def test_calls_that_take_long_cost_more_than_buckets_gain(script):
    link = script.Link(nodes=2, bytes_per_s=2000.0, call_s=0.100, element_bytes=2)
    assert link.waits_s(READY, 10) > link.waits_s(READY, math.inf)


def test_gradients_are_noted_as_they_come_and_training_goes_on(script):
    link = script.Link(nodes=3, bytes_per_s=125e6, call_s=0.002, element_bytes=2)
    sets = "task.env.num_envs=2 task.algorithm.unroll_steps=16 task.algorithm.epochs=1"
    line = script.measure(f"grad_average {sets}", 1, link)
    size, rows, gradients = line.removeprefix(f"grad_average {sets}").split()[:3]
    assert (size, rows, gradients) == ("9,155", "8", "4")
