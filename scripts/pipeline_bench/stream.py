"""Our stages over pipes, for `bench_pipeline.py`: opened by transports as daemons do, used by this process.

Each rank listens, as its daemon would, asks the rank behind it for a pipe (in a circle when interleaved), and
leaves its transport once the pipes are there. Over them run the engine and servers of `rl.pipeline`.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

import torch
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.membership.identity import Identity
from p2pdrl.pipeline.plan import PipelinePlan, StageSide
from p2pdrl.rl.pipeline.links import FramedLinks, Links
from p2pdrl.rl.pipeline.runner import Running
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe.ticket import Pipe, PipeReply, PipeTicket
from p2pdrl.transport.protocol import Address, Incoming
from p2pdrl.workers.pipeline.pipe_carrier import PipeCarrier
from pipeline_bench.model import CHUNKS, Model
from pipeline_bench.staged import Staged, WatchedShare
from pipeline_bench.talk import Trial, hear, say

__all__ = ["Stream"]

ROUTE = "stage"
KEY = b"a key for the bench of pipelines"
DEADLINE_S = 20.0
LIMITS = TransportLimits()

Descriptors = dict[StageSide, tuple[int, PipeTicket]]


class Stream(Staged):
    """One rank, over pipes. See `Contender`.

    Args:
        model: what learns.
        share: this rank's.
    """

    def __init__(self, model: Model, share: WatchedShare) -> None:
        super().__init__(model, share)
        self._carriers: dict[bool, PipeCarrier] = {}

    def meet(self, **options: Any) -> None:
        """Open pipes, with or without a swarm key; tell where this rank listens, hear where the others do."""
        key = bool(options["key"])
        descriptors = asyncio.run(_pipes(self._share.plan, self._share.rank, KEY if key else None))
        longest_nbytes = self._share.parts.longest_nbytes
        pinned = self._share.device.type == "cuda"
        self._carriers[key] = (
            PipeCarrier(descriptors, longest_nbytes, allocate=_pinned)
            if pinned
            else PipeCarrier(descriptors, longest_nbytes)
        )

    def links(self, trial: Trial) -> tuple[Links, Running | None]:
        """See `Staged`."""
        return FramedLinks(self._carriers[trial.key]), None

    def close(self) -> None:
        """See `Contender`."""
        for carrier in self._carriers.values():
            carrier.close()


async def _pipes(plan: PipelinePlan, rank: int, key: bytes | None) -> Descriptors:
    """Return the pipes to the neighbours, which are this process's own."""
    loop = asyncio.get_running_loop()
    before: asyncio.Future[Pipe] = loop.create_future()
    circle = plan.stages == CHUNKS * plan.ranks and plan.ranks > 1

    async def accept(_: Incoming) -> PipeReply:
        return PipeReply(b"", lambda pipe: None if pipe is None else before.set_result(pipe))

    tls = _identity(rank).tls([key]) if key is not None else None
    transport = HttpTransport(_identity(rank).node_id, "bench", tls, clock=SystemClock(), limits=LIMITS)
    transport.serve_pipes(ROUTE, accept)
    app = web.Application()
    transport.mount(app)
    listener = Listener(LIMITS, SystemClock(), transport.counters)
    address = await listener.listen(app, "127.0.0.1", 0)
    await transport.start()
    try:
        say(port=address.port)
        ports = (await asyncio.to_thread(hear))["ports"]
        found: dict[StageSide, Pipe] = {}
        if rank + 1 < plan.ranks or circle:
            behind = (rank + 1) % plan.ranks
            found["next"] = await transport.open_pipe(
                Address("127.0.0.1", ports[behind]),
                _identity(behind).node_id,
                ROUTE,
                b"",
                deadline_s=DEADLINE_S,
            )
        if rank > 0 or circle:
            found["previous"] = await asyncio.wait_for(before, DEADLINE_S)
        descriptors: Descriptors = {}
        for side, pipe in found.items():
            descriptors[side] = os.dup(pipe.fd), pipe.ticket
            pipe.close()
        return descriptors
    finally:
        await transport.close()
        await listener.close()


def _identity(rank: int) -> Identity:
    return Identity((rank + 1).to_bytes(32, "big"))


def _pinned(nbytes: int) -> Any:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
