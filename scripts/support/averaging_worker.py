"""One process of `bench_averaging.py`; started by it, told what to do in lines of JSON.

Usage: python averaging_worker.py RANK RANKS FOLDER key|nokey
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from datetime import timedelta
from typing import Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web

from p2pdrl.clock import LoopClock
from p2pdrl.config.strategy import AdpsgdConfig, Compression, GradAverageConfig, StrategyConfig
from p2pdrl.membership.identity import Identity
from p2pdrl.strategies.protocol import ROUTES, RoundReport, Strategy, StrategyContext
from p2pdrl.strategies.registry import build
from p2pdrl.testing.fake_learner import FakeLearner
from p2pdrl.testing.virtual_swarm import FakeSwarm
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address

LIMITS = TransportLimits(requests_per_s=1e6, requests_burst=1e6)


class Method(Protocol):
    """One way to average, set up."""

    async def open(self) -> str:
        """Set up; return the address where peers call, if they do."""
        ...

    async def meet(self, addresses: list[str]) -> None:
        """Learn where the others are, by rank."""
        ...

    async def gathered(self) -> None:
        """Wait until rounds can begin."""
        ...

    async def round(self) -> None:
        """Average once."""
        ...

    async def rest(self) -> None:
        """Do what a learner would between two rounds; not timed."""
        ...

    async def close(self) -> None:
        """Free everything."""
        ...


class Gloo:
    """torch.distributed's all_reduce.

    Args:
        rank: which of the workers this is.
        size: float32 elements.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._tensor = torch.full((size,), float(rank))

    async def open(self) -> str:
        """Nothing to serve."""
        return ""

    async def meet(self, addresses: list[str]) -> None:
        """The process group exists already."""

    async def gathered(self) -> None:
        """It is whole."""

    async def round(self) -> None:
        """Average once."""
        dist.all_reduce(self._tensor)
        self._tensor.mul_(1.0 / dist.get_world_size())

    async def rest(self) -> None:
        """Nothing to do."""

    async def close(self) -> None:
        """Nothing to free."""


class Watched(FakeSwarm):
    """Counts the rounds that went well, in either role."""

    def __init__(self, node_id: str) -> None:
        super().__init__(node_id)
        self.take = lambda _donor: asyncio.sleep(0, True)  # all begin with the same vector
        self.done = 0
        self.news = asyncio.Event()

    def round(self, report: RoundReport) -> None:
        """Count it."""
        if report.outcome in ("ok", "answered", "unchanged"):
            self.done += 1
            self.news.set()


class Asking(FakeLearner):
    """A learner that sends a gradient only when it is asked to."""

    async def ask(self, vector: np.ndarray) -> None:
        """Send a gradient until it is averaged; who adopts a state first has to send again."""
        while await self._ask(self.make_request("gradients", vector)) != "replace":
            self.absorb()


def _identity(rank: int) -> Identity:
    return Identity((rank + 1).to_bytes(32, "big"))


