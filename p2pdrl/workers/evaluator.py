"""Plays episodes with a checkpoint's policy, in a process of its own.

``p2pdrl eval`` starts it as ``python -m p2pdrl.workers.evaluator CHECKPOINT --episodes N`` and reads
one JSON document from its standard output; progress goes to standard error.
"""

from __future__ import annotations

import argparse
import base64
import sys
from pathlib import Path
from typing import Any

import msgspec

from p2pdrl.config.task import RegressionConfig, TaskConfig
from p2pdrl.errors import CheckpointError, P2PDRLError
from p2pdrl.rl.evaluate import EvalResult, evaluate, record_video
from p2pdrl.rl.registry import build_trainer
from p2pdrl.rl.trainer import Trainer
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes
from p2pdrl.tensors.moments import Moments

__all__ = ["main"]


def _read(path: str) -> Checkpoint:
    try:
        return from_bytes(Path(path).read_bytes())
    except OSError as error:
        raise CheckpointError(f"can't read the checkpoint {path}: {error.strerror}") from error


def _trainer(checkpoint: Checkpoint, arguments: argparse.Namespace) -> tuple[Trainer, TaskConfig]:
    try:
        task = msgspec.convert(checkpoint.meta.get("task"), TaskConfig)
    except msgspec.ValidationError as error:
        raise CheckpointError(f"the checkpoint's task can't be read: {error}") from error
    if isinstance(task.algorithm, RegressionConfig):
        raise CheckpointError(
            "the checkpoint holds a regression, which plays no episodes; its evaluation_loss is among the "
            "node's metrics"
        )
    trainer = build_trainer(task, arguments.seed, arguments.device, allow_import=arguments.allow_import)
    if trainer.layout != checkpoint.layout:
        raise CheckpointError("the checkpoint's layout isn't that of its task's network")
    fits = bool(checkpoint.sidecar) and checkpoint.sidecar_layout == trainer.sidecar_layout
    trainer.set_state(checkpoint.params, checkpoint.sidecar if fits else None, own=True)
    others = checkpoint.meta.get("others_moments")
    if isinstance(others, str):
        packed: dict[str, bytes] = msgspec.msgpack.decode(base64.b64decode(others))
        trainer.set_other_moments(
            {name: Moments.from_wire(msgspec.msgpack.decode(data)) for name, data in packed.items()}
        )
    return trainer, task


def _summary(result: EvalResult) -> dict[str, Any]:
    return {
        "mean": result.mean,
        "std": result.std,
        "median": result.median,
        "min": result.min,
        "max": result.max,
        "mean_length": sum(result.lengths) / len(result.lengths),
        "returns": list(result.returns),
    }


def _run(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    checkpoint = _read(arguments.checkpoint)
    trainer, task = _trainer(checkpoint, arguments)
    document: dict[str, Any] = {
        "env": task.env.id,
        "policy_version": checkpoint.meta.get("policy_version"),
        "env_steps": checkpoint.meta.get("env_steps"),
        "episodes": arguments.episodes,
        "seed": arguments.seed,
    }
    options: dict[str, Any] = {
        "seed": arguments.seed,
        "normalizer": trainer.observation_normalizer,
        "allow_import": arguments.allow_import,
    }
    for name, greedy in (("sampled", False), ("greedy", True)):
        print(f"playing {arguments.episodes} {name} episodes of {task.env.id} …", file=sys.stderr)
        result = evaluate(trainer.policy, task.env, arguments.episodes, greedy=greedy, **options)
        document[name] = _summary(result)
    if arguments.video is not None:
        print(f"filming one greedy episode to {arguments.video} …", file=sys.stderr)
        path = Path(arguments.video)
        document["video"] = {
            "path": str(path),
            "return": record_video(trainer.policy, task.env, path, greedy=True, **options),
        }
    return document


def main() -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="p2pdrl.workers.evaluator")
    parser.add_argument("checkpoint")
    parser.add_argument("--episodes", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--video")
    parser.add_argument("--allow-import", action="store_true")
    arguments = parser.parse_args()
    try:
        document = _run(arguments)
    except P2PDRLError as error:
        print(f"p2pdrl: {error}", file=sys.stderr)
        return error.exit_code
    sys.stdout.write(msgspec.json.encode(document).decode() + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
