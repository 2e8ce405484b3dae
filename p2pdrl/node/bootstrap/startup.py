"""Brings up what a node needs before it knows its task: folder, identity, its one port, membership."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

from aiohttp import web

import p2pdrl
from p2pdrl.api.keyfile import read_swarm_key
from p2pdrl.api.protocol import NodeView
from p2pdrl.api.routes import mount
from p2pdrl.clock import Clock
from p2pdrl.config.node import NodeConfig, tags_of
from p2pdrl.config.root import Config
from p2pdrl.ids import short, swarm_id_from_key, swarm_id_from_name
from p2pdrl.membership.identity import Identity
from p2pdrl.membership.joining import JoinHooks
from p2pdrl.membership.known_members import KnownMembers
from p2pdrl.membership.parameters import MembershipConfig
from p2pdrl.membership.records import SwarmRecord
from p2pdrl.membership.service import MembershipService
from p2pdrl.membership.state import open_core
from p2pdrl.node.accounting.steps import StepAccounting
from p2pdrl.node.bootstrap.datadir import DataDir
from p2pdrl.node.bootstrap.joining import advertised, seed_address
from p2pdrl.node.events import EventLog
from p2pdrl.node.parts import NodeParts
from p2pdrl.node.status.view import View
from p2pdrl.transport.http.guard import guard_middleware
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import DEFAULT_PORT, Address

__all__ = ["Endpoint", "Opened", "open_node"]


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


@dataclass(frozen=True)
class Opened:
    """A node that listens and knows who it is."""

    data: DataDir
    parts: NodeParts
    view: View
    remembers: bool
    """Whether members of an earlier run are on disk."""


async def open_node(
    stack: AsyncExitStack,
    config: Config,
    *,
    events: EventLog,
    clock: Clock,
    hooks: JoinHooks,
    leave: Callable[[str], None],
    on_record: Callable[[SwarmRecord], None],
    on_twin: Callable[[str], None],
) -> Opened:
    """Lock the data folder, bind the port, make membership (not started yet).

    Args:
        stack: gets what must be closed again.
        config: the whole configuration.
        events: what is told.
        clock: time.
        hooks: judges joins.
        leave: begins to leave; the API calls it.
        on_record: told of each swarm record that changed.
        on_twin: told the address of another node that runs with our identity.

    Raises:
        UsageError: bad key file, malformed peer, taken port, open address without a key.
        StorageError: the data folder can't be used. One that is made here goes again when the start fails.
    """
    node = config.node
    seeds = [seed_address(peer) for peer in node.peers]
    key = None if node.swarm_key_file is None else read_swarm_key(node.swarm_key_file)
    swarm_id = swarm_id_from_name(node.swarm) if key is None else swarm_id_from_key(key)
    data = stack.enter_context(DataDir.acquire(node.data_dir))
    if data.picked_other:
        events.emit("data-dir", f"the first data folder is in use; this node takes {data.path}")
    identity = Identity.load_or_create(data.path)
    endpoint = Endpoint(node_id=identity.node_id, swarm_id=swarm_id, swarm_key=key, config=node, clock=clock)
    stack.push_async_callback(endpoint.close)
    view = View(
        name=node.name or "",
        node_id=identity.node_id,
        token=data.token(),
        swarm_key=key,
        open_metrics=node.open_metrics,
        data_dir=str(data.path),
        events=events,
        leave=leave,
    )
    bound = await endpoint.open(view)
    address = advertised(node.advertise, bound, node.peers)
    name = view.name = node.name or f"{socket.gethostname()}:{bound.port}"
    known = KnownMembers(data.path)
    core = open_core(
        config=MembershipConfig.wan() if node.membership == "wan" else MembershipConfig.lan(),
        signer=identity,
        swarm_id=swarm_id,
        name=name,
        address=str(address),
        clock=clock,
        rng=random.Random(identity.node_id),
        known=known,
        tags=tags_of(node.roles),
    )
    boot = core.me.incarnation.boot_ms
    membership = MembershipService(
        core,
        endpoint.transport,
        clock,
        seeds,
        hooks=hooks,
        known=known,
        rng=random.Random(boot),
        on_record=on_record,
        on_twin=on_twin,
    )
    parts = NodeParts(
        config=config,
        name=name,
        node_id=identity.node_id,
        swarm_id=swarm_id,
        boot=boot,
        data_dir=str(data.path),
        address=address,
        clock=clock,
        events=events,
        transport=endpoint.transport,
        membership=membership,
        step_accounting=StepAccounting(identity.node_id, boot),
        began_s=clock.monotonic(),
    )
    _tell(parts, events, keyed=key is not None, moved=node.listen is None and bound.port != 7700)
    return Opened(data, parts, view, bool(known.members))


def _tell(parts: NodeParts, events: EventLog, *, keyed: bool, moved: bool) -> None:
    if moved:
        events.emit("port", f"port 7700 is taken; this node takes {parts.address.port}")
    join = f"p2pdrl node --peers {parts.address}" + (" --swarm-key-file FILE" if keyed else "")
    events.emit(
        "started",
        f"{parts.name} ({short(parts.node_id)}) listens on {parts.address}; others join with: {join}",
        address=str(parts.address),
        version=p2pdrl.__version__,
        data_dir=parts.data_dir,
    )
