"""Connections to members that nobody can dial: through a relay, a member that both sides can dial.

    member                            relay                            caller
    POST relay/wait       ────────►   keeps it until there is a ticket
                                      ◄────────      POST relay/open, names the member
    answer: a ticket      ◄────────
    a connection: HELLO   ────────►
                                      ────────►      answer: a ticket
                                      ◄────────      a connection: HELLO
    ◄═══════════════════  copies bytes, both ways  ═══════════════════►

The member treats its end as a connection that its listener has accepted; so TLS is between caller and
member, and the relay, which copies bytes, can neither read nor change them. Streams and pipes are opened
through the relay likewise, each by a connection of its own.

`RelayServer` is the relay's part, `RelayedMember` the member's, `RelayDialer` the caller's. Which members
are relayed, and by whom, `membership` says.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated

import msgspec
from msgspec import Meta

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerRefusedError, PeerUnreachableError, TransportError, WireError
from p2pdrl.ids import is_node_id, short
from p2pdrl.transport import codec
from p2pdrl.transport.calls import TokenBuckets
from p2pdrl.transport.http.listener import ServedConnection
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import TOKEN_BYTES, PendingConnections
from p2pdrl.transport.protocol import Address, Answer, Incoming, Refusal, Reply
from p2pdrl.transport.rate import Allowance, Gcra, NodeRates
from p2pdrl.transport.stream.socket import notice_silence, set_options

__all__ = [
    "OPEN_ROUTE",
    "WAIT_ROUTE",
    "RelayDialer",
    "RelayServer",
    "RelayedMember",
    "relayed_address",
    "relayed_id",
]

WAIT_ROUTE, OPEN_ROUTE = "relay/wait", "relay/open"

WAIT_S = 20.0
"""How long a member's request waits at its relay; it asks again at once. Shorter than what routers remember
of a silent connection."""
BETWEEN_S = 3.0
"""A member may take so long between two requests, before it counts as gone."""
COME_WITHIN_S = 4.0
"""How long a caller waits at the relay for the member's connection."""
NEXT_RELAY_S = 0.3
"""A relay that hasn't connected us after this doesn't keep us from trying the next at the same time."""
SILENCE_S = 60.0
_ATTACH = b"attach"
"""Metadata of a member's first request."""
_HASTY_S = 0.5
_CHUNK_BYTES = 1 << 18
_MAX_TICKETS = 64
_SUFFIX = ".relayed"

Relays = Sequence[tuple[str, Address]]
"""Ids of relays and where they are dialled, the best first."""
Take = Callable[[socket.socket, str], ServedConnection | None]
Call = Callable[[Address, str, str, bytes, float], Awaitable[Answer]]
"""``(where, who, route, metadata, deadline in seconds)``: a call that goes to the peer itself."""
Open = Callable[[Address, bytes], Awaitable[tuple[socket.socket, str]]]
"""Connects to a peer and shows a ticket; returns the socket and the peer's IP."""

