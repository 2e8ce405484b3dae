"""A network inside one process, with the faults of a real one.

`MemoryNetwork` carries messages between `MemoryTransport`s. It loses, delays and duplicates
them, cuts links one way or both, and freezes nodes; every choice comes from the random
generator that is passed in. Errors are those of `HttpTransport`; one contract suite runs
over both. Tests and simulations use it, with `sleep` replaced to run on a manual clock.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.calls import MAX_REASON_CHARS, Routes, ServedRoute, report_end, run_handler
from p2pdrl.transport.framing import join_views
from p2pdrl.transport.protocol import (
    ANYBODY,
    Address,
    Answer,
    Handler,
    Lane,
    Refusal,
    Reply,
    RouteRoles,
    TrafficCounters,
    VectorBuffer,
)

__all__ = ["MemoryNetwork", "MemoryTransport"]

Sleep = Callable[[float], Awaitable[None]]


class MemoryNetwork:
    """Links between transports, and what is wrong with them.

    Args:
        rng: source of all chances.
        loss: probability that a request, and again that its answer, is lost.
        breaks: probability that the connection breaks under a request, and again under its answer: the caller
            hears of it at once.
        unseen: whether an answer that is lost looks sent to who gave it, as over TCP; else he is told.
        delay_s: least and greatest time of one way; drawn uniformly.
        duplicate: probability that a request arrives twice.
        sleep: waits; replace it to run on another clock.
    """

    def __init__(
        self,
        rng: random.Random | None = None,
        *,
        loss: float = 0.0,
        breaks: float = 0.0,
        unseen: bool = False,
        delay_s: tuple[float, float] = (0.0, 0.0),
        duplicate: float = 0.0,
        sleep: Sleep = asyncio.sleep,
    ) -> None:
        self.rng = rng if rng is not None else random.Random(0)
        self.loss = loss
        self.breaks = breaks
        self.unseen = unseen
        self.delay_s = delay_s
        self.duplicate = duplicate
        self.sleep = sleep
        self.allowed: dict[str, frozenset[str]] = {}
        """Roles that nodes may have, by id; who isn't in it may have any."""
        self._nodes: dict[Address, MemoryTransport] = {}
        self._cut: set[tuple[str, str]] = set()
        self._thawed: dict[str, asyncio.Event] = {}

    def join(self, node_id: str, address: Address, swarm_id: str = "default") -> MemoryTransport:
        """Make a transport that listens at ``address``; it serves once it was started."""
        return MemoryTransport(self, node_id, address, swarm_id)

    def cut(self, a: str, b: str, one_way: bool = False) -> None:
        """Drop everything from node ``a`` to node ``b``, and the other way unless ``one_way``."""
        self._cut.add((a, b))
        if not one_way:
            self._cut.add((b, a))

    def heal(self, a: str | None = None, b: str | None = None) -> None:
        """Mend the link between two nodes, or all links when none are named."""
        if a is None or b is None:
            self._cut.clear()
        else:
            self._cut -= {(a, b), (b, a)}

    def severed(self, a: str, b: str) -> bool:
        """Whether what node ``a`` sends to node ``b`` is dropped."""
        return (a, b) in self._cut

    def freeze(self, node_id: str) -> None:
        """Stop a node as SIGSTOP does: it accepts connections and does nothing."""
        self._thawed.setdefault(node_id, asyncio.Event())

    def thaw(self, node_id: str) -> None:
        """Let a frozen node go on."""
        event = self._thawed.pop(node_id, None)
        if event is not None:
            event.set()

    def attach(self, transport: MemoryTransport) -> None:
        """Start listening for ``transport``."""
        self._nodes[transport.address] = transport

    def detach(self, transport: MemoryTransport) -> None:
        """Stop listening for ``transport``."""
        if self._nodes.get(transport.address) is transport:
            del self._nodes[transport.address]

    def at(self, address: Address) -> MemoryTransport | None:
        """Who listens at ``address``."""
        return self._nodes.get(address)

    async def travel(self, source: str, target: str, vector_nbytes: int = 0) -> bool:
        """Wait as long as one way takes; tell whether the message arrives.

        Here a message takes as long however long its vector is; a network with real links overrides this.
        """
        del vector_nbytes
        low_s, high_s = self.delay_s
        delay_s = self.rng.uniform(low_s, high_s)
        lost = self.rng.random() < self.loss or (source, target) in self._cut
        await self.sleep(delay_s)
        return not lost

    def broken(self) -> bool:
        """Tell whether the connection breaks under a message."""
        return self.breaks > 0.0 and self.rng.random() < self.breaks

    async def until_thawed(self, node_id: str, given_up: asyncio.Future[Any] | None = None) -> None:
        """Wait while ``node_id`` is frozen, and ``given_up`` isn't done."""
        event = self._thawed.get(node_id)
        if event is None:
            return
        thawed = asyncio.ensure_future(event.wait())
        try:
            either = {thawed} if given_up is None else {thawed, given_up}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            thawed.cancel()


