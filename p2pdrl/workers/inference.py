"""The inference process of a node: acts with the node's newest policy on observations that others bring.

Started by the daemon (`node.inference`) as ``python -m p2pdrl.workers.inference --fd N --parent PID --policy
FD``. One turn of its loop: read the message that names a slot, copy the parameters where there are newer ones
in shared memory, act on the slot's observations, say so. It keeps no state that must survive: it ends when it
is killed, when the daemon dies or closes its socket.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from p2pdrl.config.task import TaskConfig
from p2pdrl.errors import LayoutMismatchError, WorkerError
from p2pdrl.tensors.inference_slots import InferenceSlots
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.tensors.shared_policy import SharedPolicy
from p2pdrl.workers.child import child_main
from p2pdrl.workers.protocol import (
    FrameBuffer,
    Infer,
    InferenceReady,
    Inferred,
    StartInference,
    ToInference,
    UseSlots,
    decode_to_inference,
    frame,
)

if TYPE_CHECKING:
    from p2pdrl.rl.inference import PolicyInference

__all__ = ["InferenceWorker", "main"]

READ_BYTES = 1 << 16


class InferenceWorker:
    """A policy, the memory that its parameters come from, and the slots that batches come in.

    Args:
        policy: as the daemon writes it, with one version there at least.

    Raises:
        LayoutMismatchError: the daemon's parameters aren't those of this network.
    """

    def __init__(self, inference: PolicyInference, policy: SharedRegion, size: int) -> None:
        if inference.size != size:
            raise LayoutMismatchError(f"this network has {inference.size} parameters, the node's has {size}")
        self._inference = inference
        self._shared = SharedPolicy(policy, size, inference.obs_shape)
        self._vector_D = np.empty(size, np.float32)
        self._writes = 0
        self._slots: InferenceSlots | None = None

    def use_slots(self, region: SharedRegion, rows: int, slots: int) -> None:
        """Take the memory for batches of up to ``rows`` observations.

        Raises:
            LayoutMismatchError: it is too small.
        """
        self._slots = InferenceSlots(region, self._inference.spec, rows, slots)

    def infer(self, request: Infer) -> Inferred:
        """Act on a batch, with the newest parameters.

        Raises:
            WorkerError: there are no slots yet, or there is no policy.
        """
        if self._slots is None:
            raise WorkerError("the daemon sent a batch before the memory for it")
        self._refresh()
        slot = self._slots[request.slot]
        answer = self._inference.answer(slot.obs_NX[: request.rows], request.greedy)
        slot.actions_NA[: request.rows] = answer.actions_NA
        slot.log_probs_N[: request.rows] = answer.log_probs_N
        if answer.values_N is not None:
            slot.values_N[: request.rows] = answer.values_N
        return Inferred(request.slot, answer.policy_version)

    def _refresh(self) -> None:
        writes = self._shared.writes
        if writes and writes == self._writes:
            return
        acting = self._shared.read(self._vector_D)
        if acting is None:  # it was rewritten all the time: the next batch tries again
            if not self._writes:
                raise WorkerError("there is no policy to read")
            return
        self._inference.use(self._vector_D, acting)
        self._writes = writes


class _FromDaemon:
    """Messages, and the descriptors that come beside them."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._frames = FrameBuffer()
        self.fds: deque[int] = deque()

    def __iter__(self) -> Iterator[ToInference]:
        """Yield messages until the daemon closes its socket."""
        while True:
            data, fds, _, _ = socket.recv_fds(self._sock, READ_BYTES, 4)
            self.fds += fds
            if not data:
                return
            for body in self._frames.feed(data):
                yield decode_to_inference(body)


def _live(sock: socket.socket, options: argparse.Namespace) -> None:
    messages = _FromDaemon(sock)
    worker: InferenceWorker | None = None
    for message in messages:
        if isinstance(message, StartInference):
            worker = _start(sock, message, options.policy)
        elif worker is None:
            raise WorkerError("the daemon didn't say first what to act with")
        elif isinstance(message, UseSlots):
            region = SharedRegion.attach(messages.fds.popleft(), message.nbytes)
            worker.use_slots(region, message.rows, message.slots)
        else:
            sock.sendall(frame(worker.infer(message)))


def _start(sock: socket.socket, start: StartInference, policy_fd: int) -> InferenceWorker:
    import torch

    torch.set_num_threads(start.threads)
    from p2pdrl.rl.inference import PolicyInference  # torch is slow to import: not before it is needed

    task = msgspec.json.decode(start.task, type=TaskConfig)
    inference = PolicyInference(task, start.seed, start.device, allow_import=start.allow_import)
    region = SharedRegion.attach(policy_fd, start.policy_nbytes, writable=False)
    worker = InferenceWorker(inference, region, start.policy_size)
    sock.sendall(frame(InferenceReady(inference.spec, str(inference.device))))
    return worker


def main() -> int:
    """Entry point of the child process; returns its exit code."""
    return child_main("inference process", _live, ["--policy"])


if __name__ == "__main__":
    sys.exit(main())