Ticket = Annotated[bytes, Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


def relayed_address(node_id: str) -> Address:
    """Stand in for the address of a member that is dialled through its relays."""
    return Address(node_id + _SUFFIX, 1)


def relayed_id(host: str | None) -> str | None:
    """Return whose `relayed_address` has this host; None for the host of a real address."""
    found = host.removesuffix(_SUFFIX) if host is not None and host.endswith(_SUFFIX) else ""
    return found if is_node_id(found) else None


class _Tickets(msgspec.Struct, frozen=True, array_like=True):
    """What a waiting member is told; each is for one connection to be made to the relay."""

    tickets: Annotated[tuple[Ticket, ...], Meta(max_length=_MAX_TICKETS)]


# The relay


class _RelayPace:
    """What one direction of a tunnel may pass: the relay's bound for all tunnels, and those of its node."""

    def __init__(self, shared: _SharedPace, rates: NodeRates | None) -> None:
        self._shared = shared
        both = () if rates is None else (rates.download, rates.upload)
        self._allowances = [Allowance(rate) for rate in both if rate is not None]

    async def take(self, nbytes: int) -> None:
        """Wait until ``nbytes`` may pass."""
        await self._shared.take(nbytes)
        for allowance in self._allowances:
            left = nbytes
            while left > 0:
                left -= await allowance.take(left)


class _SharedPace:
    """Bytes a second of all tunnels together; 0 is no bound."""

    def __init__(self, bytes_s: float, clock: Clock) -> None:
        self._gcra = Gcra(bytes_s) if bytes_s else None
        self._clock = clock
        self._tat_s = 0.0

    async def take(self, nbytes: int) -> None:
        if self._gcra is None:
            return
        now_s = self._clock.monotonic()
        self._tat_s, due_s = self._gcra.reserve(self._tat_s, nbytes, now_s)
        if due_s > now_s:
            await asyncio.sleep(due_s - now_s)


class _Tunnel:
    """Two connections whose bytes are copied to each other.

    Args:
        caller: id of the node that asked for it; empty for this one itself.
        pace: of one direction, made twice.
        passed: told how many bytes went through, each time.
        ended: told once, when it is over.
    """

    def __init__(
        self,
        caller: str,
        pace: Callable[[], _RelayPace],
        passed: Callable[[int], None],
        ended: Callable[[], None],
    ) -> None:
        self.caller = caller
        self.over = asyncio.Event()
        self.member: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()
        """The member's connection, once it has come."""
        self._pace = pace
        self._passed = passed
        self._ended = ended
        self._sockets: list[socket.socket] = []
        self._task: asyncio.Task[None] | None = None

    def take_member(self, sock: socket.socket, _host: str) -> ServedConnection | None:
        """Take the member's connection."""
        return self._take(sock, is_member=True)

    def take_caller(self, sock: socket.socket, _host: str) -> ServedConnection | None:
        """Take the caller's connection, and begin to copy."""
        end = self._take(sock, is_member=False)
        if end is not None:
            self._task = asyncio.get_running_loop().create_task(self._copy_both(), name="tunnel")
            self._task.add_done_callback(lambda _: self._end())
        return end

    def _take(self, sock: socket.socket, *, is_member: bool) -> ServedConnection | None:
        if self.over.is_set() or (is_member and self.member.done()):
            sock.close()
            return None
        set_options(sock)
        notice_silence(sock, SILENCE_S)
        self._sockets.append(sock)
        if is_member:
            self.member.set_result(sock)
        return _TunnelEnd(self)

    def give_member(self) -> socket.socket:
        """Hand the member's connection out: the caller is this node itself, and nothing is copied."""
        sock = self._sockets.pop()
        self.close()
        return sock

    def close(self) -> None:
        """End it; calling it again does nothing."""
        if self._task is not None:
            self._task.cancel()
        else:
            self._end()

    def _end(self) -> None:
        if self.over.is_set():
            return
        self.over.set()
        self.member.cancel()
        for sock in self._sockets:
            sock.close()
        self._ended()

    async def _copy_both(self) -> None:
        member, caller = self._sockets
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(caller, member))
                group.create_task(self._copy(member, caller))
        except* OSError:
            pass  # one of them went away

    async def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        pace = self._pace()
        while data := await loop.sock_recv(source, _CHUNK_BYTES):
            await pace.take(len(data))
            await loop.sock_sendall(sink, data)
            self._passed(len(data))
        sink.shutdown(socket.SHUT_WR)


class _TunnelEnd:
    """One of a tunnel's connections, as the listener sees it: counted, and cut with all others."""

    def __init__(self, tunnel: _Tunnel) -> None:
        self.proven = True
        self._tunnel = tunnel

    def too_slow(self, _now_s: float) -> bool:
        """Never: the kernel breaks what is silent (`notice_silence`), and tickets end."""
        return False

    def abort(self) -> None:
        """Cut it, with its other half."""
        self._tunnel.close()

    async def run(self) -> None:
        """Stay until it is over."""
        await self._tunnel.over.wait()


@dataclass(slots=True)
class _WaitingMember:
    """A member that we relay for.

    Attributes:
        until_s: it counts as here until this monotonic time, whether it asks or not.
        asks: set when its request is to be answered; None while none waits.
        tickets: it wasn't told of these yet.
        tunnels: open, or being opened.
    """

    until_s: float
    asks: asyncio.Event | None = None
    tickets: deque[bytes] = field(default_factory=deque)
    tunnels: set[_Tunnel] = field(default_factory=set)


