"""Pipes between fake learners: messages are Python objects that take the network's time to arrive."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError
from p2pdrl.transport.memory import MemoryNetwork
from p2pdrl.transport.pipe import Pipe, PipeReply
from p2pdrl.transport.protocol import Address, Incoming, Refusal

__all__ = ["FakePipe", "FakePipes"]

_LISTENING: dict[tuple[int, Address], FakePipes] = {}


class FakePipe(Pipe):
    """One end of a pipe.

    Args:
        network: whose cuts and frozen nodes count.
        me: node id.
        peer: node id of the other end.
    """

    def __init__(self, network: MemoryNetwork, me: str, peer: str) -> None:  # no socket
        self.peer, self.meta, self._me, self._network = peer, b"", me, network
        self.other: FakePipe = self
        self.came: asyncio.Queue[Any] = asyncio.Queue()
        self.closed = False

    def send(self, message: Any) -> None:
        """Send without waiting; what can't arrive is lost."""
        if not self.closed and not self._network.severed(self._me, self.peer):
            delay_s = self._network.delay_s[0]
            asyncio.get_running_loop().call_later(delay_s, self.other.came.put_nowait, message)

    async def receive(self, timeout_s: float) -> Any:
        """Wait for a message.

        Raises:
            PeerTimeoutError: none came in time.
            PeerUnreachableError: the other end was closed.
        """
        try:
            async with asyncio.timeout(timeout_s):
                message = await self.came.get()
        except TimeoutError as error:
            raise PeerTimeoutError(f"nothing from {self.peer} for {timeout_s:g} s") from error
        if message is None:
            raise PeerUnreachableError(f"the pipe to {self.peer} ended", sent=True)
        return message

    def close(self) -> None:
        """End it; the other end hears of that unless the network is cut."""
        if not self.closed:
            self.send(None)
            self.closed = True


class FakePipes:
    """Opens pipes, and takes them.

    Args:
        network: joins the nodes.
        me: own node id.
    """

    def __init__(self, network: MemoryNetwork, me: str) -> None:
        self._network, self._me = network, me
        self.accept: Callable[[Incoming], Awaitable[PipeReply]] | None = None
        self._address: Address | None = None
        self.opened = 0
        self.ends: list[FakePipe] = []
        """Both ends of each that it opened."""

    def serve(self, address: Address, accept: Callable[[Incoming], Awaitable[PipeReply]]) -> None:
        """Take pipes at an address."""
        self._address, self.accept = address, accept
        _LISTENING[id(self._network), address] = self

    def close(self) -> None:
        """Take none any more."""
        if self._address is not None:
            _LISTENING.pop((id(self._network), self._address), None)

    async def open_pipe(
        self, to: Address, peer_id: str, route: str, meta: bytes, *, deadline_s: float
    ) -> Pipe:
        """Open a pipe; see `HttpTransport.open_pipe`."""
        try:
            async with asyncio.timeout(deadline_s):
                return await self._open(to, peer_id, route, meta)
        except TimeoutError as error:
            raise PeerTimeoutError(f"{peer_id} didn't answer") from error

    async def _open(self, to: Address, peer_id: str, route: str, meta: bytes) -> Pipe:
        network = self._network
        await network.until_thawed(self._me)
        await asyncio.sleep(network.delay_s[0])
        peer = _LISTENING.get((id(network), to))
        if peer is None or peer.accept is None:
            raise PeerUnreachableError(f"nothing listens at {to}")
        if network.severed(self._me, peer_id):
            await asyncio.get_running_loop().create_future()
        await network.until_thawed(peer_id)
        try:
            reply = await peer.accept(_Request(self._me, route, meta))
        except Refusal as refusal:
            raise PeerRefusedError(refusal.status, refusal.reason) from refusal
        mine, theirs = FakePipe(network, self._me, peer_id), FakePipe(network, peer_id, self._me)
        mine.other, theirs.other = theirs, mine
        reply.take(theirs)
        self.opened += 1
        self.ends += [mine, theirs]
        return mine


class _Request:
    """An `Incoming` without a vector."""

    vector_nbytes = 0
    remote_host = "10.0.0.1"

    def __init__(self, sender: str, route: str, meta: bytes) -> None:
        self.sender, self.route, self.meta = sender, route, meta

    async def read_vector_into(self, out: memoryview) -> None:
        raise ValueError("there is none")
