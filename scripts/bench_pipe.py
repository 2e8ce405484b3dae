"""Measure pipes between two processes over loopback, beside raw TCP and torch.distributed's gloo.

Each round times, one after another, a raw socket (sendall, recv_into), a pipe without and with keys, and
gloo (send, recv): messages there and back ("ping-pong"), and a row of messages one way with one short answer
at the end. What else the machine does falls on all of them alike, so the ratios to the raw socket of the
same round count. Printed are medians of the time of one message (ping-pong: one way, half a round trip),
MB/s, CPU time of both processes together, and the median ratio with its quartiles.

gloo's threads poll without sleeping: where the processes share a core, its figures are about that.

    python scripts/bench_pipe.py --rounds 21
"""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Protocol

import numpy as np

from p2pdrl.errors import PeerUnreachableError
from p2pdrl.transport.pipe.end import PipeEnd

SIZES = (16 << 10, 256 << 10, 4 << 20)
KEYS = (bytes(range(32)), bytes(range(32, 64)))
DEADLINE_S = 60.0


class Channel(Protocol):
    """One end of what is measured."""

    def send(self, view: memoryview) -> None:
        """Send one message."""
        ...

    def take(self, nbytes: int) -> None:
        """Receive one message of that length into the next buffer."""
        ...

    def close(self) -> None:
        """Be done."""
        ...


class Buffers:
    """Where messages come to lie: four buffers in turn, since what came is used while the next comes."""

    def __init__(self) -> None:
        self._buffers = [memoryview(np.zeros(max(SIZES), np.uint8)) for _ in range(4)]
        self._turn = 0

    def next(self, nbytes: int) -> memoryview:
        """Return the next buffer."""
        self._turn += 1
        return self._buffers[self._turn % 4][:nbytes]


class Raw:
    """A socket."""

    def __init__(self, sock: socket.socket, buffers: Buffers) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._sock = sock
        self._buffers = buffers

    def send(self, view: memoryview) -> None:
        """See `Channel`."""
        self._sock.sendall(view)

    def take(self, nbytes: int) -> None:
        """See `Channel`."""
        out, got = self._buffers.next(nbytes), 0
        while got < nbytes:
            count = self._sock.recv_into(out[got:])
            if count == 0:
                raise ConnectionResetError
            got += count

    def close(self) -> None:
        """See `Channel`."""
        self._sock.close()


class Pipe:
    """A pipe."""

    def __init__(self, sock: socket.socket, keys: tuple[bytes, bytes] | None, buffers: Buffers) -> None:
        self._end = PipeEnd(sock, keys, into=lambda _kind, _meta, nbytes: buffers.next(nbytes))

    def send(self, view: memoryview) -> None:
        """See `Channel`."""
        self._end.send(1, b"", view, deadline_s=DEADLINE_S)

    def take(self, nbytes: int) -> None:
        """See `Channel`."""
        vector = self._end.receive(deadline_s=DEADLINE_S).vector
        if vector is None or len(vector) != nbytes:
            raise RuntimeError("another message came")

    def close(self) -> None:
        """See `Channel`."""
        with contextlib.suppress(PeerUnreachableError):  # the other side was faster
            self._end.flush(deadline_s=DEADLINE_S)
        self._end.close()


class Gloo:
    """A process group of two."""

    def __init__(self, rank: int, store: str, buffers: Buffers) -> None:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        self._torch, self._dist, self._other, self._buffers = torch, dist, 1 - rank, buffers
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

    def send(self, view: memoryview) -> None:
        """See `Channel`."""
        self._dist.send(self._torch.frombuffer(view, dtype=self._torch.uint8), self._other)

    def take(self, nbytes: int) -> None:
        """See `Channel`."""
        out = self._torch.frombuffer(self._buffers.next(nbytes), dtype=self._torch.uint8)
        self._dist.recv(out, self._other)

    def close(self) -> None:
        """See `Channel`; the group stays for the next round."""


