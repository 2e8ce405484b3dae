"""How a pipe comes to be: one side asks like for a call, the other accepts and hands the connection over."""

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
from p2pdrl.transport.http.headers import AnswerHead, Credentials, RequestHead
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

__all__ = ["PipeOpener", "PipeServer"]


class PipeOpener:
    """Opens pipes.

    Args:
        credentials: sign requests, check answers.
        limits: all bounds.
    """

    def __init__(self, credentials: Credentials, limits: TransportLimits) -> None:
        self._credentials = credentials
        self._limits = limits
        self._upgrader = Upgrader(credentials, limits)

    def close(self) -> None:
        """End what is being opened."""
        self._upgrader.close()

    async def open(self, address: Address, peer_id: str, route: str, meta: bytes) -> Pipe:
        """Return a new pipe to the node at an IP address.

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
        credentials = self._credentials
        head = credentials.head(PIPE_PREFIX + check_route(route), peer_id, meta_nbytes=len(meta))
        body = credentials.sealed(head, meta)
        async with self._upgrader.connection(address) as sock:
            answer = await self._upgrader.ask(sock, address, head, PIPE_UPGRADE, body=body)
            said = await self._said(sock, head, answer)
        keys = credentials.keys.pipe(head.nonce, answer.nonce) if credentials.keys is not None else None
        connection, leftover = sock.detach()
        return Pipe(connection, answer.sender, said, PipeTicket(keys, leftover))

    async def _said(self, sock: StreamSocket, request: RequestHead, answer: AnswerHead) -> bytes:
        """Read and check the metadata of the answer."""
        if answer.vector_nbytes or answer.meta_nbytes > MAX_PIPE_META_BYTES:
            raise WireError(f"the answer announces {answer.meta_nbytes} bytes of metadata")
        keys = self._credentials.keys
        mac = keys.answer_pieces(request.nonce, answer.nonce) if keys is not None else None
        nbytes = body_nbytes(answer.meta_nbytes, 0, mac is not None)
        return unseal(await sock.read(nbytes, self._limits.stall_deadline_s), mac, "the answer")


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
        return DetachedTransport()

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
        mac, keys = None, None
        if self._keys is not None:
            mac = self._keys.answer_pieces(head.nonce, answer.nonce)
            theirs, ours = self._keys.pipe(head.nonce, answer.nonce)
            keys = (ours, theirs)
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
        ticket = PipeTicket(keys, leftover)
        return Pipe(connection, head.sender, b"", ticket, partial(self._free_place, head.sender))
