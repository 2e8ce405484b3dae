"""The node's one port: one application that serves peers, people and scripts."""

from __future__ import annotations

from aiohttp import web

from p2pdrl.api.protocol import NodeView
from p2pdrl.api.routes import mount
from p2pdrl.clock import Clock
from p2pdrl.config.node import NodeConfig
from p2pdrl.transport.guard import guard_middleware
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.listener import Listener
from p2pdrl.transport.protocol import DEFAULT_PORT, Address

__all__ = ["Endpoint"]


class Endpoint:
    """Listens and dials.

    Args:
        node_id: own id.
        swarm_id: own swarm's id.
        swarm_key: the shared secret; None keeps the node on loopback.
        config: where to listen, and the bounds.
        clock: time.
    """

    def __init__(
        self, *, node_id: str, swarm_id: str, swarm_key: bytes | None, config: NodeConfig, clock: Clock
    ) -> None:
        self._config = config
        self._clock = clock
        self._has_key = swarm_key is not None
        limits = TransportLimits(max_connections=config.limits.max_connections)
        self.transport = HttpTransport(
            node_id, swarm_id, swarm_key, clock=clock, limits=limits, allowed_hosts=self._names
        )
        self._listener = Listener(limits, clock, self.transport.counters)
        self._app = web.Application(
            middlewares=[guard_middleware(self._names, self.transport.counters)],
            client_max_size=limits.max_api_body_bytes,
        )

    async def open(self, node: NodeView) -> Address:
        """Bind the port and serve; return where.

        Raises:
            UsageError: the port is taken, or open to others without a key.
        """
        self.transport.mount(self._app)
        mount(self._app, node, self._clock)
        await self.transport.start()
        given = self._config.listen
        wanted = Address("127.0.0.1", DEFAULT_PORT) if given is None else Address.parse(given)
        return await self._listener.listen(
            self._app,
            wanted.host,
            wanted.port,
            port_is_default=given is None,
            has_key=self._has_key,
            insecure=self._config.insecure,
        )

    async def close(self) -> None:
        """Stop listening and dialling."""
        await self._listener.close()
        await self.transport.close()

    def _names(self) -> set[str]:
        given = self._config.advertise
        return set() if given is None else {Address.parse(given).host.lower()}
