"""What is said of GPUs, with torch's answers made up: there needn't be any."""

from __future__ import annotations

from types import SimpleNamespace

import msgspec
import pytest
import torch
from torch import distributed

from p2pdrl.pipeline.layers import Layer
from p2pdrl.workers.pipeline import measure
from p2pdrl.workers.pipeline.measure import identity, nccl_identity, usable_bytes
from p2pdrl.workers.pipeline.protocol import Blocks, Measure

CPU, GPU = torch.device("cpu"), torch.device("cuda", 1)


class Cuda:
    """torch.cuda with two GPUs, of the second of which this process holds some memory."""

    def __init__(self, monkeypatch) -> None:
        self.free, self.reserved = 600, 300
        monkeypatch.setattr(torch.cuda, "mem_get_info", self.mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", self.memory_reserved)
        monkeypatch.setattr(torch.cuda, "get_device_properties", self.properties)

    def mem_get_info(self, device: torch.device) -> tuple[int, int]:
        assert device == GPU
        return self.free, 1000

    def memory_reserved(self, device: torch.device) -> int:
        assert device == GPU
        return self.reserved

    def properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=f"uuid of {device.index}")


@pytest.fixture
def cuda(monkeypatch) -> Cuda:
    return Cuda(monkeypatch)


def test_a_stage_may_take_what_is_free_and_what_its_learner_gives_up(cuda):
    assert usable_bytes(GPU) == 900
    assert usable_bytes(GPU, kept=75.0) == 825
    cuda.free = 50  # another process came
    assert usable_bytes(GPU, kept=75.0) == 275
    assert usable_bytes(GPU, kept=400.0) == 1, "0 would be no limit"


def test_nothing_is_said_of_other_devices():
    assert usable_bytes(CPU) == 0
    assert usable_bytes(torch.device("meta")) == 0
    assert nccl_identity(CPU) == ""


@pytest.mark.parametrize(("nccl", "said"), [(True, "uuid of 1"), (False, "")])
def test_a_gpu_counts_where_nccl_is(cuda, monkeypatch, nccl: bool, said: str):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: nccl)
    assert nccl_identity(GPU) == said
    assert identity(GPU) == "uuid of 1"


def test_blocks_are_measured_once_and_memory_each_time(cuda, monkeypatch):
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    measured = []

    def of_one_block(_trainer, microbatches: int, _told) -> Blocks:
        measured.append(microbatches)
        return Blocks(microbatches, (Layer("0", 1.0, 2.0, 8, 8),), "cuda:1")

    monkeypatch.setattr(measure, "_measured", of_one_block)
    known: dict[int, Blocks] = {}
    first = measure.measured(None, Measure(4), known)
    assert (first.usable_bytes, first.gpu) == (892, "uuid of 1")
    cuda.free = 100
    again = measure.measured(None, Measure(4), known)
    assert again == msgspec.structs.replace(first, usable_bytes=392)
    assert measured == [4]


def test_a_policy_that_cant_be_cut_has_no_device(monkeypatch):
    monkeypatch.setattr(
        measure, "_measured", lambda _trainer, number, _told: Blocks(number, (), "", "one block")
    )
    assert measure.measured(None, Measure(4), {}) == Blocks(4, (), "", "one block")
