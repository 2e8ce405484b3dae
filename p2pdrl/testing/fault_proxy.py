"""A TCP proxy with the faults of a network, for tests and benchmarks with real nodes.

It stands before one listener. Nodes that are told the proxy's address (``--advertise``) are reached
through it by everybody else, so that its faults hit exactly the links to that node::

    async with FaultProxy(Address("127.0.0.1", 7701)) as proxy:
        start("p2pdrl node --listen 127.0.0.1:7701 --advertise", proxy.address)
        proxy.up.delay_s = proxy.down.delay_s = 0.05   # a round trip of 100 ms
        proxy.cut()
        ...
        proxy.heal()

| fault | open connections | new connections |
|---|---|---|
| `reset` | reset, once | pass |
| `refuse` | go on | refused, until `heal` |
| `cut` | reset | refused, until `heal` |
| `hang` | nothing is forwarded, nothing is lost | accepted, never answered, until `heal` |
| `up.stalled`, `down.stalled` | the same in one direction | the same in one direction |
| `up.lost`, `down.lost` | what is sent that way vanishes, its end too; reset by `heal` | likewise |

It runs in the caller's event loop and keeps at most 1 MiB of each direction of each connection; whoever
sends more has to wait.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from types import TracebackType
from typing import Self

from p2pdrl.transport.protocol import Address

__all__ = ["FaultProxy", "Flow"]

CHUNK_BYTES = 65536
CHUNKS_KEPT = 16
SMOOTH_S = 0.02
"""A bounded flow passes chunks of about so much time."""
BACKLOG = 128
RESET = struct.pack("ii", 1, 0)
"""``SO_LINGER`` with no time: closing sends RST."""


class Flow:
    """One direction of all connections of a proxy; its attributes may be changed at any time.

    Args:
        rng: source of the jitter.

    Attributes:
        delay_s: every byte comes this much later.
        jitter_s: and up to this much later than that; order is kept.
        bytes_per_s: all connections together pass no more; 0 is no bound.
        lost: what is sent vanishes.
        nbytes: passed so far.
        lost_nbytes: vanished so far.
    """

    def __init__(self, rng: random.Random) -> None:
        self.delay_s = 0.0
        self.jitter_s = 0.0
        self.bytes_per_s = 0.0
        self.lost = False
        self.nbytes = 0
        self.lost_nbytes = 0
        self._rng = rng
        self._free_s = 0.0
        self._open = asyncio.Event()
        self._open.set()

    @property
    def stalled(self) -> bool:
        """Whether nothing is forwarded."""
        return not self._open.is_set()

    @stalled.setter
    def stalled(self, stalled: bool) -> None:
        if stalled:
            self._open.clear()
        else:
            self._open.set()

    async def until_open(self) -> None:
        """Wait while it is stalled."""
        await self._open.wait()

    def chunk_bytes(self) -> int:
        """How much to read at once."""
        if self.bytes_per_s <= 0:
            return CHUNK_BYTES
        return max(1, min(CHUNK_BYTES, int(self.bytes_per_s * SMOOTH_S)))

    def lag_s(self) -> float:
        """How much later the next bytes come."""
        return self.delay_s + self._rng.uniform(0.0, self.jitter_s)

    def reserve_s(self, nbytes: int, ready_s: float, now_s: float) -> float:
        """When ``nbytes`` have passed the link.

        Args:
            nbytes: how many.
            ready_s: when they came to it. They begin to pass then, or when the link is free, so that what
                waits in line loses no time; but after a stall no more than a moment is made up for.
            now_s: monotonic time.
        """
        if self.bytes_per_s <= 0:
            return now_s
        self._free_s = max(ready_s, self._free_s, now_s - 5 * SMOOTH_S) + nbytes / self.bytes_per_s
        return self._free_s


class FaultProxy:
    """Listens on loopback and passes connections on to ``target``.

    Args:
        target: where the node listens.
        port: where to listen; 0 takes any free port.
        seed: of the jitter.

    Attributes:
        up: from those who connect to the target.
        down: back.
        accepted: connections accepted so far.
    """

    def __init__(self, target: Address, *, port: int = 0, seed: int = 0) -> None:
        rng = random.Random(seed)
        self.target = target
        self.up = Flow(rng)
        self.down = Flow(rng)
        self.accepted = 0
        self._port = port
        self._listener: socket.socket | None = None
        self._deaf = True
        self._links: dict[asyncio.Task[None], _Link] = {}

    @property
    def address(self) -> Address:
        """Where it listens.

        Raises:
            RuntimeError: it wasn't entered.
        """
        if not self._port:
            raise RuntimeError("the proxy listens nowhere yet: enter it by `async with`")
        return Address("127.0.0.1", self._port)

    @property
    def connections(self) -> int:
        """Connections that are open now."""
        return len(self._links)

    async def __aenter__(self) -> Self:
        self._listen()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._deafen()
        self.reset()
        await asyncio.gather(*self._links, return_exceptions=True)

    # Faults

    def reset(self) -> None:
        """Reset what is open; new connections pass."""
        for task, link in self._links.items():
            link.broken = True
            task.cancel()

    def refuse(self) -> None:
        """Refuse new connections until `heal`; what is open goes on."""
        self._deafen()
        self._listener = self._bind()  # keeps the port; connecting to it is refused until it listens

    def cut(self) -> None:
        """Reset what is open and refuse new connections until `heal`."""
        self.refuse()
        self.reset()

    def hang(self) -> None:
        """Forward nothing, close nothing, answer nobody until `heal`."""
        self.up.stalled = self.down.stalled = True

    def heal(self) -> None:
        """End all faults; delays and bounds stay as they are set.

        Connections of which something was lost are reset: their streams have holes.
        """
        self.up.stalled = self.down.stalled = False
        self.up.lost = self.down.lost = False
        for task, link in self._links.items():
            if link.broken:
                task.cancel()
        if self._deaf:
            self._listen()

    # Connections

    def _bind(self) -> socket.socket:
        sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(("127.0.0.1", self._port))
        except OSError:
            sock.close()
            raise
        sock.setblocking(False)
        self._port = int(sock.getsockname()[1])
        return sock

    def _listen(self) -> None:
        if self._listener is None:
            self._listener = self._bind()
        self._listener.listen(BACKLOG)
        self._deaf = False
        asyncio.get_running_loop().add_reader(self._listener, self._accept, self._listener)

    def _deafen(self) -> None:
        """Stop listening."""
        listener, self._listener = self._listener, None
        self._deaf = True
        if listener is not None:
            asyncio.get_running_loop().remove_reader(listener)
            listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:
            return  # it went away again
        self.accepted += 1
        link = _Link(self, client)
        task = asyncio.create_task(link.run(), name=f"fault proxy link {self.accepted}")
        self._links[task] = link
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._links.pop(task).close()  # also of a task that was cancelled before it began
        if not task.cancelled():
            task.result()


class _Link:
    """One connection and its other half.

    Args:
        proxy: whose it is.
        client: the accepted socket.
    """

    def __init__(self, proxy: FaultProxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self.broken = False
        """It ends by a reset."""
        for sock in (self._client, self._server):
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    async def run(self) -> None:
        """Forward until both sides have ended."""
        proxy = self._proxy
        try:
            await proxy.up.until_open()
            target = (proxy.target.host, proxy.target.port)
            await asyncio.get_running_loop().sock_connect(self._server, target)
            async with asyncio.TaskGroup() as group:
                for source, sink, flow in (
                    (self._client, self._server, proxy.up),
                    (self._server, self._client, proxy.down),
                ):
                    queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(CHUNKS_KEPT)
                    group.create_task(self._read(source, flow, queue))
                    group.create_task(self._write(sink, flow, queue))
        except* OSError:
            self.broken = True

    async def _read(
        self, source: socket.socket, flow: Flow, queue: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop = asyncio.get_running_loop()
        due_s = 0.0
        data = b"."
        while data:
            await flow.until_open()
            data = await loop.sock_recv(source, flow.chunk_bytes())
            due_s = max(due_s, loop.time() + flow.lag_s())
            await queue.put((due_s, data))

    async def _write(
        self, sink: socket.socket, flow: Flow, queue: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due_s, data = await queue.get()
            await asyncio.sleep(due_s - loop.time())
            await asyncio.sleep(flow.reserve_s(len(data), due_s, loop.time()) - loop.time())
            await flow.until_open()
            if flow.lost:
                self.broken = True
                flow.lost_nbytes += len(data)
            elif not data:
                sink.shutdown(socket.SHUT_WR)
            else:
                await loop.sock_sendall(sink, data)
                flow.nbytes += len(data)
            if not data:
                return

    def close(self) -> None:
        """Close both sockets, by a reset where it is broken."""
        for sock in (self._client, self._server):
            if self.broken:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            sock.close()
