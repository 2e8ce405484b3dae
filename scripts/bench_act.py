"""Measure how fast a real node acts for others over HTTP: `POST /v1/act` of a node with CartPole's policy.

Callers are processes of their own, each with one connection that is kept. Three ways, one after another, in
rounds: binary batches as fast as they go, single observations as JSON as fast as they go, and single binary
observations at a given pace, whose latency counts from the moment at which each was due (so a node that falls
behind shows it). Printed are medians over the rounds, and how many processors the node and the callers kept
busy, as they share the machine. The node is paused unless ``--train``: its learner takes one, too.

    python scripts/bench_act.py --rounds 5 --callers 4 --batch 64 --pace 1000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.support.local_swarm import LocalSwarm

BINARY = b"application/octet-stream"
OPTIONS = ("--set=node.checkpoint.every_s=0", "--set=task.stop.env_steps=0")


class Work(NamedTuple):
    """What one caller does.

    Args:
        pace: requests a second of this caller; 0 has it send the next as soon as the last is answered.
        lanes: connections, each with one request under way; a paced caller takes the next free one.
    """

    port: int
    request: bytes
    seconds: float
    pace: float
    lanes: int


class Outcome(NamedTuple):
    """What one caller saw: its latencies in seconds, refusals, and its own processor seconds."""

    latencies_s: list[float]
    refused: int
    cpu_s: float


def request(rows: int, *, binary: bool) -> bytes:
    """Return a whole HTTP request for actions on ``rows`` observations of CartPole."""
    obs = np.random.default_rng(rows).normal(0, 0.1, (rows, 4)).astype("<f4")
    query, kind = (f"?rows={rows}", BINARY) if binary else ("", b"application/json")
    body = obs.tobytes() if binary else json.dumps({"observations": obs.tolist()}).encode()
    head = f"POST /v1/act{query} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n".encode()
    return head + b"Content-Type: " + kind + b"\r\n\r\n" + body


async def exchange(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, data: bytes) -> bool:
    """Send a request, read its answer, tell whether it was a good one."""
    writer.write(data)
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.partition(b":")[2]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-l")
    )
    await reader.readexactly(length)
    return b" 200 " in head.partition(b"\r\n")[0]


async def call(work: Work) -> Outcome:
    """Be a caller."""
    lanes = [await asyncio.open_connection("127.0.0.1", work.port) for _ in range(work.lanes)]
    latencies_s: list[float] = []
    refused = 0
    began_s, cpu_s = time.perf_counter(), time.process_time()
    end_s, sent = began_s + work.seconds, 0

    async def lane(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal refused, sent
        while (now_s := time.perf_counter()) < end_s:
            due_s = now_s
            if work.pace:
                due_s = began_s + sent / work.pace
                sent += 1
                await asyncio.sleep(max(0.0, due_s - now_s))
            good = await exchange(reader, writer, work.request)
            latencies_s.append(time.perf_counter() - due_s)
            refused += not good

    await asyncio.gather(*(lane(*connection) for connection in lanes))
    for _, writer in lanes:
        writer.close()
    return Outcome(latencies_s, refused, time.process_time() - cpu_s)


def caller(work: Work) -> Outcome:
    """Be a caller, in a process of a pool."""
    return asyncio.run(call(work))


class Figures(NamedTuple):
    """One way in one round."""

    requests_per_s: float
    p50_ms: float
    p99_ms: float
    refused: int
    node_cpu: float
    callers_cpu: float


def node_cpu_s(pid: int) -> float:
    """Processor seconds of the node's processes that run."""
    total = 0.0
    daemon = psutil.Process(pid)
    for process in (daemon, *daemon.children(recursive=True)):
        times = process.cpu_times()
        total += times.user + times.system
    return total


def run(pool: multiprocessing.pool.Pool, pid: int, work: Work, callers: int) -> Figures:
    """Time one way."""
    before_s, began_s = node_cpu_s(pid), time.perf_counter()
    found = pool.map(caller, [work] * callers, chunksize=1)
    wall_s = time.perf_counter() - began_s
    latencies_s = np.array([one for outcome in found for one in outcome.latencies_s])
    return Figures(
        len(latencies_s) / wall_s,
        *(1e3 * np.percentile(latencies_s, (50, 99))),
        sum(outcome.refused for outcome in found),
        (node_cpu_s(pid) - before_s) / wall_s,
        sum(outcome.cpu_s for outcome in found) / wall_s,
    )


def measure(options: argparse.Namespace) -> None:
    """Start a node, measure, print."""
    with LocalSwarm(1, OPTIONS) as swarm, multiprocessing.get_context("spawn").Pool(options.callers) as pool:
        swarm.ready()
        node = swarm.nodes[0]
        time.sleep(2.0)
        if not options.train:
            node.client.post("/v1/pause")
        port, callers, seconds = node.address.port, options.callers, options.seconds
        batch, pace = options.batch, options.pace
        ways = {
            f"binary, {batch} each": (batch, Work(port, request(batch, binary=True), seconds, 0.0, 1)),
            "JSON, 1 each": (1, Work(port, request(1, binary=False), seconds, 0.0, 4)),
            f"binary, 1 each, {pace:g}/s": (
                1,
                Work(port, request(1, binary=True), seconds, pace / callers, max(1, 64 // callers)),
            ),
        }
        seen: dict[str, list[Figures]] = {name: [] for name in ways}
        for number in range(options.rounds + 1):  # the first one warms up, and starts the process
            for name, (_, work) in ways.items():
                figures = run(pool, node.process.pid, work, callers)
                if number:
                    seen[name].append(figures)
    state = "trains" if options.train else "is paused"
    print(f"{callers} callers, {options.rounds} rounds of {seconds:g} s; the node {state}")
    print(
        f"{'':24}{'obs/s':>8}{'requests/s':>12}{'p50 ms':>8}{'p99 ms':>8}{'p99 range':>14}{'refused':>9}"
        f"{'CPU/wall: node':>16}{'callers':>9}"
    )
    for name, (rows, _) in ways.items():
        rounds = seen[name]
        mid = [statistics.median(column) for column in zip(*rounds, strict=True)]
        p99 = [one.p99_ms for one in rounds]
        print(
            f"{name:24}{mid[0] * rows:8.0f}{mid[0]:12.0f}{mid[1]:8.2f}{mid[2]:8.2f}"
            f"{f'{min(p99):.1f}-{max(p99):.1f}':>14}{sum(one.refused for one in rounds):9d}"
            f"{mid[4]:16.2f}{mid[5]:9.2f}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds after one to warm up")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each way in a round")
    parser.add_argument("--callers", type=int, default=2, help="processes")
    parser.add_argument("--batch", type=int, default=64, help="observations of a batch")
    parser.add_argument("--pace", type=float, default=1000.0, help="requests a second of the last way")
    parser.add_argument("--train", action="store_true", help="let the node train meanwhile")
    measure(parser.parse_args(arguments))


if __name__ == "__main__":
    main()
