"""Opening of pipes: one side asks as for a call, the other accepts; then a connection is made and given away.

A pipe counts as its caller's until `Pipe.close`; its connection neither counts nor is watched here.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec

from p2pdrl.transport import codec
from p2pdrl.transport.calls import Routes, report
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import ConnectionOpening
from p2pdrl.transport.pipe.ticket import Pipe, PipeReply, PipeTicket
from p2pdrl.transport.protocol import Refusal
from p2pdrl.transport.rate import NodeRates

__all__ = ["PipeAnswer", "PipeServer"]


class PipeAnswer(msgspec.Struct, frozen=True):
    """What a caller is told whose pipe is accepted."""

    opening: ConnectionOpening
    meta: bytes
    """The handler's."""

    @classmethod
    def decode(cls, data: bytes) -> PipeAnswer:
        """Parse what a callee told; raises `WireError`."""
        found: PipeAnswer = codec.decode(data, cls, "answer to the request for a pipe")
        return found

    def encode(self) -> bytes:
        """Return the bytes of it."""
        return msgspec.msgpack.encode(self)


class PipeServer:
    """Every pipe that peers have opened here, and the routes under which they can."""

    def __init__(self, limits: TransportLimits, rates: NodeRates | None = None) -> None:
        self._rates = rates.limits if rates is not None else None
        self.routes: Routes[PipeReply] = Routes()
        self._limits = limits
        self._open: Counter[str] = Counter()

    def __len__(self) -> int:
        return self._open.total()

    async def serve(
        self, peer: str, opening: ConnectionOpening, ask: Callable[[], Awaitable[PipeReply]]
    ) -> tuple[PipeReply, Callable[[socket.socket, str], None], Callable[[], None]]:
        """Let a handler decide.

        Args:
            peer: who asks.
            opening: told to it if the handler accepts.
            ask: runs the handler.

        Returns:
            What the handler answers, what takes the connection then, and what to call when none comes.

        Raises:
            Refusal: of the handler, or 429: there are too many pipes.
        """
        self._count(peer)
        try:
            reply = await ask()
        except BaseException:
            self._uncount(peer)
            raise

        def take(sock: socket.socket, _host: str) -> None:
            keys = opening.keys[::-1] if opening.keys is not None else None
            ticket = PipeTicket(keys, b"", opening.hides, self._rates)
            pipe = Pipe(sock, peer, b"", ticket, partial(self._uncount, peer))
            if not report("taking a pipe", reply.take, pipe):
                pipe.close()

        def lost() -> None:
            self._uncount(peer)
            report("losing a pipe", reply.take, None)

        return reply, take, lost

    def _count(self, peer: str) -> None:
        limits = self._limits
        if self._open[peer] >= limits.max_pipes_per_peer or self._open.total() >= limits.max_pipes:
            raise Refusal(429, f"{self._open[peer]} pipes of yours are open here, {len(self)} in all")
        self._open[peer] += 1

    def _uncount(self, peer: str) -> None:
        self._open[peer] -= 1
        if not self._open[peer]:
            del self._open[peer]