class RelayServer:
    """Relays for members that can't be dialled.

    Args:
        pending: where the connections of both sides come in.
        limits: ``max_relayed``, ``max_tunnels`` and those for one member and one caller, ``relay_bytes_s``.
        rates: of the node, which what is relayed counts against.

    Attributes:
        admits: whether we would relay for a member; who isn't one is refused.
        nbytes: relayed so far.
    """

    def __init__(
        self,
        pending: PendingConnections[Take],
        limits: TransportLimits,
        clock: Clock,
        rates: NodeRates | None = None,
    ) -> None:
        self.admits: Callable[[str], bool] = lambda node_id: True
        self.nbytes = 0
        self._pending = pending
        self._limits = limits
        self._clock = clock
        self._rates = rates
        self._shared = _SharedPace(limits.relay_bytes_s, clock)
        self._asked = TokenBuckets(clock, limits.tunnels_per_s, limits.max_tunnels_per_caller)
        self._members: dict[str, _WaitingMember] = {}
        self._callers: Counter[str] = Counter()

    @property
    def members(self) -> list[str]:
        """Ids of those that we relay for now."""
        now_s = self._clock.monotonic()
        return [node_id for node_id, member in self._members.items() if _is_here(member, now_s)]

    @property
    def tunnels(self) -> int:
        """Tunnels that are open, or being opened."""
        return sum(len(member.tunnels) for member in self._members.values())

    def close(self) -> None:
        """End all tunnels, and answer who waits."""
        for member in tuple(self._members.values()):
            for tunnel in tuple(member.tunnels):
                tunnel.close()
            if member.asks is not None:
                member.asks.set()

    def drop(self, node_id: str) -> None:
        """Relay nothing more for a node that is refused from now on, nor to it."""
        for known, member in tuple(self._members.items()):
            for tunnel in tuple(member.tunnels):
                if node_id in (known, tunnel.caller):
                    tunnel.close()
        gone = self._members.pop(node_id, None)
        if gone is not None and gone.asks is not None:
            gone.asks.set()

    async def wait(self, incoming: Incoming) -> Reply:
        """Keep a member's request until a caller wants it, `WAIT_S` at most; `_ATTACH` is answered at once.

        Raises:
            Refusal: 403, we don't relay for it; 429, we relay for too many.
        """
        now_s = self._clock.monotonic()
        member = self._members.get(incoming.sender)
        if member is None or not _is_here(member, now_s):
            self._admit(incoming.sender, now_s)
            member = self._members.setdefault(incoming.sender, _WaitingMember(now_s))
        if member.asks is not None:
            member.asks.set()  # of a connection that it has lost, mostly
            member.asks = None
        if incoming.meta == _ATTACH:
            member.until_s = now_s + BETWEEN_S
            return Reply(msgspec.msgpack.encode(_Tickets(())))
        asks = member.asks = asyncio.Event()
        try:
            if not member.tickets:
                async with asyncio.timeout(WAIT_S):
                    await asks.wait()
        except TimeoutError:
            pass
        mine = member.asks is asks
        if mine:
            member.asks = None
            member.until_s = self._clock.monotonic() + BETWEEN_S
        told = tuple(member.tickets.popleft() for _ in range(len(member.tickets))) if mine else ()

        def ended(sent: bool) -> None:
            if not sent:
                member.tickets.extend(told)

        return Reply(msgspec.msgpack.encode(_Tickets(told)), on_end=ended)

    def _admit(self, node_id: str, now_s: float) -> None:
        if not self.admits(node_id):
            raise Refusal(403, "this node relays for living members of its swarm only")
        for known, member in tuple(self._members.items()):
            if not _is_here(member, now_s) and not member.tunnels:
                del self._members[known]
        others = sum(known != node_id for known in self._members)
        if others >= self._limits.max_relayed:
            raise Refusal(429, f"this node relays for {others} members already: ask another")

    async def open(self, incoming: Incoming) -> Reply:
        """Connect a caller to a member that waits here.

        Raises:
            Refusal: 404, it doesn't wait here; 504, it didn't come; 429, too many tunnels.
        """
        target: str = codec.decode(incoming.meta, str, "name of a member to be connected to")
        caller = incoming.sender
        if self._callers[caller] >= self._limits.max_tunnels_per_caller or not self._asked.take(caller):
            raise Refusal(429, f"{self._callers[caller]} tunnels of yours are open here: use those, or wait")
        tunnel = await self._member_comes(target, caller)
        ticket = secrets.token_bytes(TOKEN_BYTES)
        self._pending.add(ticket, tunnel.take_caller, tunnel.close)

        def ended(sent: bool) -> None:
            if not sent:
                self._pending.drop(ticket)

        return Reply(ticket, on_end=ended)

    async def connect(self, target: str) -> socket.socket:
        """Return a connection to a member that waits here, for ourselves.

        Raises:
            PeerUnreachableError: it doesn't wait, it didn't come, or there are too many tunnels.
        """
        try:
            return (await self._member_comes(target, "")).give_member()
        except Refusal as refusal:
            raise PeerUnreachableError(refusal.reason, sent=False) from refusal

    async def _member_comes(self, target: str, caller: str) -> _Tunnel:
        """Have a member connect to us; raises `Refusal`."""
        member = self._members.get(target)
        if member is None or not _is_here(member, self._clock.monotonic()):
            raise Refusal(404, f"node {target[:32]} isn't relayed here")
        limits = self._limits
        if len(member.tunnels) >= limits.max_tunnels_per_member or self.tunnels >= limits.max_tunnels:
            raise Refusal(429, f"{len(member.tunnels)} tunnels to that member, {self.tunnels} in all")
        self._callers[caller] += 1

        def ended() -> None:
            member.tunnels.discard(tunnel)
            self._callers[caller] -= 1
            if not self._callers[caller]:
                del self._callers[caller]

        tunnel = _Tunnel(caller, lambda: _RelayPace(self._shared, self._rates), self._passed, ended)
        member.tunnels.add(tunnel)
        ticket = secrets.token_bytes(TOKEN_BYTES)
        self._pending.add(ticket, tunnel.take_member, tunnel.close)
        member.tickets.append(ticket)
        if member.asks is not None:
            member.asks.set()
        came = False
        try:
            await asyncio.wait([tunnel.member], timeout=COME_WITHIN_S)
            came = tunnel.member.done() and not tunnel.member.cancelled()
        finally:
            if not came:
                if ticket in member.tickets:
                    member.tickets.remove(ticket)
                self._pending.drop(ticket)
                tunnel.close()
        if not came:
            raise Refusal(504, f"node {short(target)} didn't connect within {COME_WITHIN_S:g} s")
        return tunnel

    def _passed(self, nbytes: int) -> None:
        self.nbytes += nbytes


