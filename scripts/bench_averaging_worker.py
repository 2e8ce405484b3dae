"""One process of `bench_averaging.py`; started by it, told what to do in lines of JSON.

python bench_averaging_worker.py RANK RANKS FOLDER key|nokey
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from aiohttp import web

from p2pdrl.config.regime import FREE
from p2pdrl.config.strategy import AdpsgdConfig
from p2pdrl.strategies.gossip import GossipStrategy
from p2pdrl.strategies.protocol import ROUTES, Context, Strategy
from p2pdrl.strategies.testing import FakeLearner, FakeSwarm, LoopClock
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.listener import Listener
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply

LIMITS = TransportLimits(requests_per_s=1e6, requests_burst=1e6)
Round = Callable[[], Awaitable[None]]


class Node:
    """Transport, strategy in force, and the vectors of one worker.

    Args:
        rank: which of the workers this is.
        key: whether the swarm has a key.
    """

    def __init__(self, rank: int, *, key: bool) -> None:
        self.rank = rank
        self.id = f"{rank + 1:032x}"
        self.transport = HttpTransport(
            self.id, "bench", b"bench" if key else None, clock=LoopClock(), limits=LIMITS
        )
        self.swarm = FakeSwarm(self.id)
        self.peers: dict[str, Address] = {}
        self.strategy: Strategy | None = None
        """The one whose turn it is."""
        self.tensor = torch.zeros(1)
        self._made: dict[str, tuple[Strategy, FakeLearner]] = {}
        self._listener = Listener(LIMITS, LoopClock(), self.transport.counters)

    async def open(self) -> Address:
        """Serve; return where."""
        for route in ROUTES:
            self.transport.serve(route, self._answer, max_vector_bytes=1 << 30)
        app = web.Application()
        self.transport.mount(app)
        await self.transport.start()
        return await self._listener.listen(
            app, "127.0.0.1", 0, port_is_default=False, has_key=True, insecure=False
        )

    async def close(self) -> None:
        """End everything."""
        await self.forget()
        await self._listener.close()
        await self.transport.close()

    async def _answer(self, incoming: Incoming) -> Reply:
        if self.strategy is None:
            raise Refusal(503, "not yet")
        return await self.strategy.answer(incoming)

    def _context(self, size: int) -> Context:
        """What a strategy is given."""
        vector = np.random.default_rng(self.rank).standard_normal(size).astype(np.float32)
        return Context(
            swarm=self.swarm,
            learner=FakeLearner(vector, FREE),
            transport=self.transport,
            clock=LoopClock(),
            rng=random.Random(self.rank),
            epoch=1,
            size=size,
            max_abs=1e6,
        )

    async def prepare(self, method: str, size: int) -> Round:
        """Set a method up; return what does one round of it."""
        name, _, compression = method.partition("/")
        if name == "gloo":
            self.tensor = torch.full((size,), float(self.rank))
            return self._gloo
        if name == "gossip":
            return await self._gossip(size, compression)
        raise ValueError(method)

    def turn(self, method: str) -> None:
        """Let ``method`` have what peers send from now on."""
        if method in self._made:
            self.strategy = self._made[method][0]

    def absorb(self, method: str) -> None:
        """Let the learner take what the last round posted."""
        if method in self._made:
            self._made[method][1].absorb()

    async def forget(self) -> None:
        """Free what was prepared."""
        self.strategy = None
        for strategy, learner in self._made.values():
            await strategy.stop(1.0)
            learner.close()
        self._made.clear()

    async def _gloo(self) -> None:
        dist.all_reduce(self.tensor)
        self.tensor.mul_(1.0 / dist.get_world_size())

    async def _gossip(self, size: int, compression: str) -> Round:
        """One exchange with the neighbour; the even rank of each pair begins."""
        partner = f"{(self.rank ^ 1) + 1:032x}"
        self.swarm.peers = {partner: self.peers[partner]}
        config = AdpsgdConfig(compression=compression, min_interval_s=0.0, deadline_s=30.0)  # type: ignore[arg-type]
        context = self._context(size)
        strategy = GossipStrategy(config, context)
        self._made[f"gossip/{compression}"] = (strategy, context.learner)  # type: ignore[assignment]
        await strategy.start()

        done = 0

        async def one() -> None:
            nonlocal done  # the partner may have met us before we were told of the round
            done += 1
            if self.rank % 2 == 0:
                strategy.updated(1)
            while sum(strategy.outcomes.get(how, 0) for how in ("ok", "answered")) < done:
                await asyncio.sleep(0.0003)

        return one


async def serve(node: Node, lines: asyncio.StreamReader, folder: str, ranks: int) -> None:
    """Do what the lines say."""
    rounds: dict[tuple[str, int], Round] = {}
    while line := await lines.readline():
        words = json.loads(line)
        answer: dict[str, float] = {}
        match words.pop("do"):
            case "meet":
                addresses = [Address.parse(text) for text in words["addresses"]]
                node.peers = {
                    f"{rank + 1:032x}": at for rank, at in enumerate(addresses) if rank != node.rank
                }
                store = dist.FileStore(f"{folder}/store", ranks)
                timeout = timedelta(seconds=60)
                dist.init_process_group(
                    "gloo", store=store, rank=node.rank, world_size=ranks, timeout=timeout
                )
            case "prepare":
                rounds[words["method"], words["size"]] = await node.prepare(words["method"], words["size"])
            case "turn":
                node.turn(words["method"])
            case "round":
                wall_s, cpu_s = time.perf_counter(), time.process_time()
                await rounds[words["method"], words["size"]]()
                answer = {"wall_s": time.perf_counter() - wall_s, "cpu_s": time.process_time() - cpu_s}
                node.absorb(words["method"])
            case "forget":
                rounds.clear()
                await node.forget()
        print(json.dumps(answer), flush=True)


async def main() -> None:
    """Serve until the parent closes our input."""
    rank, ranks, folder, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "key"
    torch.set_num_threads(1)
    node = Node(rank, key=key)
    address = await node.open()
    print(json.dumps({"address": str(address)}), flush=True)
    lines = asyncio.StreamReader()
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    try:
        await serve(node, lines, folder, ranks)
    finally:
        await node.close()
        dist.destroy_process_group()


if __name__ == "__main__":
    asyncio.run(main())
