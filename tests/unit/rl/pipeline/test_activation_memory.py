"""What ranks say that they keep, against what autograd keeps of all microbatches at once, and the planner."""

from __future__ import annotations

import msgspec
import pytest
import torch

from p2pdrl.pipeline.layers import Peer
from p2pdrl.pipeline.partition import Demands, partition_at
from p2pdrl.rl.gradients import cut
from p2pdrl.rl.networks.lstm import NO_CONTEXT
from p2pdrl.rl.pipeline import runner
from p2pdrl.rl.pipeline.messages import Opening
from p2pdrl.rl.pipeline.runner import ActivationMemory, Recorder, ScheduleRunner
from p2pdrl.rl.pipeline.stage_parameters import StageParameters
from p2pdrl.rl.sequential import measure_blocks

from .pipelines import CPU, make_case, make_plan


def recorded(case, parts, microbatches, **options):
    """The most that one rank keeps of all microbatches."""
    share = StageParameters(parts, make_plan(parts, 1, microbatches, "gpipe"), 0, CPU, **options)
    runner = ScheduleRunner(share, None, 1.0, recorder=Recorder())
    objective = msgspec.msgpack.encode(case.objective)
    rows = len(case.batch.inputs)
    opening = Opening(0, 0, case.batch.rows, rows, microbatches, str(parts.travelling)[6:], objective)
    runner.begin(opening, cut(case.batch, microbatches))
    runner.run()
    return runner.recorder.activation_bytes


def really_kept(case, parts, microbatches):
    """The same, with the graphs of all microbatches in memory at once."""
    share = StageParameters(parts, make_plan(parts, 1, microbatches, "gpipe"), 0, CPU)
    memory, roots = {}, []

    def note(tensor):
        storage = tensor.untyped_storage()
        memory[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    batches = cut(case.batch, microbatches)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        for batch in batches:
            roots.append(share.forward(0, batch.inputs, batch.context, stored=microbatches))
            note(roots[-1])
    given = [tensor for batch in batches for tensor in (batch.inputs, *batch.context) if tensor is not None]
    for tensor in (share.parameters_P, *given):
        memory.pop(tensor.untyped_storage().data_ptr(), None)
    return sum(memory.values()) + case.batch.inputs.nbytes


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "transformer", "lstm"])
def test_a_rank_tells_what_autograd_keeps(name, precision):
    case, parts = make_case(name, torch.float32, precision=precision)
    if name == "lstm":  # it keeps more where episodes begin, which they do elsewhere in each microbatch
        case.batch.context.starts_BT.zero_()
    assert recorded(case, parts, 3) == really_kept(case, parts, 3)


@pytest.mark.parametrize("name", ["resnet", "transformer"])
def test_computing_anew_keeps_less(name):
    case, parts = make_case(name, torch.float32)
    plain, anew = (recorded(case, parts, 8, checkpoint_activations=option) for option in (False, True))
    assert anew < plain / 2


@pytest.mark.parametrize("precision", ["float32", "bf16"])
@pytest.mark.parametrize("name", ["mlp", "cnn", "resnet", "transformer"])
def test_the_planner_expects_what_a_rank_will_tell(name, precision):
    """Blocks by themselves keep what they do in a row, but for their edges: what a block gives may be kept in
    another form only. Weights that were rounded for one microbatch are no more than that in another."""
    case, parts = make_case(name, torch.float32, rows=12, precision=precision)
    rows = 4
    layers = measure_blocks(parts.blocks, case.batch.inputs[:rows], precision=precision, repeats=1)
    for anew in (False, True):
        demands = Demands(0.0, 3, anew, input_bytes=case.batch.inputs[:rows].nbytes)
        (stage,) = partition_at(layers, [Peer("a")], (), demands=demands).stages
        told = recorded(case, parts, 3, checkpoint_activations=anew)
        assert 0.9 < stage.memory_bytes / told < 1.15, (name, anew)


def test_it_looks_once_at_each_length(monkeypatch):
    looked = []
    monkeypatch.setattr(
        runner,
        "saved_bytes",
        lambda run, known, look=runner.saved_bytes: looked.append(1) or look(run, known),
    )
    _, parts = make_case("mlp", torch.float32)
    for checkpoint in (False, True):
        looked.clear()
        share = StageParameters(
            parts, make_plan(parts, 1, 2, "gpipe"), 0, CPU, checkpoint_activations=checkpoint
        )
        runs = []
        share._stages[0][0].register_forward_pre_hook(lambda _, given, runs=runs: runs.append(len(given[0])))
        kept = ActivationMemory(share)
        for rows in (6, 5, 6, 5, 6):
            output, bytes_ = kept.forward(0, torch.randn(rows, 5), NO_CONTEXT, stored=2)
            inner = 4 * rows * (16 + 14 + 12 + 10 + 8)
            assert bytes_ == ((0, inner) if checkpoint else (inner, 0))
            assert output.requires_grad
        assert len(looked) == 2
        # computed anew: what is kept of the real forward isn't there yet, and another shows it
        assert runs == ([6, 6, 5, 5, 6, 5, 6] if checkpoint else [6, 5, 6, 5, 6])