def _is_here(member: _WaitingMember, now_s: float) -> bool:
    return member.asks is not None or now_s < member.until_s


# The member


class RelayedMember:
    """Lets a relay connect others to us.

    Args:
        call: see `Call`.
        connect: see `Open`.

    Attributes:
        take: gets each connection, with the relay's IP; the listener's.
    """

    def __init__(self, call: Call, connect: Open) -> None:
        self.take: Callable[[socket.socket, str], None] = lambda sock, host: sock.close()
        self._call = call
        self._connect = connect
        self._coming: set[asyncio.Task[None]] = set()
        self._taken: list[socket.socket] = []

    @property
    def tunnels(self) -> int:
        """Connections that came through relays and are open."""
        self._taken = [sock for sock in self._taken if sock.fileno() >= 0]
        return len(self._taken)

    def close(self) -> None:
        """Make no more connections to relays."""
        for task in self._coming:
            task.cancel()

    async def attach(self, relay: str, address: Address) -> None:
        """Have a member relay for us.

        Raises:
            TransportError: it doesn't.
        """
        await self._ask(relay, address, 5.0, _ATTACH)

    async def serve(self, relay: str, address: Address) -> None:
        """Come when that relay, which we are attached to, calls; ends only by its failure.

        Raises:
            TransportError: it relays for us no more.
        """
        loop = asyncio.get_running_loop()
        while True:
            began_s = loop.time()
            told = await self._ask(relay, address, WAIT_S + 5.0)
            if not told.tickets and loop.time() - began_s < _HASTY_S:
                await asyncio.sleep(_HASTY_S)  # a relay that answers at once, and wants nothing
            for ticket in told.tickets:
                if len(self._coming) < _MAX_TICKETS:
                    task = loop.create_task(self._come(address, ticket), name="tunnel to a relay")
                    self._coming.add(task)
                    task.add_done_callback(self._coming.discard)

    async def _ask(self, relay: str, address: Address, deadline_s: float, meta: bytes = b"") -> _Tickets:
        answer = await self._call(address, relay, WAIT_ROUTE, meta, deadline_s)
        found: _Tickets = codec.decode(answer.meta, _Tickets, "answer of a relay")
        return found

    async def _come(self, address: Address, ticket: bytes) -> None:
        try:
            async with asyncio.timeout(COME_WITHIN_S):
                sock, host = await self._connect(address, ticket)
        except (OSError, TransportError):
            return  # the caller is told by the relay that we didn't come
        self._taken = [*self._taken[-4 * _MAX_TICKETS :], sock]
        self.take(sock, host)


