"""Writes a run's figures to W&B or MLflow, in a process of its own, which may wait for a server.

A node's daemon (`node.children.run_writers`) starts it as ``python -m p2pdrl.workers.run_writer --fd N
--parent PID``. When the daemon sends no more, the run is ended and so is the process.
"""

from __future__ import annotations

import argparse
import socket
import sys
from collections.abc import Iterator

from p2pdrl.errors import WorkerError
from p2pdrl.telemetry.writers import MlflowWriter, WandbWriter, served_writer
from p2pdrl.workers.child import child_main
from p2pdrl.workers.protocol import (
    FrameBuffer,
    OpenRun,
    PrepareWriter,
    RunOpened,
    RunPoint,
    ToRunWriter,
    WriterReady,
    decode_to_run_writer,
    frame,
)

__all__ = ["main"]


def _messages(sock: socket.socket) -> Iterator[ToRunWriter]:
    frames = FrameBuffer()
    while data := sock.recv(1 << 16):
        yield from map(decode_to_run_writer, frames.feed(data))


def _live(sock: socket.socket, _options: argparse.Namespace) -> None:
    made: type[WandbWriter] | type[MlflowWriter] | None = None
    writer: WandbWriter | MlflowWriter | None = None
    for message in _messages(sock):
        if isinstance(message, PrepareWriter):
            made = served_writer(message.kind)
            sock.sendall(frame(WriterReady()))
        elif isinstance(message, OpenRun) and made is not None:
            writer = made(message.run)
            sock.sendall(frame(RunOpened(writer.where)))
        elif isinstance(message, RunPoint) and writer is not None:
            writer.scalars(message.step, message.wall_s, message.values)
        else:
            raise WorkerError(f"the daemon sent {type(message).__name__} too early")
    if writer is not None:
        writer.close()


def main() -> int:
    """Entry point; returns the exit code."""
    return child_main("run writer", _live, [])


if __name__ == "__main__":
    sys.exit(main())
