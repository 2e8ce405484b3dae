"""Opening of pipes: one side asks as for a call, the other accepts, and both detach the connection.

At the serving end aiohttp closes its own socket as soon as the answer is out, so that the connection neither
counts nor is watched here any more; a duplicate goes on as the pipe.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from aiohttp import web

from p2pdrl.errors import WireError
from p2pdrl.transport.auth import SwarmKeys
from p2pdrl.transport.calls import Routes, report
from p2pdrl.transport.framing import body_nbytes, seal, unseal
from p2pdrl.transport.http.headers import AnswerHead, RequestHead
from p2pdrl.transport.http.upgrade import (
    PIPE_PREFIX,
    PIPE_UPGRADE,
    DetachedTransport,
    Upgrader,
    switching,
    take_over,
)
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe.ticket import MAX_PIPE_META_BYTES, Pipe, PipeReply, PipeTicket
from p2pdrl.transport.protocol import Address, Refusal, check_route
from p2pdrl.transport.stream.socket import StreamSocket

__all__ = ["PipeServer", "open_pipe"]


async def open_pipe(upgrader: Upgrader, address: Address, peer_id: str, route: str, meta: bytes) -> Pipe:
    """Open a pipe to the node at an IP address.

    Raises:
        NotConnectedError: nothing listens there.
        ConnectionError: the connection broke.
        PeerRefusedError: the peer said no.
        WireError: the answer breaks the protocol.
        PeerTimeoutError: the answer stopped coming.
        ValueError: the name is malformed, or the metadata are too long.
    """
    if len(meta) > MAX_PIPE_META_BYTES:
        raise ValueError(f"{len(meta)} bytes of metadata are too many for the request")
    keys = upgrader.credentials.keys
    head = upgrader.credentials.head(PIPE_PREFIX + check_route(route), peer_id, meta_nbytes=len(meta))
    body = seal(meta, keys.request_pieces(head.nonce))
    async with upgrader.connection(address) as sock:
        answer = await upgrader.ask(sock, address, head, PIPE_UPGRADE, body=body)
        if answer.vector_nbytes or answer.meta_nbytes > MAX_PIPE_META_BYTES:
            raise WireError(f"the answer announces {answer.meta_nbytes} bytes of metadata")
        mac = keys.answer_pieces(head.nonce, answer.nonce)
        nbytes = body_nbytes(answer.meta_nbytes, 0, mac.nbytes)
        answered = unseal(await sock.read(nbytes, upgrader.limits.stall_deadline_s), mac, "the answer")
    connection, leftover = sock.detach()
    ticket = PipeTicket(keys.pipe(head.nonce, answer.nonce), leftover)
    return Pipe(connection, answer.sender, answered, ticket)


class PipeServer:
    """Every pipe that peers have opened here, and the routes under which they can."""

    def __init__(self, node_id: str, keys: SwarmKeys, limits: TransportLimits) -> None:
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
        self._count(peer)
        try:
            reply = await ask()
        except BaseException:
            self._uncount(peer)
            raise
        pipe: Pipe | None = None
        try:
            pipe = await self._switch(request, head, reply.meta)
        finally:
            if pipe is None:
                self._uncount(peer)
            if not report(f"taking a pipe of {head.path}", reply.take, pipe) and pipe is not None:
                pipe.close()
        return DetachedTransport()

    def _count(self, peer: str) -> None:
        limits = self._limits
        if self._open[peer] >= limits.max_pipes_per_peer or self._open.total() >= limits.max_pipes:
            raise Refusal(429, f"{self._open[peer]} pipes of yours are open here, {len(self)} in all")
        self._open[peer] += 1

    def _uncount(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]

    async def _switch(self, request: web.Request, head: RequestHead, meta: bytes) -> Pipe:
        """Write the answer with which the pipe begins; return our end of it.

        Raises:
            ConnectionError: the caller went away, or doesn't read the answer.
        """
        answer = AnswerHead.answering(head, self._node_id, self._keys, meta_nbytes=len(meta))
        mac = self._keys.answer_pieces(head.nonce, answer.nonce)
        raw = switching(PIPE_UPGRADE, answer) + seal(meta, mac)
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
        keys = self._keys.pipe(head.nonce, answer.nonce)
        ticket = PipeTicket(keys[::-1] if keys is not None else None, leftover)
        return Pipe(connection, head.sender, b"", ticket, partial(self._uncount, head.sender))
