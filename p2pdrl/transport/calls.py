"""Calls at both ends: what one sends, the table of routes that serves it, and how much one peer may ask.

`HttpTransport`, streams and `testing.memory_transport` share the routes, so that all of them answer alike.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, TypeVar

from p2pdrl.clock import Clock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, TensorError, WireError
from p2pdrl.transport.framing import OverlongError, checked_buffer, views_of
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import ANYBODY, Incoming, Refusal, Reply, RouteRoles, VectorBuffer, check_route

__all__ = [
    "CALLERS_FAULTS",
    "MAX_REASON_CHARS",
    "Admission",
    "IncomingCall",
    "OutgoingCall",
    "R",
    "Routes",
    "ServedRoute",
    "TokenBuckets",
    "refusal_of",
    "refuse_roles",
    "refused",
    "report",
    "report_end",
    "run_handler",
]

MAX_REASON_CHARS = 500
"""A refusal's reason is cut to this length."""

R = TypeVar("R")
"""What a handler answers: `Reply`, or `pipe.ticket.PipeReply`."""

V = TypeVar("V")


# The caller


class OutgoingCall:
    """What one call sends; kept together so that it can be tried at several addresses.

    Args:
        target_id: who must answer; None when unknown.
        route: the name under which the peer serves.
        meta: metadata.
        vector: sent after it.
        into: gives the buffer for the answer's vector.
    """

    def __init__(
        self,
        target_id: str | None,
        route: str,
        meta: bytes,
        vector: memoryview | None,
        into: VectorBuffer | None,
    ) -> None:
        self.target_id = target_id
        self.route = check_route(route)
        self.meta = meta
        self.views = views_of(vector)
        self.vector_nbytes = sum(view.nbytes for view in self.views)
        self._into = into

    @property
    def path(self) -> str:
        """Where it is posted."""
        return f"/p2p/{self.route}"

    def buffer(self, meta: bytes, nbytes: int) -> memoryview:
        """Return where the answer's vector goes.

        Raises:
            WireError: it isn't wanted.
            ValueError: the caller gave a buffer of another length.
        """
        return checked_buffer(self._into(meta, nbytes) if self._into else None, nbytes, "the answer")


def refused(status: int, text: bytes) -> PeerRefusedError:
    """Return the error for a refusal; its text is cut and made printable."""
    words = text.decode("utf-8", "replace")
    reason = "".join(c if c.isprintable() else " " for c in words)[:MAX_REASON_CHARS]
    return PeerRefusedError(status, reason)


# The callee


class IncomingCall:
    """A call that came by a post or over a stream; the attributes are those of `Incoming`.

    Args:
        read_vector: fills a buffer of ``vector_nbytes`` with the vector, checked.
    """

    def __init__(
        self,
        *,
        sender: str,
        route: str,
        meta: bytes,
        vector_nbytes: int,
        remote_host: str,
        read_vector: Callable[[memoryview], Awaitable[None]],
    ) -> None:
        self.sender = sender
        self.route = route
        self.meta = meta
        self.vector_nbytes = vector_nbytes
        self.remote_host = remote_host
        self._read_vector: Callable[[memoryview], Awaitable[None]] | None = read_vector

    async def read_vector_into(self, out: memoryview) -> None:
        """Read the vector; see `Incoming`."""
        view = out.cast("B")
        if self._read_vector is None:
            raise ValueError("the vector was read already")
        if view.nbytes != self.vector_nbytes:
            raise ValueError(f"the buffer holds {view.nbytes} bytes, the vector has {self.vector_nbytes}")
        read_vector, self._read_vector = self._read_vector, None
        await read_vector(view)


def refuse_roles(allowed: frozenset[str] | None, wanted: frozenset[str] | None) -> str | None:
    """Say that roles which a certificate allows are none of those that are wanted; None where one is."""
    if allowed is None or wanted is None or allowed & wanted:
        return None
    return f"a certificate for {' and '.join(sorted(allowed))} alone makes no {' or '.join(sorted(wanted))}"


@dataclass(frozen=True, slots=True)
class ServedRoute(Generic[R]):
    """One served route and its bounds."""

    name: str
    handler: Callable[[Incoming], Awaitable[R]]
    max_meta_bytes: int
    max_vector_bytes: int
    roles: RouteRoles = ANYBODY

    def admit_caller(self, allowed: frozenset[str] | None) -> None:
        """Check what the caller's certificate allows it to be; None for anything.

        Raises:
            Refusal: 403, none that has business here.
        """
        if (verdict := refuse_roles(allowed, self.roles.callers)) is not None:
            raise Refusal(403, f"{verdict}, who alone may ask for {self.name}")

    def refuse_callee(self, allowed: frozenset[str] | None) -> str | None:
        """Say why a peer whose certificate allows it this isn't asked; None when it may be."""
        verdict = refuse_roles(allowed, self.roles.callees)
        return None if verdict is None else f"{verdict}, who alone are asked for {self.name}"

    def admit(self, meta_nbytes: int, vector_nbytes: int) -> None:
        """Check the announced lengths.

        Raises:
            Refusal: 413, one is over its bound.
        """
        if meta_nbytes > self.max_meta_bytes:
            raise Refusal(413, f"{self.name} takes metadata of {self.max_meta_bytes} bytes at most")
        if vector_nbytes > self.max_vector_bytes:
            raise Refusal(413, f"{self.name} takes a vector of {self.max_vector_bytes} bytes at most")


