"""Plays episodes with a checkpoint's policy, in a process of its own.

``p2pdrl eval`` starts it as ``python -m p2pdrl.workers.evaluator CHECKPOINT --episodes N`` and reads
one JSON document from its standard output; progress goes to standard error. A node's daemon
(`node.children.evaluator`) starts it as ``… --fd N --parent PID --memory FD --nbytes N``, and asks for one
evaluation after the other: it stays, so that torch is imported once.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from p2pdrl.errors import P2PDRLError
from p2pdrl.rl.evaluate import EvalResult, evaluate, record_video, require_video
from p2pdrl.rl.inference import PolicyInference, task_of
from p2pdrl.telemetry.progress import ProgressLine
from p2pdrl.tensors.checkpoint import Checkpoint, from_bytes, read_file
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.workers.child import child_main
from p2pdrl.workers.protocol import Film, Filmed, FrameBuffer, Play, Played, decode_to_evaluator, frame

__all__ = ["Players", "main"]

LOWEST = 19
"""The nice value of a process that others' work comes before."""


class Players:
    """Makes the policy that a checkpoint's task asks for, once for each task, and gives it the parameters.

    Args:
        device: of the policy.
        allow_import: permit environment ids that import a module.
    """

    def __init__(self, device: str, *, allow_import: bool) -> None:
        self._device = device
        self._allow_import = allow_import
        self._built: PolicyInference | None = None

    def of(self, checkpoint: Checkpoint) -> PolicyInference:
        """Return the policy with the checkpoint's parameters.

        Raises:
            CheckpointError: there is nothing to play, or it doesn't fit its own task.
            ConfigError: the task can't be built here.
        """
        task = task_of(checkpoint)
        if self._built is None or self._built.task != task:
            self._built = PolicyInference(task, 0, self._device, allow_import=self._allow_import)
        self._built.restore(checkpoint)
        return self._built


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
    checkpoint = read_file(Path(arguments.checkpoint))
    played = Players(arguments.device, allow_import=arguments.allow_import).of(checkpoint)
    task = played.task
    document: dict[str, Any] = {
        "env": task.env.id,
        "policy_version": checkpoint.meta.get("policy_version"),
        "env_steps": checkpoint.meta.get("env_steps"),
        "episodes": arguments.episodes,
        "seed": arguments.seed,
    }
    options: dict[str, Any] = {
        "seed": arguments.seed,
        "normalizer": played.normalizer,
        "allow_import": arguments.allow_import,
    }
    if arguments.video is not None:
        require_video(task.env, Path(arguments.video), allow_import=arguments.allow_import)
    with ProgressLine() as progress:
        for name, greedy in (("sampled", False), ("greedy", True)):
            progress.part(f"playing {arguments.episodes} {name} episodes of {task.env.id}")
            result = evaluate(
                played.policy, task.env, arguments.episodes, greedy=greedy, told=progress.at, **options
            )
            document[name] = _summary(result)
        if arguments.video is not None:
            progress.part(f"filming one greedy episode to {arguments.video}")
            path = Path(arguments.video)
            document["video"] = {
                "path": str(path),
                "return": record_video(played.policy, task.env, path, greedy=True, **options),
            }
    return document


class Service:
    """Answers the daemon's requests, one after the other.

    Args:
        memory: where the daemon puts the checkpoint that is to be played.
    """

    def __init__(self, memory: SharedRegion) -> None:
        self._memory = memory
        self._players: Players | None = None

    def play(self, request: Play) -> Played:
        """Play the episodes that the daemon asks for, on the processor."""
        played = self._policy(request, request.threads)
        began_s = time.perf_counter()
        result = evaluate(
            played.policy,
            played.task.env,
            request.episodes,
            greedy=request.greedy,
            seed=request.seed,
            normalizer=played.normalizer,
            allow_import=request.allow_import,
        )
        length = sum(result.lengths) / len(result.lengths)
        return Played(result.mean, result.std, length, time.perf_counter() - began_s)

    def film(self, request: Film) -> Filmed:
        """Film an episode, while nobody else wants the processor."""
        began_s = time.perf_counter()
        os.nice(LOWEST)
        played = self._policy(request, 1)
        episode_return = record_video(
            played.policy,
            played.task.env,
            Path(request.path),
            greedy=True,
            seed=request.seed,
            normalizer=played.normalizer,
            allow_import=request.allow_import,
        )
        return Filmed(episode_return, time.perf_counter() - began_s)

    def _policy(self, request: Play | Film, threads: int) -> PolicyInference:
        import torch

        torch.set_num_threads(threads)
        if self._players is None:
            self._players = Players("cpu", allow_import=request.allow_import)
        return self._players.of(from_bytes(bytes(self._memory.buf[: request.nbytes])))


def _live(sock: socket.socket, options: argparse.Namespace) -> None:
    """Answer requests until the daemon closes its socket."""
    service = Service(SharedRegion.attach(options.memory, options.nbytes, writable=False))
    frames = FrameBuffer()
    while data := sock.recv(1 << 16):
        for body in frames.feed(data):
            request = decode_to_evaluator(body)
            answer = service.film(request) if isinstance(request, Film) else service.play(request)
            sock.sendall(frame(answer))


def main() -> int:
    """Entry point; returns the exit code."""
    if "--fd" in sys.argv:
        return child_main("evaluator", _live, ["--memory", "--nbytes"])
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