# The caller


class RelayDialer:
    """Connects to members through their relays.

    Args:
        call: see `Call`.
        connect: see `Open`.
        own: our own relay, which may be the one of the member.

    Attributes:
        relays: the relays of a member; None when it is dialled like any other.
    """

    def __init__(self, call: Call, connect: Open, own: RelayServer) -> None:
        self.relays: Callable[[str], Relays | None] = lambda node_id: None
        self._call = call
        self._connect = connect
        self._own = own

    async def connect(self, target: str) -> socket.socket:
        """Return a connection to a member, on which nothing was sent.

        The first relay that connects us counts; others are tried when one fails, or is slow.

        Raises:
            PeerUnreachableError: none did. Without a cause when all say that it isn't there.
        """
        waiting: deque[Callable[[str], Coroutine[None, None, socket.socket]]] = deque()
        waiting.extend(partial(self._through, *relay) for relay in self.relays(target) or ())
        if target in self._own.members:
            waiting.appendleft(self._own.connect)
        if not waiting:
            raise _unsure(f"{short(target)} can't be dialled, and none of its relays is known to live")
        running: set[asyncio.Task[socket.socket]] = set()
        absent, told = True, "no relay"
        try:
            while waiting or running:
                if waiting:
                    running.add(asyncio.create_task(waiting.popleft()(target), name="relay"))
                done, running = await asyncio.wait(
                    running,
                    timeout=NEXT_RELAY_S if waiting else None,
                    return_when=asyncio.FIRST_COMPLETED,
                )
                for task in done:
                    error = task.exception()
                    if error is None:
                        return task.result()
                    if not isinstance(error, OSError | TransportError):
                        raise error
                    absent &= isinstance(error, PeerRefusedError) and error.status == 404
                    told = str(error)
        finally:
            await _drop(running)
        if absent:
            raise PeerUnreachableError(f"{short(target)} isn't connected to its relays", sent=False)
        raise _unsure(f"no relay of {short(target)} connected us: {told}")

    async def _through(self, relay: str, address: Address, target: str) -> socket.socket:
        meta = msgspec.msgpack.encode(target)
        answer = await self._call(address, relay, OPEN_ROUTE, meta, COME_WITHIN_S + 1.0)
        if len(answer.meta) != TOKEN_BYTES:
            raise WireError("a relay answered something else than a ticket")
        sock, _ = await self._connect(address, answer.meta)
        return sock


def _unsure(words: str) -> PeerUnreachableError:
    """Return an error that has a cause: whether the member lives isn't known."""
    error = PeerUnreachableError(words, sent=False)
    error.__cause__ = ConnectionError(words)
    return error


async def _drop(tasks: set[asyncio.Task[socket.socket]]) -> None:
    """Cancel what isn't needed any more, and close what it had opened."""
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, socket.socket):
            result.close()
