"""Our stages over pipes, for `bench_pipeline.py`: opened by transports as daemons do, used by this process.

Each rank listens, as its daemon would, asks the rank behind it for a pipe (in a circle when interleaved), and
leaves its transport once the pipes are there. Over them run the engine and servers of `rl.stages`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import Callable
from typing import Any

import torch
from aiohttp import web
from pipeline_model import CHUNKS, OBJECTIVE, Model
from pipeline_talk import LEARNING_RATE, MAX_GRAD_NORM, Stopwatch, Trial, hear, say

from p2pdrl.clock import SystemClock
from p2pdrl.pipeline.order import StageSide
from p2pdrl.pipeline.plan import Plan
from p2pdrl.rl.outputs import PolicyOutputs
from p2pdrl.rl.stages.framed_links import FramedLinks
from p2pdrl.rl.stages.pipelined import Pipelined
from p2pdrl.rl.stages.server import StageServer
from p2pdrl.rl.stages.share import Share
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.listener import Listener
from p2pdrl.transport.pipe import Pipe, PipeReply, PipeTicket
from p2pdrl.transport.protocol import Address, Incoming
from p2pdrl.workers.pipe_carrier import PipeCarrier

__all__ = ["Stream", "WatchedShare"]

ROUTE = "stage"
KEY = b"a key for the bench of pipelines"
DEADLINE_S = 20.0
TIMEOUT_S = 60.0
LIMITS = TransportLimits()

Descriptors = dict[StageSide, tuple[int, PipeTicket]]


class WatchedShare(Share[PolicyOutputs]):
    """Tells when it has stepped.

    Attributes:
        stepped: called with the gradient's norm.
    """

    stepped: Callable[[float], None] | None = None

    def step(self, squares: float, learning_rate: float, max_grad_norm: float) -> float:
        """See `Share.step`."""
        norm = super().step(squares, learning_rate, max_grad_norm)
        if self.stepped is not None:
            self.stepped(norm)
        return norm


class Stream:
    """One rank. See `Contender`.

    Args:
        model: what learns.
        share: this rank's.
    """

    def __init__(self, model: Model, share: WatchedShare) -> None:
        self._model = model
        self._share = share
        self._carriers: dict[bool, PipeCarrier] = {}
        self._ranks: dict[tuple[str, int, bool], Pipelined[PolicyOutputs] | StageServer[PolicyOutputs]] = {}

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

    def prepare(self, trial: Trial) -> None:
        """See `Contender`."""
        self._rank(trial)

    def run(self, trial: Trial, watch: Stopwatch) -> dict[str, Any]:
        """See `Contender`; adds what it costs to collect the parameters once, and waiting."""
        rank = self._rank(trial)
        self._share.stepped = watch.stepped
        watch.begin()
        collect_s = 0.0
        if isinstance(rank, Pipelined):
            for _ in range(trial.steps):
                rank.gradients(self._model.batch, OBJECTIVE)
                rank.step(
                    self._model.flat,
                    self._model.parts.optimizer,
                    learning_rate=LEARNING_RATE,
                    max_grad_norm=MAX_GRAD_NORM,
                    samples=self._model.batch.rows,
                    left=1,
                )
            after = Stopwatch(self._share.device)
            after.begin()
            rank.collect(state=False)
            after.stepped(0.0)
            collect_s = after.end_s - after.begin_s
        else:
            rank.serve()
        return {"collect_s": collect_s, "bubble": rank.metrics()["bubble"]}

    def close(self) -> None:
        """See `Contender`."""
        for carrier in self._carriers.values():
            carrier.close()

    def _rank(self, trial: Trial) -> Pipelined[PolicyOutputs] | StageServer[PolicyOutputs]:
        """Return what this rank does in such a trial; all of them have the share and its links in common."""
        key = trial.schedule, trial.microbatches, trial.key
        share = self._share
        share.plan = dataclasses.replace(share.plan, schedule=trial.schedule, microbatches=trial.microbatches)
        if key not in self._ranks:
            links = FramedLinks(self._carriers[trial.key])
            if share.rank == 0:
                self._ranks[key] = Pipelined(share, links, generation=1, timeout_s=TIMEOUT_S)
            else:
                self._ranks[key] = StageServer(
                    share, links, generation=1, timeout_s=TIMEOUT_S, idle_timeout_s=TIMEOUT_S
                )
        return self._ranks[key]


async def _pipes(plan: Plan, rank: int, key: bytes | None) -> Descriptors:
    """Return the pipes to the neighbours, which are this process's own."""
    loop = asyncio.get_running_loop()
    before: asyncio.Future[Pipe] = loop.create_future()
    circle = plan.stages == CHUNKS * plan.ranks and plan.ranks > 1

    async def accept(_: Incoming) -> PipeReply:
        return PipeReply(b"", lambda pipe: None if pipe is None else before.set_result(pipe))

    transport = HttpTransport(_node_id(rank), "bench", key, clock=SystemClock(), limits=LIMITS)
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
                Address("127.0.0.1", ports[behind]), _node_id(behind), ROUTE, b"", deadline_s=DEADLINE_S
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


def _node_id(rank: int) -> str:
    return f"{rank:032x}"


def _pinned(nbytes: int) -> Any:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).numpy()
