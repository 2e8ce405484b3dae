"""Measure how fast vectors move between two processes over loopback.

Each round times, one after another, a raw socket (sendall, recv_into) and `HttpTransport` without a swarm
key, with one (TLS, and AES-256-GCM on streams), and with one on a network that is trusted (streams
authenticated, not encrypted), by streams and by posts, both ways, so that what else the machine does falls on
all of them alike. Printed are the medians of MB/s and wall time, the mean CPU time of both processes
together, and the longest time for which the caller's event loop served nobody else. Then calls with short
vectors both ways, probes (posts of 300 bytes), and what the sealing of a piece of 1 MiB costs.

    python scripts/bench_transport.py --rounds 15 --megabytes 40
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import hmac
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import psutil
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.cipher import Cipher
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import PIECE_BYTES, TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Reply

KEY = b"bench"
CALLING, CALLED = Identity(b"a" * 32), Identity(b"b" * 32)
CALLER, CALLEE = CALLING.node_id, CALLED.node_id
LIMITS = TransportLimits(requests_per_s=1e6, requests_burst=1e6)
WITHOUT_STREAMS = TransportLimits(requests_per_s=1e6, requests_burst=1e6, max_streams_per_peer=0)
KINDS = {
    "streams": (None, True, LIMITS),
    "streams, authenticated": (KEY, False, LIMITS),
    "streams, encrypted": (KEY, True, LIMITS),
    "posts": (None, True, WITHOUT_STREAMS),
    "posts, TLS": (KEY, True, WITHOUT_STREAMS),
}
"""Name -> the swarm's key, whether streams are encrypted, bounds."""
SHORT_NBYTES = (0, 4_000, 100_000, 400_000)


def serve_raw(nbytes: int) -> int:
    """Accept one connection; take ``nbytes``, answer one byte, for ever. Returns the port."""
    listening = socket.create_server(("127.0.0.1", 0))

    def run() -> None:
        connection, _ = listening.accept()
        view = memoryview(bytearray(nbytes))
        while True:
            got = 0
            while got < nbytes:
                count = connection.recv_into(view[got:])
                if count == 0:
                    return
                got += count
            connection.sendall(b"!")

    threading.Thread(target=run, daemon=True).start()
    return int(listening.getsockname()[1])


def made(who: Identity, key: bytes | None, hides: bool, limits: TransportLimits) -> HttpTransport:
    """Return a node's transport."""
    tls = who.tls([key]) if key is not None else None
    return HttpTransport(who.node_id, "bench", tls, hides=hides, clock=SystemClock(), limits=limits)


