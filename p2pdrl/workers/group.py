"""The group process: averages through torch.distributed for a daemon, which never waits inside torch.

Started by the node as ``python -m p2pdrl.workers.group … --parent PID`` when a strategy's backend is torch.
It does one order after another; while it waits for other members it hears nothing, so a daemon whose view
has ended meanwhile kills it and goes on with the next one, which stands by.
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING

import numpy as np

from p2pdrl.errors import WorkerError
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.group_protocol import (
    Broken,
    FromGroup,
    Host,
    Join,
    Ready,
    ToGroup,
    decode_to_group,
    frame,
    memory_nbytes,
)
from p2pdrl.workers.output import print_patiently
from p2pdrl.workers.parent import die_with_parent
from p2pdrl.workers.protocol import FrameBuffer

if TYPE_CHECKING:
    from p2pdrl.workers.torch_group import TorchGroup

__all__ = ["main", "serve"]

READ_BYTES = 1 << 16
MOST_CHARS = 300


def serve(sock: socket.socket, group: TorchGroup, device: str) -> None:
    """Do the daemon's orders until it closes its end of the socket.

    Args:
        sock: this process' end, blocking.
        group: does them.
        device: told at once.
    """
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
            case Join():
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
    parser = argparse.ArgumentParser(prog="p2pdrl.workers.group")
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--device", required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    print_patiently()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    import torch

    from p2pdrl.workers.torch_group import TorchGroup
    from p2pdrl.workers.torch_meeting import cuda_device

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
