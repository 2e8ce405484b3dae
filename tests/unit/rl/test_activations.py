"""What a gradient keeps in memory, and the bound on it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from p2pdrl.rl.tuned_gradients import ActivationLimitError, Meter, limited

PARAMETERS = torch.ones(1000, requires_grad=True)


def chain(x, length):
    for _ in range(length):
        x = torch.tanh(x)  # keeps its output: 400 bytes
    return x.sum()


def test_it_counts_what_is_kept_until_it_is_let_go():
    meter = Meter(10**9, range(0))
    x = torch.ones(100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda kept: kept.tensor):
        loss = chain(x, 5)
        assert meter.peak_bytes == 2000
        loss.backward()
        for _ in range(3):
            chain(x, 2).backward()
    assert meter.peak_bytes == 2000
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_memory_counts_once_and_parameters_do_not():
    begin = PARAMETERS.data_ptr()
    meter = Meter(10**9, range(begin, begin + PARAMETERS.nbytes))
    x = torch.ones(100, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(meter.keep, lambda kept: kept.tensor):
        loss = (PARAMETERS[100:200] * x).sum() + (x * x).sum()
    assert meter.peak_bytes == 400  # x, four times
    del loss


def test_the_limit_ends_a_computation_before_it_is_done():
    done = []

    def run():
        x = torch.ones(100, requires_grad=True)
        for _ in range(100):
            x = torch.tanh(x)
            done.append(1)

    with pytest.raises(ActivationLimitError), limited(1000, PARAMETERS):
        run()
    assert len(done) == 2


def test_within_the_limit_nothing_changes():
    x = torch.linspace(-1, 1, 100).requires_grad_()
    with limited(2000, PARAMETERS):
        for _ in range(3):  # each lets go of what it kept
            x.grad = None
            chain(x, 5).backward()
    expected = torch.autograd.grad(chain(x, 5), x)[0]
    assert torch.equal(x.grad, expected)


def test_nothing_is_left_behind():
    """No cycles: memory is free again at once, which is what matters when there was too little."""
    x = torch.ones(100, requires_grad=True)
    gone = weakref.ref(x)
    gc.disable()
    try:
        with contextlib.suppress(ActivationLimitError), limited(1000, PARAMETERS):
            chain(x, 5)
        del x
        assert gone() is None
    finally:
        gc.enable()


def test_zero_is_no_limit():
    with limited(0, PARAMETERS):
        chain(torch.ones(100_000, requires_grad=True), 50).backward()


@pytest.mark.parametrize(("limit_bytes", "fits"), [(1500, True), (1499, False)])
def test_a_gpus_allocator_is_asked_for_its_peak(monkeypatch, limit_bytes, fits):
    """Without a GPU: 1000 bytes are taken before, 2500 at the peak."""
    calls = []
    cuda = {
        "memory_allocated": lambda device: calls.append(("now", device)) or 1000,
        "reset_peak_memory_stats": lambda device: calls.append(("reset", device)),
        "max_memory_allocated": lambda device: calls.append(("peak", device)) or 2500,
    }
    for name, function in cuda.items():
        monkeypatch.setattr(torch.cuda, name, function)
    parameters = SimpleNamespace(is_cuda=True, device="cuda:1")
    expected = contextlib.nullcontext() if fits else pytest.raises(ActivationLimitError, match="1500")
    with expected, limited(limit_bytes, parameters):
        calls.append(("work", None))
    assert calls == [("now", "cuda:1"), ("reset", "cuda:1"), ("work", None), ("peak", "cuda:1")]
