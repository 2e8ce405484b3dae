"""What each block of a learner's policy costs on its device, and what that device is. Imports torch."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor

from p2pdrl.errors import ConfigError
from p2pdrl.rl.networks.lstm import RecurrentContext
from p2pdrl.rl.pipeline.tensor_specs import RowSpec
from p2pdrl.rl.sequential import measure_blocks
from p2pdrl.workers.pipeline.protocol import Blocks, Measure

__all__ = ["identity", "measured", "nccl_identity", "usable_bytes"]


def usable_bytes(device: torch.device, kept: float = 0.0) -> int:
    """Return the bytes of a device that a stage of this process may take.

    Those are the free ones, and what the process holds itself but for its copy of the parameters: torch keeps
    some to give out again, and in a pipeline's rank gradients and the optimizer's state are given up.

    Args:
        device: any; of others than CUDA devices nothing is known, which is 0.
        kept: bytes that stay what they are.
    """
    if device.type != "cuda":
        return 0
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, int(free + torch.cuda.memory_reserved(device) - kept))


def identity(device: torch.device) -> str:
    """Return what a CUDA device is told from all others by, on whichever machine they are."""
    return str(torch.cuda.get_device_properties(device).uuid)


def nccl_identity(device: torch.device) -> str:
    """Return the same where NCCL can move tensors from and to a device; empty where it can't."""
    if device.type != "cuda":
        return ""
    from torch import distributed

    return identity(device) if distributed.is_available() and distributed.is_nccl_available() else ""


if TYPE_CHECKING:
    from p2pdrl.rl.trainer import Pipelineable


def measured(trainer: Pipelineable, asked: Measure, known: dict[int, Blocks]) -> Blocks:
    """Do what was asked: measure the blocks with one microbatch of the longest batch that the task has.

    Parameters, gradients and random numbers of the trainer stay as they are.

    Args:
        trainer: of the model.
        asked: by the daemon.
        known: by number of microbatches what was measured before, and is not again; this is added. What is
            free changes, and is looked at each time.
    """
    if asked.over_torch:
        from p2pdrl.workers.pipeline.torch_stages import import_schedules

        import_schedules()
    if asked.microbatches not in known:
        known[asked.microbatches] = _measured(trainer, asked.microbatches)
    blocks = known[asked.microbatches]
    if blocks.error:
        return blocks
    device, parameters = torch.device(blocks.device), sum(layer.parameter_bytes for layer in blocks.layers)
    usable = usable_bytes(device, parameters)
    return msgspec.structs.replace(blocks, usable_bytes=usable, gpu=nccl_identity(device))


def _measured(trainer: Pipelineable, microbatches: int) -> Blocks:
    try:
        parts = trainer.parts()
    except ConfigError as error:
        return Blocks(microbatches, (), "", error=str(error))
    device = next(parameter.device for block in parts.blocks for parameter in block.parameters())
    rows = math.ceil(parts.most_rows / max(microbatches, 1))
    random = torch.Generator().manual_seed(0)
    context = {name: _zeros(spec, rows, device) for name, spec in parts.context.items()}
    layers = measure_blocks(
        parts.blocks,
        _inputs(parts.inputs, rows, random).to(device),
        RecurrentContext(**context),
        titles=parts.block_map.titles,
        precision=parts.precision,
    )
    return Blocks(microbatches, tuple(layers), str(device))


def _inputs(spec: RowSpec, rows: int, random: torch.Generator) -> Tensor:
    shape = (rows, *spec.shape)
    if spec.dtype.is_floating_point:
        return torch.randn(shape, generator=random, dtype=spec.dtype)
    return torch.randint(spec.below or 256, shape, generator=random, dtype=spec.dtype)


def _zeros(spec: RowSpec, rows: int, device: torch.device) -> Any:
    return torch.zeros((rows, *spec.shape), dtype=spec.dtype, device=device)