@dataclass(frozen=True, slots=True)
class _Message:
    """A request under way."""

    target_id: str | None
    route: str
    meta: bytes
    vector: bytes


class _MemoryIncoming:
    """A request in memory; the attributes are those of `Incoming`."""

    def __init__(self, caller: MemoryTransport, message: _Message) -> None:
        self.sender = caller.node_id
        self.route = message.route
        self.meta = message.meta
        self.vector_nbytes = len(message.vector)
        self.remote_host = caller.address.host
        self._vector: bytes | None = message.vector

    async def read_vector_into(self, out: memoryview) -> None:
        """Copy the vector; see `Incoming`."""
        view = out.cast("B")
        if self._vector is None:
            raise ValueError("the vector was read already")
        if view.nbytes != self.vector_nbytes:
            raise ValueError(f"the buffer holds {view.nbytes} bytes, the vector has {self.vector_nbytes}")
        vector, self._vector = self._vector, None
        await asyncio.sleep(0)
        view[:] = vector


class MemoryTransport:
    """`Transport` over a `MemoryNetwork`.

    Args:
        network: the links.
        node_id: our id.
        address: where peers find us.
        swarm_id: calls from another swarm are refused.
    """

    def __init__(self, network: MemoryNetwork, node_id: str, address: Address, swarm_id: str) -> None:
        self.node_id = node_id
        self.address = address
        self.swarm_id = swarm_id
        self.counters = TrafficCounters()
        self._network = network
        self._routes: Routes[Reply] = Routes()
        self._tasks: set[asyncio.Task[None]] = set()

    def serve(
        self,
        route: str,
        handler: Handler,
        *,
        max_meta_bytes: int = 65536,
        max_vector_bytes: int = 0,
        roles: RouteRoles = ANYBODY,
    ) -> None:
        """Register a handler; see `Transport`."""
        self._routes.add(route, handler, max_meta_bytes, max_vector_bytes, roles)

    def roles_of(self, node_id: str) -> frozenset[str] | None:
        """Return what roles a node may have; see `Transport`."""
        return self._network.allowed.get(node_id)

    async def start(self) -> None:
        """Begin to listen."""
        self._network.attach(self)

    async def close(self) -> None:
        """Stop listening and cancel what runs."""
        self._network.detach(self)
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

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
        del lane  # nothing queues here
        peer = self._network.at(to)
        if peer is None:
            raise PeerUnreachableError(f"nothing listens at {to}", sent=False)
        served = self._routes.get(route)
        verdict = None if served is None else served.refuse_callee(self.roles_of(peer.node_id))
        if verdict is not None:
            raise PeerRefusedError(403, verdict)
        body = b"" if vector is None else bytes(vector)
        self.counters.sent(target_id, len(meta) + len(body))
        message = _Message(target_id, route, meta, body)
        answered: asyncio.Future[tuple[Reply, bytes]] = asyncio.get_running_loop().create_future()
        self._spawn(self._deliver(peer, message, answered))
        if self._network.rng.random() < self._network.duplicate:
            self._spawn(self._deliver(peer, message, answered))
        expired = asyncio.ensure_future(self._network.sleep(deadline_s))
        try:
            either: set[asyncio.Future[Any]] = {answered, expired}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not answered.done():
                raise PeerTimeoutError(f"{to} didn't answer {route} within {deadline_s:g} s")
            reply, answer_vector = answered.result()
        finally:
            expired.cancel()
            answered.cancel()
        self._take(reply, answer_vector, into)
        self.counters.received(peer.node_id, len(reply.meta) + len(answer_vector))
        return Answer(reply.meta, len(answer_vector), peer.node_id)

    @staticmethod
    def _take(reply: Reply, vector: bytes, into: VectorBuffer | None) -> None:
        if not vector:
            return
        out = into(reply.meta, len(vector)) if into is not None else None
        if out is None:
            raise WireError(f"the answer carries a vector of {len(vector)} bytes that isn't wanted")
        if out.nbytes != len(vector):
            raise ValueError(f"the buffer holds {out.nbytes} bytes, the vector has {len(vector)}")
        out.cast("B")[:] = vector

    def _spawn(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _deliver(
        self, peer: MemoryTransport, message: _Message, answered: asyncio.Future[tuple[Reply, bytes]]
    ) -> None:
        """Carry one request over and its answer back."""
        network = self._network
        await network.until_thawed(self.node_id)
        if not await network.travel(self.node_id, peer.node_id, len(message.vector)):
            return
        if network.broken():
            _break(answered)
            return
        await network.until_thawed(peer.node_id)
        outcome: tuple[Reply, bytes] | Exception
        try:
            outcome = await peer.dispatch(self, message)
        except PeerRefusedError as error:
            outcome = error
        arrived = False
        nbytes = 0 if isinstance(outcome, Exception) else len(outcome[1])
        try:
            if await network.travel(peer.node_id, self.node_id, nbytes):
                # Nobody's answer waits for a frozen caller for longer than that one's deadline.
                await network.until_thawed(self.node_id, answered)
                arrived = not answered.done() and not network.broken()
                if not arrived:
                    _break(answered)
            if arrived and isinstance(outcome, Exception):
                answered.set_exception(outcome)
            elif arrived and not isinstance(outcome, Exception):
                answered.set_result(outcome)
        finally:
            if not isinstance(outcome, Exception):
                report_end(message.route, outcome[0], arrived or network.unseen)

    async def dispatch(self, caller: MemoryTransport, message: _Message) -> tuple[Reply, bytes]:
        """Run the handler for a request that arrived.

        Raises:
            PeerRefusedError: what the caller shall see.
        """
        try:
            route = self._admit(caller, message)
            self.counters.received(caller.node_id, len(message.meta) + len(message.vector))
            reply = await run_handler(route, _MemoryIncoming(caller, message))
        except Refusal as refusal:
            self.counters.refused[refusal.status] += 1
            raise PeerRefusedError(refusal.status, refusal.reason[:MAX_REASON_CHARS]) from refusal
        vector = join_views(reply.vector)
        self.counters.sent(caller.node_id, len(reply.meta) + len(vector))
        return reply, vector

    def _admit(self, caller: MemoryTransport, message: _Message) -> ServedRoute[Reply]:
        if caller.swarm_id != self.swarm_id:
            raise Refusal(403, f"this node belongs to swarm {self.swarm_id}, not {caller.swarm_id}")
        if message.target_id is not None and message.target_id != self.node_id:
            raise Refusal(403, f"meant for node {message.target_id}, this is {self.node_id}")
        route = self._routes.find(message.route)
        route.admit_caller(self.roles_of(caller.node_id))
        route.admit(len(message.meta), len(message.vector))
        return route


def _break(answered: asyncio.Future[tuple[Reply, bytes]]) -> None:
    if not answered.done():
        answered.set_exception(PeerUnreachableError("the connection broke", sent=True))
