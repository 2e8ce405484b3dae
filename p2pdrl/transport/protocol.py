"""What every transport offers: one request, one answer, each of metadata and maybe a vector.

Membership, strategies and the node talk to peers through `Transport` alone; `HttpTransport`
runs it over TCP, `testing.memory_transport` inside one process.

A message is `meta`, a short byte string whose encoding is the caller's business, followed by
`vector`, a long run of bytes that is streamed between preallocated buffers and never copied
whole.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import msgspec

from p2pdrl.errors import P2PDRLError, UsageError

__all__ = [
    "ANYBODY",
    "DEFAULT_PORT",
    "OTHER_PEERS",
    "Address",
    "Answer",
    "Handler",
    "Incoming",
    "Lane",
    "Refusal",
    "Reply",
    "RouteRoles",
    "TrafficCounters",
    "Transport",
    "VectorBuffer",
    "check_route",
]

DEFAULT_PORT = 7700
"""TCP port of a node when none is named."""

Lane = Literal["probe", "bulk"]
"""``probe`` keeps its own connections, so that a failure detector never waits behind vectors."""

VectorBuffer = Callable[[bytes, int], "memoryview | None"]
"""``(meta, vector_nbytes)`` of an answer -> where its vector goes, or None to refuse it."""

_HOST = re.compile(r"(?!.{254})[A-Za-z0-9_:%-]{1,63}(?:\.[A-Za-z0-9_:%-]{1,63})*\.?")
"""Parts that are empty or longer than 63 can't be looked up; a name may end with a dot."""
_PORT = re.compile(r"[0-9]{1,5}")
_ROUTE = re.compile(r"[a-z0-9_-]{1,32}(/[a-z0-9_-]{1,32}){0,3}")


class Address(msgspec.Struct, frozen=True, order=True):
    """Where a peer listens.

    Attributes:
        host: DNS name or IP literal, IPv6 without brackets.
        port: TCP port, 0-65535 (0 asks a listener for any free port).
    """

    host: str
    port: int

    @classmethod
    @functools.lru_cache(4096)
    def parse(cls, text: str, default_port: int = DEFAULT_PORT) -> Address:
        """Read ``host``, ``host:port``, ``[v6]`` or ``[v6]:port``.

        Raises:
            UsageError: when the text is none of these.
        """
        text = text.strip()
        if text.startswith("["):
            host, bracket, rest = text[1:].partition("]")
            good = bool(bracket) and (not rest or rest.startswith(":"))
            port_text = rest[1:]
            has_port = bool(rest)
        else:
            host, colon, port_text = text.partition(":")
            has_port = bool(colon)
            good = ":" not in port_text
        if not good or _HOST.fullmatch(host) is None:
            raise UsageError(f"{text[:80]!r} isn't an address: write HOST:PORT, or [IPV6]:PORT")
        if not has_port and host.isdecimal():
            raise UsageError(f"{text[:80]!r} is a port alone: write HOST:PORT, such as 127.0.0.1:{host[:5]}")
        if not has_port:
            return cls(host, default_port)
        if _PORT.fullmatch(port_text) is None or int(port_text) > 65535:
            raise UsageError(f"{text[:80]!r} has no good port: write HOST:PORT with a port of 1-65535")
        return cls(host, int(port_text))

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Refusal(P2PDRLError):  # noqa: N818 - a handler's decision, not a failure
    """Raised by a handler: the caller gets `PeerRefusedError` with these two.

    Attributes:
        status: an HTTP status from 400 to 599.
        reason: told to the caller in plain words (cut to 500 characters).
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(f"{status}: {reason}")
        self.status = status
        self.reason = reason


class Incoming(Protocol):
    """A request as its handler sees it; header and metadata are authentic already."""

    @property
    def sender(self) -> str:
        """Node id of the caller, as vouched for by a holder of the swarm key."""

    @property
    def route(self) -> str:
        """Name under which the handler was registered."""

    @property
    def meta(self) -> bytes:
        """The request's metadata."""

    @property
    def vector_nbytes(self) -> int:
        """Length of the vector that follows; 0 when there is none."""

    @property
    def remote_host(self) -> str:
        """IP address from which the connection came."""

    async def read_vector_into(self, out: memoryview) -> None:
        """Fill ``out`` (exactly ``vector_nbytes`` long) with the vector, at most once.

        What ``out`` holds is authentic only after this returned.

        Raises:
            WireError: truncated, too long, or a piece that fails its check.
            PeerTimeoutError: the peer stopped sending.
            ValueError: ``out`` has another length, or it is a second read.
        """


