"""A handler of pipes, and callers that open them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from p2pdrl.clock import SystemClock
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.pipe.ticket import Pipe, PipeReply
from p2pdrl.transport.protocol import Incoming, Refusal

from .conftest import CLIENT, KEY, SERVER_ID
from .pipes import LONG_S

Served = Any


class Stage:
    """A handler that takes pipes as long as it isn't told otherwise."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.pipes: list[Pipe] = []
        self.lost = 0
        self.refusal: Refusal | None = None
        self.wait: asyncio.Event | None = None

    async def __call__(self, incoming: Incoming) -> PipeReply:
        self.asked.append((incoming.sender, incoming.meta))
        if self.wait is not None:
            await self.wait.wait()
        if self.refusal is not None:
            raise self.refusal
        return PipeReply(b"welcome", self.take)

    def take(self, pipe: Pipe | None) -> None:
        if pipe is None:
            self.lost += 1
        else:
            self.pipes.append(pipe)

    def close(self) -> None:
        while self.pipes:
            self.pipes.pop().close()


@asynccontextmanager
async def staged(served: Served) -> AsyncIterator[tuple[Stage, HttpTransport]]:
    """A handler at ``served``, and a caller."""
    stage = Stage()
    served.transport.serve_pipes("stage", stage, max_meta_bytes=100)
    async with calling(served) as caller:
        try:
            yield stage, caller
        finally:
            stage.close()


@asynccontextmanager
async def calling(
    served: Served, identity: Identity = CLIENT, *, key: bytes = KEY, hides: bool = True
) -> AsyncIterator[HttpTransport]:
    """Another node."""
    tls, limits = identity.tls([key]), served.transport.limits
    caller = HttpTransport(identity.node_id, "default", tls, hides=hides, clock=SystemClock(), limits=limits)
    await caller.start()
    try:
        yield caller
    finally:
        await caller.close()


async def opened(served: Served, caller: HttpTransport, meta: bytes = b"hello") -> Pipe:
    return await caller.open_pipe(served.address, SERVER_ID, "stage", meta, deadline_s=LONG_S)


def in_use(served: Served) -> int:
    return len(served.transport._server.pipes)  # noqa: SLF001 - tests alone count them


def asking(served: Served, meta: bytes = b"hello", path: str = "/p2p-pipe/stage", **more: Any) -> bytes:
    """A request for a pipe, right in all that isn't overridden."""
    raw: bytes = served.request(meta, path=path, **more)
    return raw