class Routes(Generic[R]):
    """Routes by name."""

    def __init__(self) -> None:
        self._routes: dict[str, ServedRoute[R]] = {}

    def add(
        self,
        name: str,
        handler: Callable[[Incoming], Awaitable[R]],
        max_meta_bytes: int,
        max_vector_bytes: int,
        roles: RouteRoles = ANYBODY,
    ) -> None:
        """Register a handler.

        Raises:
            ValueError: the name is malformed or taken.
        """
        if check_route(name) in self._routes:
            raise ValueError(f"route {name!r} is served already")
        self._routes[name] = ServedRoute(name, handler, max_meta_bytes, max_vector_bytes, roles)

    def get(self, name: str) -> ServedRoute[R] | None:
        """Return the route called ``name``, if there is one."""
        return self._routes.get(name)

    def find(self, name: str) -> ServedRoute[R]:
        """Return the route called ``name``.

        Raises:
            Refusal: 404, there is none.
        """
        route = self._routes.get(name)
        if route is None:
            raise Refusal(404, f"nothing is served as {name[:80]!r} here")
        return route


CALLERS_FAULTS = (WireError, TensorError, PeerTimeoutError)
"""What a caller's bad bytes or its silence cause."""


def refusal_of(error: WireError | TensorError | PeerTimeoutError) -> Refusal:
    """Return the refusal that a caller gets for its own fault."""
    if isinstance(error, WireError):
        return Refusal(413 if isinstance(error, OverlongError) else 400, str(error))
    return Refusal(422 if isinstance(error, TensorError) else 408, str(error))


async def run_handler(route: ServedRoute[R], incoming: Incoming) -> R:
    """Run the handler of ``route``.

    A bug in it is handed to the event loop's exception handler, and the caller learns no more
    than that there was one.

    Raises:
        Refusal: whatever went wrong, with the status and reason that the caller gets.
    """
    try:
        return await route.handler(incoming)
    except Refusal:
        raise
    except CALLERS_FAULTS as error:
        raise refusal_of(error) from error
    except Exception as error:
        context = {"message": f"the handler of {route.name} failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
        raise Refusal(500, "the handler failed: see this node's log") from error


def report_end(route: str, reply: Reply, written: bool) -> None:
    """Call ``reply.on_end``."""
    if reply.on_end is not None:
        report(f"on_end of {route}", reply.on_end, written)


def report(what: str, callback: Callable[[V], None], value: V) -> bool:
    """Call back with ``value``; a bug in that is handed to the event loop's exception handler.

    Returns:
        Whether it went well.
    """
    try:
        callback(value)
    except Exception as error:  # noqa: BLE001 - reported, not swallowed
        context = {"message": f"{what} failed", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
        return False
    return True


# Rates and counts


class TokenBuckets:
    """A token bucket per key: ``rate_per_s`` on average, ``burst`` at once.

    Args:
        clock: monotonic time.
        rate_per_s: tokens that flow in per second.
        burst: tokens a full bucket holds.
        max_keys: keys remembered; the one unused for longest goes first, and starts full again.
    """

    def __init__(self, clock: Clock, rate_per_s: float, burst: float, max_keys: int = 4096) -> None:
        self._clock = clock
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._max_keys = max_keys
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, key: str) -> bool:
        """Take one token; False when the bucket is empty."""
        now_s = self._clock.monotonic()
        tokens, at_s = self._buckets.pop(key, (self._burst, now_s))
        tokens = min(self._burst, tokens + (now_s - at_s) * self._rate_per_s)
        allowed = tokens >= 1.0
        self._buckets[key] = (tokens - 1.0 if allowed else tokens, now_s)
        if len(self._buckets) > self._max_keys:
            self._buckets.popitem(last=False)
        return allowed


class Admission:
    """Decides whether one more request of a peer may run.

    Asked once a request proved authentic, so that a flood by one peer costs the others nothing; refusals of
    strangers are counted by host, and get no reason when there are many.
    """

    def __init__(self, limits: TransportLimits, clock: Clock) -> None:
        self._limits = limits
        self._requests = TokenBuckets(clock, limits.requests_per_s, limits.requests_burst)
        self._failures = TokenBuckets(clock, limits.failures_per_s, limits.failures_burst)
        self._running: dict[str, int] = {}
        self._total = 0

    def tell_failure(self, host: str) -> bool:
        """Tell whether a refusal to ``host`` is still worth its reason; False asks for a 429."""
        return self._failures.take(host)

    @contextmanager
    def slot(self, peer: str) -> Iterator[None]:
        """Hold one of ``peer``'s handler slots.

        Raises:
            Refusal: 429, the peer sends too many or too fast, or all slots are taken.
        """
        if not self._requests.take(peer):
            raise Refusal(429, f"more than {self._limits.requests_per_s:g} requests per second: slow down")
        running = self._running.get(peer, 0)
        if running >= self._limits.max_requests_per_peer:
            raise Refusal(429, f"{running} of your requests are running already: wait for their answers")
        if self._total >= self._limits.max_requests:
            raise Refusal(429, f"{self._total} requests are running here: try again later")
        self._running[peer] = running + 1
        self._total += 1
        try:
            yield
        finally:
            self._total -= 1
            self._running[peer] -= 1
            if not self._running[peer]:
                del self._running[peer]