class Ours:
    """A strategy over the real transport.

    Args:
        rank: which of the workers this is.
        size: float32 elements.
        config: the strategy.
        key: whether the swarm has a key.
    """

    def __init__(self, rank: int, size: int, config: StrategyConfig, *, key: bool) -> None:
        self._rank, self._config, self._key = rank, config, key
        identity = _identity(rank)
        self._id = identity.node_id
        self.swarm = Watched(self._id)
        tls = identity.tls([b"bench"]) if key else None
        self._transport = HttpTransport(self._id, "bench", tls, clock=LoopClock(), limits=LIMITS)
        self._listener = Listener(LIMITS, LoopClock(), self._transport.counters)
        start = np.random.default_rng(0).standard_normal(size).astype(np.float32)
        self.learner = Asking(start, config.learner_mode)
        self.vector = np.random.default_rng(rank).standard_normal(size).astype(np.float32)
        self.strategy: Strategy = build(
            config,
            StrategyContext(
                swarm=self.swarm,
                learner=self.learner,
                transport=self._transport,
                clock=LoopClock(),
                rng=random.Random(rank),
                epoch=1,
                size=size,
                max_abs=1e6,
            ),
        )
        self._rounds = self._members = 0

    async def open(self) -> str:
        """Serve."""
        for route in ROUTES:
            self._transport.serve(route, self.strategy.answer, max_vector_bytes=1 << 30)
        app = web.Application()
        self._transport.mount(app)
        await self._transport.start()
        return str(
            await self._listener.listen(
                app, "127.0.0.1", 0, port_is_default=False, has_key=self._key, insecure=False
            )
        )

    async def meet(self, addresses: list[str]) -> None:
        """Learn the others' addresses, and begin. Gossip knows only its neighbour."""
        known = {_identity(rank).node_id: Address.parse(at) for rank, at in enumerate(addresses)}
        if isinstance(self._config, AdpsgdConfig):
            partner = _identity(self._rank ^ 1).node_id
            known = {partner: known[partner]}
        known.pop(self._id, None)
        self.swarm.peers = known
        self._members = len(addresses)
        await self.strategy.start()

    async def gathered(self) -> None:
        """Wait until the group is whole, for a strategy that has one."""
        facts = getattr(self.strategy, "facts", {})
        while "members" in facts and facts["members"] != self._members:
            await asyncio.sleep(0.05)
            facts = getattr(self.strategy, "facts", {})

    async def round(self) -> None:
        """Average once; of a gossiping pair the even rank begins."""
        if self.learner.learner_mode.sends == "gradients":
            await self.learner.ask(self.vector)
            return
        self._rounds += 1  # the partner may have met us before we were told of the round
        if self._rank % 2 == 0:
            self.strategy.updated(1)
        while self.swarm.done < self._rounds:
            self.swarm.news.clear()
            await self.swarm.news.wait()

    async def rest(self) -> None:
        """Take what the exchange posted, and move a little so that there is something to average."""
        self.learner.absorb()
        self.learner.x[0] += np.float32(0.01 * self._rank)
        self.learner.publish()

    async def close(self) -> None:
        """End everything."""
        await self.strategy.stop(1.0)
        await self._listener.close()
        await self._transport.close()
        self.learner.close()


def make(method: str, rank: int, size: int, *, key: bool) -> Method:
    """Return what ``method`` names."""
    name, _, word = method.partition("/")
    compression = cast("Compression", word)
    if name == "gloo":
        return Gloo(rank, size)
    if name == "exact":
        return Ours(rank, size, GradAverageConfig(compression=compression, deadline_s=30.0), key=key)
    return Ours(
        rank, size, AdpsgdConfig(compression=compression, min_interval_s=0.0, deadline_s=30.0), key=key
    )


async def serve(rank: int, lines: asyncio.StreamReader, *, key: bool) -> None:
    """Do what the lines say."""
    methods: dict[str, Method] = {}
    while line := await lines.readline():
        words = json.loads(line)
        answer: dict[str, float | str] = {}
        match words["do"]:
            case "prepare":
                methods[words["method"]] = made = make(words["method"], rank, words["size"], key=key)
                answer = {"address": await made.open()}
            case "meet":
                await methods[words["method"]].meet(words["addresses"])
            case "gathered":
                await methods[words["method"]].gathered()
            case "round":
                wall_s, cpu_s = time.perf_counter(), time.process_time()
                await methods[words["method"]].round()
                answer = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
            case "rest":
                await methods[words["method"]].rest()
            case "forget":
                for made in methods.values():
                    await made.close()
                methods.clear()
        print(json.dumps(answer), flush=True)


async def main() -> None:
    """Serve until the parent closes our input."""
    rank, ranks, folder, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "key"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=60))
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    try:
        await serve(rank, lines, key=key)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main())
