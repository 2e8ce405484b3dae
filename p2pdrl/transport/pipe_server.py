"""The serving half of pipes: accepts them, and hands their connections over.

`http_server` judges the request for a pipe as it judges a call. aiohttp closes its own socket as soon as
the answer is out, so that the connection neither counts nor is watched here any more; a duplicate goes on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from p2pdrl.transport.auth import SwarmKeys
from p2pdrl.transport.headers import AnswerHead, RequestHead
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe import Pipe, PipeReply, PipeTicket
from p2pdrl.transport.pipe_frames import UPGRADE
from p2pdrl.transport.protocol import Refusal
from p2pdrl.transport.routes import Routes, report
from p2pdrl.transport.stream_socket import StreamSocket
from p2pdrl.transport.takeover import Over, switching, take_over

__all__ = ["PipeServer"]


class PipeServer:
    """Every pipe that peers have opened here.

    Args:
        node_id: our id.
        keys: the swarm's keys; None without a key.
        limits: how many there may be, and how long a write may stall.

    Attributes:
        routes: what is served.
    """

    def __init__(self, node_id: str, keys: SwarmKeys | None, limits: TransportLimits) -> None:
        self.routes: Routes[PipeReply] = Routes()
        self._node_id = node_id
        self._keys = keys
        self._limits = limits
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    async def serve(
        self, request: web.Request, head: RequestHead, ask: Callable[[], Awaitable[PipeReply]]
    ) -> web.StreamResponse:
        """Let a handler decide, and hand the connection of ``request`` over to it.

        Args:
            request: judged already.
            head: of it.
            ask: runs the handler.

        Raises:
            Refusal: of the handler, or 429: there are too many pipes.
            ConnectionError: the caller went away.
        """
        peer = head.sender
        self._take_place(peer)
        try:
            reply = await ask()
        except BaseException:
            self._free_place(peer)
            raise
        pipe: Pipe | None = None
        try:
            pipe = await self._switch(request, head, reply.meta)
        finally:
            if pipe is None:
                self._free_place(peer)
            if not report(f"taking a pipe of {head.path}", reply.take, pipe) and pipe is not None:
                pipe.close()
        return Over()

    def _take_place(self, peer: str) -> None:
        limits = self._limits
        if self._open[peer] >= limits.max_pipes_per_peer or self._open.total() >= limits.max_pipes:
            raise Refusal(429, f"{self._open[peer]} pipes of yours are open here, {len(self)} in all")
        self._open[peer] += 1

    def _free_place(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    async def _switch(self, request: web.Request, head: RequestHead, meta: bytes) -> Pipe:
        """Write the answer with which the pipe begins; return our end of it.

        Raises:
            ConnectionError: the caller went away, or doesn't read the answer.
        """
        answer = AnswerHead.answering(head, self._node_id, self._keys, meta_nbytes=len(meta))
        raw, keys = switching(UPGRADE, answer) + meta, None
        if self._keys is not None:
            raw += self._keys.answer_pieces(head.nonce, answer.nonce).of(0, meta)
            theirs, ours = self._keys.pipe(head.nonce, answer.nonce)
            keys = (ours, theirs)
        sock = StreamSocket(take_over(request))
        try:
            async with asyncio.timeout(self._limits.stall_deadline_s):
                await sock.send(iter([[raw]]), len(raw))
        except TimeoutError as error:
            sock.close()
            raise ConnectionResetError("the caller doesn't read the answer") from error
        except BaseException:
            sock.close()
            raise
        connection, leftover = sock.detach()
        ticket = PipeTicket(keys, leftover)
        return Pipe(connection, head.sender, b"", ticket, partial(self._free_place, head.sender))
