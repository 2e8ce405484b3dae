"""Measure how fast unrolls of Atari's pictures travel from actors to another node's learner, over loopback.

Two processes: here the daemon's side of a node that only acts, there that of a node that learns. Actors and
learner themselves are loops that take no time: the first commit the same content again and again, the second
frees each slot at once. Each round times, one after another, the transport alone (the same bytes, read into
memory that lies there) and the whole way (ring of shared memory, sender, transport, receiver with its look at
all numbers, ring), so that what else the machine does falls on both alike. Printed are medians of MB/s and
the ratio, then agent steps a second, the processor's milliseconds for each unroll where it is sent and where
it is received, and how often the learner's memory was read for its parameters. On a busy machine only the
processor's time tells anything.

    python scripts/bench_experience.py --rounds 9 --actors 2 --environments 8
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence

import msgspec
import numpy as np
import psutil
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.task import EnvConfig, TaskConfig
from p2pdrl.node.children.actors import ActorPool
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.messages import ROUTE
from p2pdrl.node.experience.receiver import ExperienceReceiver
from p2pdrl.node.experience.sender import ExperienceSender
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.layout import Layout, TensorEntry
from p2pdrl.tensors.shared_policy import ActingPolicy, SharedPolicy
from p2pdrl.tensors.sidecar import SidecarLayout
from p2pdrl.tensors.unroll_ring import ENVIRONMENTS, UnrollItem, UnrollSpec
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Reply
from p2pdrl.workers.protocol import Start

ACTS, LEARNS = "a" * 32, "b" * 32
STEPS, STACK, SIDE, SIZE = 20, 4, 84, 1_700_000
"""An unroll's steps, and the parameters of the Nature CNN."""
LIMITS = TransportLimits(requests_per_s=1e6, requests_burst=1e6)
BOARD = BoardSpec(Layout((TensorEntry("w", (SIZE,)),)), SidecarLayout(()))
START = Start(task=b"", seed=1, device="cpu", threads=1, allow_import=False)
VERSION_EVERY_S = 0.5
"""Between two versions of the parameters: a learner that is quick for pictures."""