@dataclass(frozen=True, slots=True)
class Reply:
    """What a handler answers.

    Attributes:
        vector: one view, or several that are sent one after another as one vector. They must
            stay unchanged until ``on_end`` is called.
        on_end: called exactly once: with True when the whole answer has been written, with False
            when that failed (the caller went away, say). What True can't tell is whether it arrived.
    """

    meta: bytes
    vector: Sequence[memoryview] | memoryview | None = None
    on_end: Callable[[bool], None] | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call brings back.

    Attributes:
        vector_nbytes: bytes written into the buffer that ``into`` returned; 0 for no vector.
        sender: node id that answered, or None where it couldn't be known.
    """

    meta: bytes
    vector_nbytes: int
    sender: str | None


Handler = Callable[[Incoming], Awaitable[Reply]]
"""Serves one route. Raises `Refusal`; a `TensorError` is told as 422, a `WireError` as 400."""


class RouteRoles(NamedTuple):
    """Who has business on a route: nodes whose certificate limits them need one of the roles named here.

    Args:
        callers: who may call it; None for everybody.
        callees: who may answer it; None for everybody.
    """

    callers: frozenset[str] | None = None
    callees: frozenset[str] | None = None


ANYBODY = RouteRoles()


class Transport(Protocol):
    """Calls peers, and serves their calls."""

    @property
    def node_id(self) -> str:
        """Our own id."""

    @property
    def counters(self) -> TrafficCounters:
        """Bytes in and out, in total and by peer; refusals by status."""

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
        """Send one request and wait for the whole answer.

        Args:
            to: where to dial.
            target_id: who must answer there; None when unknown (a seed).
            route: the name under which the peer serves.
            meta: metadata of the request.
            vector: sent after the metadata; must stay unchanged until this returns.
            into: gives the buffer for the answer's vector; without it a vector is refused.
            deadline_s: seconds for the whole call, connecting included.
            lane: which pool of connections to use.

        Raises:
            PeerUnreachableError: nothing listens there, or the connection broke before an answer.
            PeerTimeoutError: no whole answer within the deadline.
            PeerRefusedError: the peer said no.
            WireError: the answer breaks the protocol, or ``into`` refused it.
        """

    def serve(
        self,
        route: str,
        handler: Handler,
        *,
        max_meta_bytes: int = 65536,
        max_vector_bytes: int = 0,
        roles: RouteRoles = ANYBODY,
    ) -> None:
        """Register ``handler`` for ``route``; longer requests are refused with 413.

        Args:
            roles: who may call it, and who is called by it.

        Raises:
            ValueError: the name is malformed or taken.
        """

    def roles_of(self, node_id: str) -> frozenset[str] | None:
        """All roles that a node's certificate allows it; None without a limit, or where none was seen yet."""

    async def start(self) -> None:
        """Make calls possible."""

    async def close(self) -> None:
        """End open calls and free connections; calling it again does nothing."""


def check_route(route: str) -> str:
    """Return ``route`` when it is a good name: lower case words, at most four, split by ``/``.

    Raises:
        ValueError: when it isn't.
    """
    if _ROUTE.fullmatch(route) is None:
        raise ValueError(f"{route!r} isn't a route name: lower case letters, digits, - and _, split by /")
    return route


OTHER_PEERS = "other"
"""Key of all peers beyond the table's bound, and of callers whose id isn't known."""


class TrafficCounters:
    """What one node's transport has moved and refused; all counts only grow.

    Bytes are those of message bodies (metadata, vectors and their tags), without heads.

    Args:
        max_peers: peers counted by id; later ones share the key ``other``.

    Attributes:
        refused: requests that we refused, by HTTP status.
        refused_connections: connections closed at once because of the caps, or for an unknown token.
        dropped_connections: connections cut because they were too slow.
        displaced_connections: connections of nobody known, cut to make room.
        failed_handshakes: connections whose TLS came to nothing: of another swarm, mostly.
        starved: times that no connection could be accepted for want of file descriptors or memory.
    """

    def __init__(self, max_peers: int = 4096) -> None:
        self._max_peers = max_peers
        self.bytes_in = 0
        self.bytes_out = 0
        self.bytes_in_by_peer: dict[str, int] = {}
        self.bytes_out_by_peer: dict[str, int] = {}
        self.refused: Counter[int] = Counter()
        self.refused_connections = 0
        self.dropped_connections = 0
        self.displaced_connections = 0
        self.failed_handshakes = 0
        self.starved = 0

    def ended(self) -> dict[str, int]:
        """Connections that we ended or couldn't take, by why."""
        return {
            "refused": self.refused_connections,
            "slow": self.dropped_connections,
            "displaced": self.displaced_connections,
            "handshake": self.failed_handshakes,
            "starved": self.starved,
        }

    def received(self, peer: str | None, nbytes: int) -> None:
        """Count ``nbytes`` that came from ``peer``."""
        self.bytes_in += nbytes
        self._add(self.bytes_in_by_peer, peer, nbytes)

    def sent(self, peer: str | None, nbytes: int) -> None:
        """Count ``nbytes`` that went to ``peer``."""
        self.bytes_out += nbytes
        self._add(self.bytes_out_by_peer, peer, nbytes)

    def _add(self, table: dict[str, int], peer: str | None, nbytes: int) -> None:
        key = peer if peer is not None else OTHER_PEERS
        if key not in table and len(table) >= self._max_peers:
            key = OTHER_PEERS
        table[key] = table.get(key, 0) + nbytes
