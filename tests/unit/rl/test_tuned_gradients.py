"""Automatic microbatches: a clock that is handed in decides, and memory that runs out."""

from __future__ import annotations

import pytest
import torch

from p2pdrl.rl.tuned_gradients import ActivationLimitError, Tuned

from .gradient_cases import CASES, reference


class Machine:
    """Runs a model, and says how long that took and how many rows fit in at once."""

    def __init__(self, forward, seconds, *, rows=10**9):
        self.now_s = 0.0
        self.passes = []
        self.rows = rows
        self._forward = forward
        self._seconds = seconds

    def __call__(self, inputs, context):
        self.passes.append(len(inputs))
        self.now_s += self._seconds(len(inputs))
        if len(inputs) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")
        return self._forward(inputs, context)

    def clock(self):
        return self.now_s


def make(seconds, case=None, **options):
    case = CASES["ppo"]() if case is None else case
    machine = Machine(case.forward, seconds, **options)
    said = []
    engine = Tuned(case.flat, machine, clock=machine.clock, say=said.append)
    return case, machine, engine, said


@pytest.mark.parametrize(
    ("seconds", "picked"),
    [
        (lambda rows: 1.0, 1),  # each pass costs the same: as few as can be
        (lambda rows: float(rows**2), 8),  # large ones cost more than they bring
        (lambda rows: 1.0 + 100.0 * (rows > 7), 2),  # whatever is beyond the cache is slow
        (lambda rows: 1.0 + 100.0 * (rows > 4), 4),
    ],
)
def test_the_clock_decides(seconds, picked):
    case, machine, engine, said = make(seconds)
    assert engine.metrics() == {}
    for _ in range(24):
        engine.gradients(case.batch, case.objective)
    assert engine.metrics() == {"microbatches": picked}
    assert len(said) == 1
    assert said[0].startswith(f"microbatches = {picked} (")
    machine.passes.clear()
    engine.gradients(case.batch, case.objective)
    assert len(machine.passes) == picked


def test_every_measurement_is_a_gradient():
    case, _, engine, _ = make(lambda rows: 1.0)
    expected, terms = reference(case)
    for _ in range(26):
        torch.testing.assert_close(engine.gradients(case.batch, case.objective), terms, rtol=1e-12, atol=0)
        torch.testing.assert_close(case.flat.gradients_D, expected, rtol=1e-12, atol=1e-14)


def test_no_room_means_more_microbatches_for_the_same_gradient():
    case, machine, engine, said = make(lambda rows: 1.0, rows=5)
    expected, _ = reference(case)
    engine.gradients(case.batch, case.objective)
    assert machine.passes == [13, 7, 4, 3, 3, 3]
    torch.testing.assert_close(case.flat.gradients_D, expected, rtol=1e-12, atol=1e-14)
    assert said == [
        "microbatches = 1 goes beyond the memory, trying 2",
        "microbatches = 2 goes beyond the memory, trying 4",
    ]
    for _ in range(11):
        engine.gradients(case.batch, case.objective)
    assert engine.metrics() == {"microbatches": 4}
    machine.rows = 2  # somebody else took the room
    engine.gradients(case.batch, case.objective)
    torch.testing.assert_close(case.flat.gradients_D, expected, rtol=1e-12, atol=1e-14)
    assert max(machine.passes[-8:]) == 2


def test_no_room_for_a_single_row_is_an_error():
    case, _, engine, _ = make(lambda rows: 1.0, rows=0)
    with pytest.raises(torch.OutOfMemoryError):
        engine.gradients(case.batch, case.objective)


def test_other_errors_pass():
    case, machine, engine, _ = make(lambda rows: 1.0)
    machine._forward = lambda *_: 1 / 0
    with pytest.raises(ZeroDivisionError):
        engine.gradients(case.batch, case.objective)


def kept_bytes(case, rows):
    """What autograd keeps for a pass over some rows, parameters aside, each piece of memory once."""
    pieces = {}

    def keep(tensor):
        pieces[tensor.data_ptr()] = tensor.nbytes
        return tensor

    vector = case.flat.parameters_D
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        batch = case.batch
        targets = {name: target[:rows] for name, target in batch.targets.items()}
        loss, _ = case.objective.over(batch.rows)(case.forward(batch.inputs[:rows], batch.context), targets)
        begin = vector.data_ptr()
        total = sum(n for at, n in pieces.items() if not begin <= at < begin + vector.nbytes)
    del loss
    return total


def test_a_limit_on_activations_is_kept_to():
    case = CASES["ppo"]()
    limit_bytes = kept_bytes(case, 4)  # of the largest of four parts
    assert kept_bytes(case, 7) > 1.3 * limit_bytes
    engine = Tuned(case.flat, case.forward, limit_bytes=limit_bytes, clock=lambda: 0.0)
    for _ in range(12):
        engine.gradients(case.batch, case.objective)
    assert engine.metrics() == {"microbatches": 4}
    tight = Tuned(case.flat, case.forward, limit_bytes=100)
    with pytest.raises(ActivationLimitError, match=r"node\.learner\.activation_limit_bytes allows 100"):
        tight.gradients(case.batch, case.objective)
