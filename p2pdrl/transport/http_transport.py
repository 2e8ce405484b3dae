"""The real transport: `HttpClient` and `HttpServer` under one roof.

The node makes one, mounts it on the application that also serves the API, and gives it to
membership and strategies as a `Transport`:

    transport = HttpTransport(node_id, swarm_id, swarm_key, clock=SystemClock())
    transport.mount(app)
    await transport.start()
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from aiohttp import web

from p2pdrl.clock import Clock
from p2pdrl.transport.auth import SwarmKeys
from p2pdrl.transport.calls import OutgoingCall
from p2pdrl.transport.counters import TrafficCounters
from p2pdrl.transport.dial import Dialer, Resolve, system_resolve
from p2pdrl.transport.http.client import HttpClient
from p2pdrl.transport.http.headers import Credentials
from p2pdrl.transport.http.server import HttpServer
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.pipe.ticket import MAX_PIPE_META_BYTES, Pipe, PipeReply
from p2pdrl.transport.protocol import Address, Answer, Handler, Incoming, Lane, VectorBuffer

__all__ = ["HttpTransport"]


class HttpTransport:
    """`Transport` over HTTP; see there for `call` and `serve`.

    Args:
        node_id: our id.
        swarm_id: the swarm's id.
        swarm_key: the shared secret; None for a keyless swarm, which `Listener` keeps on loopback.
        clock: time for stamps, freshness, rates and the name cache.
        limits: all bounds.
        allowed_hosts: names in lower case, besides IP literals and ``localhost``, under which
            others may address us.
        allow_cidr: networks to which dialling is limited; empty for no limit.
        resolve: name lookup; the system's by default.

    Raises:
        ConfigError: a network in ``allow_cidr`` is malformed.
    """

    def __init__(
        self,
        node_id: str,
        swarm_id: str,
        swarm_key: bytes | None,
        *,
        clock: Clock,
        limits: TransportLimits | None = None,
        allowed_hosts: Callable[[], set[str]] = set,
        allow_cidr: Sequence[str] = (),
        resolve: Resolve = system_resolve,
    ) -> None:
        self.node_id = node_id
        self.limits = limits if limits is not None else TransportLimits()
        self.counters = TrafficCounters()
        keys = SwarmKeys(swarm_key) if swarm_key is not None else None
        self._server = HttpServer(
            node_id,
            swarm_id,
            keys,
            clock=clock,
            limits=self.limits,
            counters=self.counters,
            allowed_hosts=allowed_hosts,
        )
        self._client = HttpClient(
            Credentials(node_id, swarm_id, keys, clock),
            clock=clock,
            limits=self.limits,
            counters=self.counters,
            dialer=Dialer(clock, self.limits.resolve_ttl_s, allow_cidr, resolve),
        )

    def mount(self, app: web.Application) -> None:
        """Add the peer routes to ``app``, before it starts."""
        self._server.mount(app)

    def serve(
        self, route: str, handler: Handler, *, max_meta_bytes: int = 65536, max_vector_bytes: int = 0
    ) -> None:
        """Register a handler; see `Transport`."""
        self._server.routes.add(route, handler, max_meta_bytes, max_vector_bytes)

    def serve_pipes(
        self,
        route: str,
        handler: Callable[[Incoming], Awaitable[PipeReply]],
        *,
        max_meta_bytes: int = MAX_PIPE_META_BYTES,
    ) -> None:
        """Register who decides about pipes that peers ask for.

        Args:
            route: a name, as for `serve`; calls have names of their own.
            handler: told by whom, and with which metadata; raises `Refusal` to refuse.
            max_meta_bytes: longer requests are refused with 413.

        Raises:
            ValueError: the name is malformed or taken.
        """
        self._server.pipes.routes.add(route, handler, max_meta_bytes, 0)

    async def start(self) -> None:
        """Make calls possible."""
        await self._client.start()

    async def close(self) -> None:
        """Close outgoing connections; the listener closes incoming ones."""
        await self._client.close()

    async def call(
        self,
        to: Address,
        target_id: str | None,
        route: str,
        meta: bytes,
        *,
        vector: memoryview | None = None,
        into: VectorBuffer | None = None,
        deadline_s: float,
        lane: Lane = "probe",
    ) -> Answer:
        """Send one request; see `Transport`."""
        call = OutgoingCall(target_id, route, meta, vector, into)
        return await self._client.call(to, call, deadline_s=deadline_s, lane=lane)

    async def open_pipe(
        self, to: Address, peer_id: str, route: str, meta: bytes, *, deadline_s: float
    ) -> Pipe:
        """Open a pipe to a peer: a connection of its own, for another process to use.

        Args:
            to: where to dial.
            peer_id: who must answer there.
            route: the name under which the peer serves pipes.
            meta: told to its handler, at most `pipe.ticket.MAX_PIPE_META_BYTES`.
            deadline_s: seconds for all of it.

        Raises:
            TransportError: as for `call`.
            ValueError: the name is malformed, or the metadata are too long.
        """
        return await self._client.open_pipe(to, peer_id, route, meta, deadline_s=deadline_s)
