"""The group process: averages through torch.distributed for a daemon, which never waits inside torch."""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined] # it lists no exports

from p2pdrl.errors import WorkerError
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.workers.child import die_with_parent, print_without_blocking
from p2pdrl.workers.protocol import FrameBuffer
from p2pdrl.workers.torch_group.protocol import (
    Broken,
    FromGroup,
    GroupReduced,
    Host,
    Hosting,
    Joined,
    JoinGroup,
    Ready,
    Reduce,
    Row,
    ToGroup,
    decode_to_group,
    frame,
    memory_nbytes,
)
from p2pdrl.workers.torch_group.rendezvous import connect_store, cuda_device, join, leave, open_store

__all__ = ["TorchGroup", "main", "serve"]

_NORM_SPAN = 1 << 18
"""Entries that are added up at once: in float64 a vector beyond the cache takes torch ten times as long."""


class TorchGroup:
    """This process' membership in one group after another.

    Args:
        own: D float32 of this member, shared with the daemon.
        result: D float32, where means go.
        device: CUDA device that vectors may travel from; None for none.
    """

    def __init__(self, own: Tensor, result: Tensor, device: torch.device | None) -> None:
        self._own, self._result, self._device = own, result, device
        self._store: TCPStore | None = None
        self._size = 0
        self._nccl = False

    def host(self, order: Host) -> Hosting:
        """Open a store."""
        self.leave()
        self._store, port = open_store(order.others, order.timeout_s)
        return Hosting(port)

    def join(self, order: JoinGroup) -> Joined:
        """Meet the others; gives up after the order's timeout.

        Raises:
            OSError: no such address.
            RuntimeError: they didn't come in time, or one is gone.
            WorkerError: we are to host the group and have no store.
        """
        if order.rank > 0:
            self.leave()
            self._store = connect_store(order.host, order.port, order.timeout_s)
        if self._store is None:
            raise WorkerError("the first member opens the store before it joins")
        self._nccl = join(
            self._store,
            order.rank,
            order.size,
            host=order.host,
            timeout_s=order.timeout_s,
            device=self._device,
        )
        self._size = order.size
        return Joined("nccl" if self._nccl else "gloo")

    def reduce(self, order: Reduce) -> GroupReduced:
        """Average with all members.

        Raises:
            RuntimeError: one is gone or too late.
            WorkerError: one does another round.
        """
        if not self._size:
            raise WorkerError("a group is joined before it averages")
        rows = self._gather(order)
        if any(row[0] != order.number for row in rows):
            raise WorkerError(f"not all members do round {order.number}")
        total, bound = sum(row[1] for row in rows), min(row[4] for row in rows)
        result = self._result
        if order.weight:
            torch.mul(self._own, order.weight / total, out=result)
        else:
            result.zero_()
        if total:
            self._sum(torch.bfloat16 if order.bf16 else torch.float32)
        least, most = torch.aminmax(result)
        return GroupReduced(
            rows=tuple(Row(row[1], int(row[2]), row[5], row[3], int(row[6])) for row in rows),
            norm=_norm(result),
            sound=-bound <= float(least) and float(most) <= bound,
        )

    def leave(self) -> None:
        """Leave the group, if there is one; calling it again does nothing."""
        self._size = 0
        leave()
        self._store = None

    def _gather(self, order: Reduce) -> list[list[float]]:
        """Everybody's round, weight, policy version, squared norm, bound, learning rate and ``left``."""
        square = 0.0
        if order.spread and order.weight:
            square = _norm(self._own) ** 2
        mine = [
            float(order.number),
            order.weight,
            float(order.policy_version),
            square,
            order.max_abs,
            order.learning_rate,
            float(order.left),
        ]
        rows = [torch.empty(len(mine), dtype=torch.float64) for _ in range(self._size)]
        dist.all_gather(rows, torch.tensor(mine, dtype=torch.float64))
        return [row.tolist() for row in rows]

    def _sum(self, dtype: torch.dtype) -> None:
        """Replace what is in the result by the sum of all members'."""
        device = self._device if self._nccl else None
        if device is None and dtype == torch.float32:
            dist.all_reduce(self._result)
            return
        travelling = self._result.to(device=device, dtype=dtype)
        dist.all_reduce(travelling)
        self._result.copy_(travelling)


def _norm(vector: Tensor) -> float:
    """‖vector‖, added up in float64."""
    spans = torch.split(vector, _NORM_SPAN)
    return float(torch.stack([torch.linalg.vector_norm(span, dtype=torch.float64) for span in spans]).norm())


READ_BYTES = 1 << 16
MOST_CHARS = 300


def serve(sock: socket.socket, group: TorchGroup, device: str) -> None:
    """Do the daemon's orders until it closes its end of the socket."""
    frames = FrameBuffer()
    sock.sendall(frame(Ready(device)))
    while data := sock.recv(READ_BYTES):
        for body in frames.feed(data):
            sock.sendall(frame(_do(decode_to_group(body), group)))


def _do(order: ToGroup, group: TorchGroup) -> FromGroup:
    try:
        match order:
            case Host():
                return group.host(order)
            case JoinGroup():
                return group.join(order)
            case _:
                return group.reduce(order)
    except (RuntimeError, ValueError, OSError, WorkerError) as error:  # torch raises the first two
        group.leave()
        return Broken(_brief(error))


def _brief(error: Exception) -> str:
    """What went wrong, without gloo's source files and advice, which is for others than our users."""
    text = re.sub(r"^\[[^\]]*:\d+\] ?|\. This is typically caused by.*", "", " ".join(str(error).split()))
    return text[:MOST_CHARS] or type(error).__name__


def main() -> int:
    """Entry point of the child process; returns its exit code."""
    parser = argparse.ArgumentParser(prog="p2pdrl.workers.torch_group.process")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    print_without_blocking()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(arguments.threads)
    size = arguments.size
    region = SharedRegion.attach(arguments.memory, memory_nbytes(size))
    vectors = torch.from_numpy(np.frombuffer(region.buf, np.float32))
    device = cuda_device(arguments.device)
    group = TorchGroup(vectors[:size], vectors[size:], device)
    try:
        with socket.socket(fileno=arguments.fd) as sock:
            serve(sock, group, str(device or "cpu"))
    except (BrokenPipeError, ConnectionResetError):
        return 1  # the daemon is gone
    group.leave()
    return 0


if __name__ == "__main__":
    sys.exit(main())