async def serve_http(nbytes: int, key: bytes | None, hides: bool, limits: TransportLimits) -> int:
    """Serve ``take``, ``give`` and ``echo``; return the port."""
    buffer = np.zeros(nbytes // 4, np.float32)
    transport = made(CALLED, key, hides, limits)

    async def take(incoming: Incoming) -> Reply:
        await incoming.read_vector_into(memoryview(buffer))
        return Reply(b"")

    async def give(_: Incoming) -> Reply:
        return Reply(b"", memoryview(buffer))

    async def echo(incoming: Incoming) -> Reply:
        size = incoming.vector_nbytes // 4
        if not size:
            return Reply(b"")
        await incoming.read_vector_into(memoryview(buffer[:size]))
        return Reply(b"", memoryview(buffer[:size]))

    transport.serve("echo", echo, max_vector_bytes=nbytes)
    transport.serve("take", take, max_vector_bytes=nbytes)
    transport.serve("give", give)
    app = web.Application()
    transport.mount(app)
    listener = Listener(limits, SystemClock(), transport.counters)
    return (await listener.listen(app, "127.0.0.1", 0)).port


async def serve(nbytes: int) -> None:
    """The child process: print the ports, then serve until standard input ends."""
    ports = [serve_raw(nbytes), *[await serve_http(nbytes, *kind) for kind in KINDS.values()]]
    print(*ports, flush=True)
    await asyncio.to_thread(sys.stdin.read)


class Stopwatch:
    """Wall time, CPU time of both processes, and how long the loop was held, by name.

    Args:
        child_pid: the other process whose CPU time counts.
    """

    def __init__(self, child_pid: int) -> None:
        self._processes = psutil.Process(), psutil.Process(child_pid)
        self.wall: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}
        self.held: dict[str, list[float]] = {}

    def _spent_s(self) -> float:
        return sum(times.user + times.system for times in (p.cpu_times() for p in self._processes))

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Note wall and CPU time of a block."""
        wall_s, cpu_s = time.perf_counter(), self._spent_s()
        yield
        self.wall.setdefault(name, []).append(time.perf_counter() - wall_s)
        self.cpu.setdefault(name, []).append(self._spent_s() - cpu_s)

    async def watch(self, name: str, work: Awaitable[object]) -> None:
        """Note the longest time between two turns of another task while ``work`` runs."""
        worst_s = 0.0

        async def spin() -> None:
            nonlocal worst_s
            while True:
                began_s = time.perf_counter()
                await asyncio.sleep(0)
                worst_s = max(worst_s, time.perf_counter() - began_s)

        spinner = asyncio.create_task(spin())
        await work
        spinner.cancel()
        self.held.setdefault(name, []).append(worst_s)

    def report(self, nbytes: int) -> None:
        """Print the medians, the first round left out."""
        print(f"{'':28}{'MB/s':>8}{'wall ms':>10}{'CPU ms':>9}{'loop held ms':>14}")
        for name, times in self.wall.items():
            wall_s, cpu_s = statistics.median(times[1:]), statistics.mean(self.cpu[name][1:])
            held = f"{statistics.median(self.held[name][1:]) * 1e3:14.1f}" if name in self.held else ""
            print(f"{name:28}{nbytes / 1e6 / wall_s:8.0f}{wall_s * 1e3:10.1f}{cpu_s * 1e3:9.1f}{held}")


async def measure(nbytes: int, rounds: int) -> None:
    """The parent process: call the child and print the table."""
    command = [sys.executable, __file__, "--serve", "--megabytes", str(nbytes / 1e6)]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: ASYNC220
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the child has no pipes")
    raw_port, *http_ports = map(int, child.stdout.readline().split())
    vector = np.random.default_rng(0).standard_normal(nbytes // 4).astype(np.float32)
    out = np.empty_like(vector)
    raw = socket.create_connection(("127.0.0.1", raw_port))
    watch = Stopwatch(child.pid)
    transports: dict[str, tuple[HttpTransport, Address]] = {}
    for (name, (key, hides, _)), port in zip(KINDS.items(), http_ports, strict=True):
        transport = made(CALLING, key, hides, LIMITS)
        await transport.start()
        transports[name] = (transport, Address("127.0.0.1", port))

    def send(transport: HttpTransport, to: Address) -> Awaitable[object]:
        return transport.call(to, CALLEE, "take", b"", vector=memoryview(vector), deadline_s=60, lane="bulk")

    def fetch(transport: HttpTransport, to: Address) -> Awaitable[object]:
        return transport.call(
            to, CALLEE, "give", b"", into=lambda _m, _n: memoryview(out), deadline_s=60, lane="bulk"
        )

    for _ in range(rounds + 1):
        with watch.timed("raw socket"):
            raw.sendall(vector)
            raw.recv(1)
        for name, (transport, to) in transports.items():
            with watch.timed(f"{name}, sent"):
                await send(transport, to)
            with watch.timed(f"{name}, fetched"):
                await fetch(transport, to)
            await watch.watch(f"{name}, sent", send(transport, to))
            await watch.watch(f"{name}, fetched", fetch(transport, to))
    short = await measure_short(transports, child.pid, rounds)
    probes = await measure_probes(transports, child.pid, rounds)
    for transport, _ in transports.values():
        await transport.close()
    raw.close()
    child.stdin.close()
    child.wait()
    print(f"{nbytes / 1e6:g} MB float32 over loopback, medians of {rounds} rounds, {os.cpu_count()} cores")
    watch.report(nbytes)
    print("\n".join(("", "calls with short vectors both ways", *short, "", *probes)))


async def measure_probes(
    transports: dict[str, tuple[HttpTransport, Address]], child_pid: int, rounds: int
) -> list[str]:
    """Return a table of probes as the failure detector makes them, and of those on new connections."""
    calls, lines = 100, [f"{'probes':36}{'wall us':>10}{'CPU us':>9}{'ratio':>8}"]
    watch = Stopwatch(child_pid)
    for _ in range(rounds + 1):
        for name in ("posts", "posts, TLS"):
            key, hides, _ = KINDS[name]
            _, to = transports[name]
            async with made_started(key, hides) as transport:
                await transport.call(to, CALLEE, "echo", b"x" * 300, deadline_s=60)
                with watch.timed(f"{name}, kept connection"):
                    for _ in range(calls):
                        await transport.call(to, CALLEE, "echo", b"x" * 300, deadline_s=60)
            with watch.timed(f"{name}, new connection"):
                for _ in range(calls // 10):
                    async with made_started(key, hides) as transport:
                        await transport.call(to, CALLEE, "echo", b"x" * 300, deadline_s=60)
    for kind, count in (("kept connection", calls), ("new connection", calls // 10)):
        plain = statistics.mean(watch.cpu[f"posts, {kind}"][1:])
        for name in ("posts", "posts, TLS"):
            wall_s = statistics.median(watch.wall[f"{name}, {kind}"][1:])
            cpu_s = statistics.mean(watch.cpu[f"{name}, {kind}"][1:])
            row = f"{name + ', ' + kind:36}{wall_s / count * 1e6:10.0f}{cpu_s / count * 1e6:9.0f}"
            lines.append(f"{row}{cpu_s / plain:8.2f}")
    return lines


@asynccontextmanager
async def made_started(key: bytes | None, hides: bool) -> AsyncIterator[HttpTransport]:
    """A new caller."""
    transport = made(CALLING, key, hides, LIMITS)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


async def measure_short(
    transports: dict[str, tuple[HttpTransport, Address]], child_pid: int, rounds: int
) -> list[str]:
    """Return a table of calls that are mostly overhead."""
    calls, lines = 100, [f"{'':28}{'bytes':>8}{'wall us':>10}{'CPU us':>9}"]
    for nbytes in SHORT_NBYTES:
        vector = memoryview(np.zeros(nbytes // 4, np.float32)) if nbytes else None
        out = memoryview(np.zeros(nbytes // 4, np.float32))
        watch = Stopwatch(child_pid)
        for _ in range(rounds + 1):
            for name, (transport, to) in transports.items():
                with watch.timed(name):
                    for _ in range(calls):
                        await transport.call(
                            to, CALLEE, "echo", b"", vector=vector, into=lambda _m, _n: out,  # noqa: B023
                            deadline_s=60, lane="bulk",
                        )  # fmt: skip
        for name in transports:
            wall_s, cpu_s = statistics.median(watch.wall[name][1:]), statistics.mean(watch.cpu[name][1:])
            lines.append(f"{name:28}{nbytes:8}{wall_s / calls * 1e6:10.0f}{cpu_s / calls * 1e6:9.0f}")
    return lines


def measure_sealing() -> None:
    """Print the speed of sealing one piece, beside MACs that were considered."""
    piece = memoryview(bytearray(os.urandom(PIECE_BYTES)))
    key = os.urandom(32)
    hides, proves = Cipher(key), Cipher(key, hides=False)
    macs: dict[str, Callable[[], object]] = {
        "AES-256-GCM (default)": lambda: hides.seal_piece(piece),
        "GMAC (trusted network)": lambda: proves.seal_piece(piece),
        "HMAC-SHA256": lambda: hmac.digest(key, piece, "sha256"),
        "BLAKE2b keyed": lambda: hashlib.blake2b(piece, key=key, digest_size=16).digest(),
    }
    print(f"\n{'sealing of 1 MiB':28}{'MB/s':>8}{'ms':>10}")
    for name, mac in macs.items():
        times = []
        for _ in range(50):
            began = time.perf_counter()
            mac()
            times.append(time.perf_counter() - began)
        seconds = statistics.median(times)
        print(f"{name:28}{PIECE_BYTES / 1e6 / seconds:8.0f}{seconds * 1e3:10.3f}")


def main() -> None:
    """Run as parent, or with ``--serve`` as the child."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds after one to warm up")
    parser.add_argument("--megabytes", type=float, default=40.0, help="size of the vector")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    nbytes = int(arguments.megabytes * 1e6) // 4 * 4
    if arguments.serve:
        asyncio.run(serve(nbytes))
        return
    asyncio.run(measure(nbytes, arguments.rounds))
    measure_sealing()


if __name__ == "__main__":
    main()
