"""Says what a task's blocks are and cost on this machine, in a process of its own.

``p2pdrl pipeline plan --config`` starts it as ``python -m p2pdrl.workers.pipeline.block_lister --parts N``,
writes the task as JSON to its standard input, and reads `Blocks` as JSON from its standard output.
"""

from __future__ import annotations

import argparse
import sys

import msgspec

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import P2PDRLError
from p2pdrl.workers.pipeline.protocol import Blocks, Measure

__all__ = ["main"]


def _run(arguments: argparse.Namespace) -> Blocks:
    import torch

    from p2pdrl.rl.registry import build_trainer
    from p2pdrl.workers.pipeline.measure import measured

    torch.set_num_threads(arguments.threads)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=TaskConfig)
    trainer = build_trainer(task, 0, arguments.device, allow_import=arguments.allow_import)
    try:
        return measured(trainer, Measure(arguments.parts), {})
    finally:
        trainer.close()


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="p2pdrl.workers.pipeline.block_lister")
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