def items() -> tuple[UnrollItem, ...]:
    """Return the arrays of an unroll of Atari's pictures."""
    B = ENVIRONMENTS  # noqa: N806 - a dimension
    return (
        UnrollItem("frames", "uint8", (STEPS + STACK, B, SIDE, SIDE)),
        UnrollItem("actions", "int64", (STEPS, B), choices=6),
        UnrollItem("log_probs", "float32", (STEPS, B)),
        UnrollItem("values", "float32", (STEPS + 1, B)),
        UnrollItem("rewards", "float32", (STEPS, B)),
        UnrollItem("terminated", "bool", (STEPS, B)),
        UnrollItem("truncated", "bool", (STEPS, B)),
        UnrollItem("valid", "bool", (STEPS, B)),
        UnrollItem("episode_returns", "float64", (STEPS // 2 + 1, B)),
        UnrollItem("episode_lengths", "int64", (STEPS // 2 + 1, B)),
    )


class Trusting:
    """Nobody is in quarantine here."""

    def strike(self, peer: str, why: str) -> None:
        """Refuse to go on: what is sent here is good."""
        raise RuntimeError(f"{peer}: {why}")

    def quarantined(self, peer: str) -> bool:
        """Return that nobody is."""
        del peer
        return False


async def serve(actors: int, environments: int) -> None:
    """The child process: print the port; answer each line of standard input with the figures so far."""
    clock = SystemClock()
    pool = ActorPool(START, LearnerConfig(), clock, EventLog(10, clock))
    pool.open(UnrollSpec(items(), (environments,) * actors, 2, actors), BOARD)
    receiver = ExperienceReceiver(
        task_hash="bench",
        pool=pool,
        spec=lambda: BOARD,
        strikes=Trusting(),
        named=str,
        events=EventLog(10, clock),
    )
    buffer = bytearray(pool.spec.content_nbytes(environments))

    async def take(incoming: Incoming) -> Reply:
        await incoming.read_vector_into(memoryview(buffer))
        return Reply(b"")

    transport = HttpTransport(LEARNS, "bench", None, clock=clock, limits=LIMITS)
    transport.serve("take", take, max_vector_bytes=1 << 30)
    transport.serve(ROUTE, receiver.answer, max_vector_bytes=1 << 30)
    app = web.Application()
    transport.mount(app)
    port = (await Listener(LIMITS, clock, transport.counters).listen(app, "127.0.0.1", 0)).port
    _, (_, region) = pool.collected()
    policy = SharedPolicy(region, SIZE, (0,))
    vector = np.zeros(SIZE, np.float32)
    versions, next_s = 0, 0.0

    async def learn() -> None:
        nonlocal versions, next_s
        while True:
            if time.monotonic() >= next_s:
                next_s = time.monotonic() + VERSION_EVERY_S
                versions += 1
                policy.write(vector, ActingPolicy(versions, 0.0, np.zeros(0), np.zeros(0)))
            for lane in pool.lanes:
                while lane.waiting:
                    lane.consume()
                lane.grant(1)
            await asyncio.sleep(0.0001)

    learning = asyncio.create_task(learn())
    print(port, flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        refused = {str(status): count for status, count in receiver.refused.items()}
        print(json.dumps({"versions": versions, "reads": receiver.reads, "refused": refused}), flush=True)
    learning.cancel()


async def measure(  # noqa: C901, PLR0915 - one run from its begin to its end
    rounds: int, seconds: float, actors: int, environments: int
) -> None:
    """The parent process: send, both ways, and print."""
    command = [sys.executable, __file__, "--serve", "--actors", str(actors)]
    child = subprocess.Popen(  # noqa: ASYNC220
        [*command, "--environments", str(environments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    if child.stdin is None or child.stdout is None:
        raise RuntimeError("the child has no pipes")
    address = Address("127.0.0.1", int(child.stdout.readline()))
    clock = SystemClock()
    transport = HttpTransport(ACTS, "bench", None, clock=clock, limits=LIMITS)
    await transport.start()
    start = msgspec.structs.replace(START, actors=actors)
    pool = ActorPool(start, LearnerConfig(), clock, EventLog(10, clock))
    sender = ExperienceSender(
        task=TaskConfig(env=EnvConfig(num_envs=actors * environments)),
        task_hash="bench",
        boot=1,
        transport=transport,
        learner=lambda: (LEARNS, address),
        actors=actors,
        remote=0,
        ahead=1,
        named=str,
        clock=clock,
        events=EventLog(10, clock),
        max_bytes=1 << 30,
        divide=lambda: None,  # all environments are this node's
    )
    board, unrolls = await sender.layout()
    pool.open(unrolls, board)
    content = memoryview(bytearray(unrolls.content_nbytes(environments)))
    for lane in pool.lanes:
        lane.started()
    acting = asyncio.Event()

    async def act() -> None:
        while True:
            await acting.wait()
            for lane in pool.lanes:
                if lane.may_begin:
                    lane.fill(environments)
                    lane.commit(policy_version=1, episodes=0, env_steps=STEPS * environments)
            await asyncio.sleep(0.0001)

    async def alone(until_s: float) -> int:
        sent = 0
        while time.perf_counter() < until_s:
            await transport.call(address, LEARNS, "take", b"", vector=content, deadline_s=60, lane="bulk")
            sent += 1
        return sent

    jobs = [asyncio.create_task(act()), asyncio.create_task(sender.run(pool))]
    receiving = psutil.Process(child.pid)

    def now() -> tuple[float, float, float]:
        """Seconds by the clock, and of the processor, here and there."""
        there = receiving.cpu_times()
        return time.perf_counter(), time.process_time(), there.user + there.system

    def rates(sent: int, began: tuple[float, float, float]) -> tuple[float, float, float]:
        """Unrolls a second, and milliseconds of both processors for each."""
        passed_s, here_s, there_s = (one - other for one, other in zip(now(), began, strict=True))
        return sent / passed_s, 1000 * here_s / max(sent, 1), 1000 * there_s / max(sent, 1)

    both: list[tuple[tuple[float, float, float], tuple[float, float, float]]] = []
    for _ in range(rounds + 1):
        began = now()
        sent = sum(await asyncio.gather(*(alone(began[0] + seconds) for _ in range(actors))))
        raw = rates(sent, began)
        before, began = sender.sent, now()
        acting.set()
        await asyncio.sleep(seconds)
        acting.clear()
        both.append((raw, rates(sender.sent - before, began)))
        await asyncio.sleep(0.1)
    for job in jobs:
        job.cancel()
    await asyncio.gather(*jobs, return_exceptions=True)
    child.stdin.write(b"\n")
    child.stdin.flush()
    figures = json.loads(child.stdout.readline())
    child.stdin.close()
    child.wait()
    await transport.close()
    ways = [
        [statistics.median(column) for column in zip(*way, strict=True)]
        for way in zip(*both[1:], strict=True)
    ]
    ratio = statistics.median(mine[0] / other[0] for other, mine in both[1:])
    nbytes = content.nbytes
    print(
        f"{actors} actors of {environments} environments, unrolls of {nbytes / 1e6:.2f} MB, {rounds} rounds\n"
        f"{'':12}{'MB/s':>8}{'unrolls/s':>11}{'agent steps/s':>15}{'ms sending':>12}{'ms receiving':>14}"
    )
    for name, (rate, here_ms, there_ms) in zip(("transport", "whole way"), ways, strict=True):
        print(
            f"{name:12}{rate * nbytes / 1e6:8.0f}{rate:11.0f}{rate * STEPS * environments:15.0f}"
            f"{here_ms:12.2f}{there_ms:14.2f}"
        )
    print(
        f"ratio {ratio:.2f}; "
        f"{figures['versions']} versions of the parameters, read {figures['reads']} times, "
        f"refused {figures['refused']}"
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run as parent, or with ``--serve`` as the child."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds after one to warm up")
    parser.add_argument("--seconds", type=float, default=1.0, help="of each way in a round")
    parser.add_argument("--actors", type=int, default=2)
    parser.add_argument("--environments", type=int, default=8, help="of each actor")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        asyncio.run(serve(options.actors, options.environments))
    else:
        asyncio.run(measure(options.rounds, options.seconds, options.actors, options.environments))


if __name__ == "__main__":
    main()