class Side:
    """One of the two processes: makes channels, and plays its part in a trial.

    Args:
        rank: 0 asks, 1 answers.
        port: where rank 0 listens.
        store: a file in which gloo's processes find each other; empty to leave gloo out.
        listening: rank 0's listener.
    """

    def __init__(self, rank: int, port: int, store: str, listening: socket.socket | None) -> None:
        self._rank = rank
        self._port = port
        self._listening = listening
        self._buffers = Buffers()
        self._gloo = Gloo(rank, store, self._buffers) if store else None
        self._out = memoryview(np.random.default_rng(rank).integers(0, 256, max(SIZES), dtype=np.uint8))

    def _socket(self) -> socket.socket:
        if self._listening is not None:
            return self._listening.accept()[0]
        return socket.create_connection(("127.0.0.1", self._port))

    def _channel(self, kind: str) -> Channel:
        if kind == "gloo":
            if self._gloo is None:
                raise RuntimeError("gloo was left out")
            return self._gloo
        sock = self._socket()
        if kind == "raw":
            return Raw(sock, self._buffers)
        keys = KEYS if self._rank == 0 else KEYS[::-1]
        return Pipe(sock, keys if kind == "pipe, keys" else None, self._buffers)

    def trial(self, kind: str, mode: str, nbytes: int, count: int) -> tuple[float, float]:
        """Move ``count`` messages; return wall and CPU seconds of this side."""
        channel = self._channel(kind)
        try:
            self._move(channel, mode, nbytes, 2)
            wall_s, cpu_s = time.perf_counter(), time.process_time()
            self._move(channel, mode, nbytes, count)
            return time.perf_counter() - wall_s, time.process_time() - cpu_s
        finally:
            channel.close()

    def _move(self, channel: Channel, mode: str, nbytes: int, count: int) -> None:
        out = self._out[:nbytes]
        if mode == "ping-pong":
            for _ in range(count):
                if self._rank == 0:
                    channel.send(out)
                channel.take(nbytes)
                if self._rank == 1:
                    channel.send(out)
        elif self._rank == 0:
            for _ in range(count):
                channel.send(out)
            channel.take(1)
        else:
            for _ in range(count):
                channel.take(nbytes)
            channel.send(out[:1])


def answer(port: int, store: str) -> None:
    """The child process: play its part in each trial that standard input names."""
    side = Side(1, port, store, None)
    for line in sys.stdin:
        kind, mode, nbytes, count = line.rstrip().split("/")
        _, cpu_s = side.trial(kind, mode, int(nbytes), int(count))
        sys.stdout.buffer.write(struct.pack("d", cpu_s))
        sys.stdout.buffer.flush()


def measure(rounds: int, megabytes: float, *, gloo: bool) -> None:
    """The parent process: run all trials, print the table."""
    kinds = ["raw", "pipe", "pipe, keys", *(["gloo"] if gloo else [])]
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as listening:
        store = str(Path(folder) / "store") if gloo else ""
        port = listening.getsockname()[1]
        command = [sys.executable, __file__, "--port", str(port), "--store", store]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
            if child.stdin is None or child.stdout is None:
                raise RuntimeError("the child has no pipes")
            side = Side(0, port, store, listening)
            for mode in ("ping-pong", "one way"):
                for nbytes in SIZES:
                    count = min(400, max(8, int(megabytes * 1e6 / nbytes)))
                    taken: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
                    for _ in range(rounds):
                        for kind in kinds:
                            child.stdin.write(f"{kind}/{mode}/{nbytes}/{count}\n".encode())
                            child.stdin.flush()
                            wall_s, cpu_s = side.trial(kind, mode, nbytes, count)
                            cpu_s += struct.unpack("d", child.stdout.read(8))[0]
                            messages = count * (2 if mode == "ping-pong" else 1)
                            taken[kind].append((wall_s / messages, cpu_s / messages))
                    report(mode, nbytes, taken)
            child.stdin.close()


def report(mode: str, nbytes: int, taken: dict[str, list[tuple[float, float]]]) -> None:
    """Print the table of one mode and size."""
    title = f"{mode}, {nbytes >> 10} KiB"
    print(f"\n{title:24}{'us':>10}{'MB/s':>8}{'CPU us':>9}{'x raw (quartiles)':>24}{'x raw CPU':>12}")
    for kind, trials in taken.items():
        wall_s, cpu_s = (statistics.median(column) for column in zip(*trials, strict=True))
        walls = [one[0] / raw[0] for one, raw in zip(trials, taken["raw"], strict=True)]
        cpus = statistics.median(one[1] / raw[1] for one, raw in zip(trials, taken["raw"], strict=True))
        low, middle, high = statistics.quantiles(walls, n=4) if len(walls) > 1 else walls * 3
        print(
            f"{kind:24}{wall_s * 1e6:10.1f}{nbytes / 1e6 / wall_s:8.0f}{cpu_s * 1e6:9.1f}"
            f"{middle:10.2f} ({low:.2f}-{high:.2f}){cpus:11.2f}",
            flush=True,
        )


def main() -> None:
    """Run as parent, or as the child when a port is given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--megabytes", type=float, default=40.0, help="moved in each trial, about")
    parser.add_argument("--no-gloo", action="store_true", help="leave torch.distributed out")
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.port:
        answer(arguments.port, arguments.store)
        return
    measure(arguments.rounds, arguments.megabytes, gloo=not arguments.no_gloo)
    print(f"\nmedians of {arguments.rounds} rounds, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
