"""What each block of a learner's policy costs on its device, and what that device is. Imports torch.

Also a process of its own, which ``p2pdrl pipeline plan --config`` starts as ``python -m
p2pdrl.workers.pipeline.measure --parts N``: it reads the task as JSON from its standard input, and writes
`Blocks` as JSON to its standard output.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import torch

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import ConfigError, P2PDRLError
from p2pdrl.rl.pipeline.parts import measure_parts
from p2pdrl.telemetry.progress import ProgressLine
from p2pdrl.workers.pipeline.protocol import Blocks, Measure

if TYPE_CHECKING:
    from p2pdrl.rl.trainer import Pipelineable

__all__ = ["identity", "main", "measured", "nccl_identity", "usable_bytes"]


def usable_bytes(device: torch.device, kept: float = 0.0) -> int:
    """Return the bytes of a CUDA device that a stage of this process may take; 0 of any other.

    Those are the free ones, and what the process holds itself but for ``kept`` (its parameters): torch keeps
    some to give out again, and in a pipeline's rank gradients and the optimizer's state are given up.
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


def measured(
    trainer: Pipelineable,
    asked: Measure,
    known: dict[int, Blocks],
    told: Callable[[int, int], None] = lambda _done, _total: None,
) -> Blocks:
    """Do what was asked: measure the blocks with one microbatch of the longest batch that the task has.

    Parameters, gradients and random numbers of the trainer stay as they are. What is ``known``, by number of
    microbatches, isn't measured again; what is free changes, and is looked at each time.
    """
    if asked.over_torch:
        from p2pdrl.workers.pipeline.torch_stages import import_schedules

        import_schedules()
    if asked.microbatches not in known:
        known[asked.microbatches] = _measured(trainer, asked.microbatches, told)
    blocks = known[asked.microbatches]
    if blocks.error:
        return blocks
    device, parameters = torch.device(blocks.device), sum(layer.parameter_bytes for layer in blocks.layers)
    usable = usable_bytes(device, parameters)
    return msgspec.structs.replace(blocks, usable_bytes=usable, gpu=nccl_identity(device))


def _measured(trainer: Pipelineable, microbatches: int, told: Callable[[int, int], None]) -> Blocks:
    try:
        parts = trainer.parts()
    except ConfigError as error:
        return Blocks(microbatches, (), "", error=str(error))
    return Blocks(microbatches, tuple(measure_parts(parts, microbatches, told=told)), str(parts.device))


def _run(arguments: argparse.Namespace) -> Blocks:
    from p2pdrl.rl.registry import build_trainer

    torch.set_num_threads(arguments.threads)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=TaskConfig)
    trainer = build_trainer(task, 0, arguments.device, allow_import=arguments.allow_import)
    try:
        with ProgressLine() as progress:
            progress.part(f"measuring the blocks of {task.subject} on this machine")
            return measured(trainer, Measure(arguments.parts), {}, progress.at)
    finally:
        trainer.close()


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="p2pdrl.workers.pipeline.measure")
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--allow-import", action="store_true")
    arguments = parser.parse_args()
    try:
        blocks = _run(arguments)
    except P2PDRLError as error:
        print(f"p2pdrl: {error}", file=sys.stderr)
        return error.exit_code
    sys.stdout.write(msgspec.json.encode(blocks).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
