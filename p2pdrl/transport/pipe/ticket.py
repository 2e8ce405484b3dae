"""A pipe as the daemon holds it: opened here, used by another process.

    daemon                                       daemon of the peer
    pipe = await transport.open_pipe(…)  ─────►  handler(incoming) -> PipeReply(meta, take)
    send pipe.fd and pipe.ticket to the          take(pipe): likewise
    learner; then pipe.detach()

In the learner: ``PipeEnd(socket.socket(fileno=fd), ticket.keys, ticket.leftover, into=…, rates=…)``, with
``ticket.rates``. From then on the bytes go from process to process; the daemons neither see nor count them.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from p2pdrl.transport.rate import RateLimits

__all__ = ["MAX_PIPE_META_BYTES", "Pipe", "PipeReply", "PipeTicket"]

MAX_PIPE_META_BYTES = 16384
"""Longest metadata of a request for a pipe, and of its answer."""


class PipeTicket(msgspec.Struct, frozen=True):
    """What the process that uses a pipe needs beside the descriptor; it holds keys."""

    keys: tuple[bytes, bytes] | None
    """Of what we send and of what we receive; None without a swarm key."""
    leftover: bytes = b""
    """Bytes that were read already."""
    hides: bool = True
    """Whether what goes is encrypted, or can only not be changed."""
    rates: RateLimits | None = None
    """What the pipe keeps to, together with all else that the node moves; None without bounds."""

    def __repr__(self) -> str:
        return f"PipeTicket({'with' if self.keys is not None else 'without'} keys)"


class Pipe:
    """One end of an open pipe, which nobody reads from yet; ``on_close`` is called once, by `close`.

    Attributes:
        peer: node id of the other end.
        meta: what it answered; empty where it was the one that asked.
        ticket: goes with the descriptor to the process that uses the pipe.
    """

    def __init__(
        self,
        sock: socket.socket,
        peer: str,
        meta: bytes,
        ticket: PipeTicket,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        self.peer = peer
        self.meta = meta
        self.ticket = ticket
        self._sock = sock
        self._on_close: Callable[[], None] | None = on_close

    @property
    def fd(self) -> int:
        """Descriptor of the connection, to be sent to another process; -1 once it isn't ours any more."""
        return self._sock.fileno()

    def detach(self) -> None:
        """Leave the connection to whoever has got a duplicate of `fd`; without one, it ends here.

        Do so as soon as it was sent: as long as two processes hold it, it outlives the death of one. The pipe
        goes on to count as one of the peer's until `close`.
        """
        self._sock.close()

    def close(self) -> None:
        """Be done with it: it counts no more, and ends unless another process holds it."""
        self.detach()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


@dataclass(frozen=True, slots=True)
class PipeReply:
    """What a handler answers that accepts a pipe.

    Attributes:
        meta: told to the caller, at most `MAX_PIPE_META_BYTES`.
        take: called exactly once: with the pipe, which is its own from then on, once the answer has been
            written; with None when that failed.
    """

    meta: bytes
    take: Callable[[Pipe | None], None]

    def __post_init__(self) -> None:
        """Raise ValueError when the metadata are too long."""
        if len(self.meta) > MAX_PIPE_META_BYTES:
            raise ValueError(f"{len(self.meta)} bytes of metadata are too many for the answer")
