"""How fast peers are reached: round trips for latency, long messages for bandwidth; known for a while.

Messages grow while the next one is expected to end in time, so that a fast link is measured with megabytes
and a slow one isn't kept busy. What is measured is what strategies get: the swarm's own connections, with
their checks, and whatever else uses the link at that time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from p2pdrl.errors import PeerTimeoutError, TransportError, WireError
from p2pdrl.pipeline.layers import FREE, PeerLink
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.pipeline.messages import MAX_PROBE_BYTES, Probe
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.transport.codec import decode
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, Transport

__all__ = ["LinkPair", "LinkTable", "ProbeServer", "measure_link"]

FIRST_BYTES = 256 << 10
GROWTH = 4
ROUND_TRIPS = 5
FASTEST = 10.0
"""A message takes at least this part of its whole time, however much of that was the round trip before."""


class LinkPair(NamedTuple):
    """Both directions between this node and a peer: there, and back."""

    there: PeerLink
    back: PeerLink


class ProbeServer:
    """Answers probes, a few at once; contents are zeros, and what comes is thrown away.

    Args:
        at_once: how many may use memory, `MAX_PROBE_BYTES` each.
    """

    def __init__(self, at_once: int = 4) -> None:
        self._free = at_once

    async def serve_probe(self, incoming: Incoming) -> Reply:
        """Take the vector of a call whose metadata are a `Probe`, and answer.

        Raises:
            WireError: the metadata are none (400).
            Refusal: the vector is too long (413), or too many others probe (423).
        """
        probe: Probe = decode(incoming.meta, Probe, "probe")
        if incoming.vector_nbytes > MAX_PROBE_BYTES:
            raise Refusal(413, f"probes have {MAX_PROBE_BYTES} bytes at most")
        if not incoming.vector_nbytes and not probe.answer_bytes:
            return Reply(b"")
        if not self._free:
            raise Refusal(BUSY, "too many others measure their links")
        self._free -= 1
        try:
            if incoming.vector_nbytes:
                await incoming.read_vector_into(memoryview(bytearray(incoming.vector_nbytes)))
            if not probe.answer_bytes:
                self._free += 1
                return Reply(b"")
            return Reply(b"", memoryview(bytes(probe.answer_bytes)), self._sent)
        except BaseException:
            self._free += 1
            raise

    def _sent(self, _: bool) -> None:
        self._free += 1


async def measure_link(
    transport: Transport,
    to: Address,
    peer_id: str,
    route: str,
    *,
    clock: Callable[[], float],
    deadline_s: float = 5.0,
    most_s: float = 1.0,
) -> LinkPair:
    """Measure both directions to a peer that serves probes on a route.

    Args:
        to: where the peer listens.
        peer_id: who must answer there.
        route: where its `ProbeServer` is reached.
        clock: seconds, monotonic.
        deadline_s: bound on connecting and all round trips of short messages.
        most_s: bound on the long messages, both ways together, without their latencies. Where not even the
            first arrives in that time, the bandwidth is given as though it had just arrived.

    Raises:
        TransportError: the peer can't be reached, refuses, or answers what it wasn't asked for.
    """
    line = _Line(transport, to, peer_id, route, clock)
    round_trip_s = await line.round_trip(deadline_s)
    there = await line.bandwidth(round_trip_s, most_s / 2, up=True)
    back = await line.bandwidth(round_trip_s, most_s / 2, up=False)
    return LinkPair(PeerLink(round_trip_s / 2, there), PeerLink(round_trip_s / 2, back))


class _Line:
    """Timed calls of one peer."""

    def __init__(
        self, transport: Transport, to: Address, peer_id: str, route: str, clock: Callable[[], float]
    ) -> None:
        self._transport, self._to, self._peer_id, self._route = transport, to, peer_id, route
        self._clock = clock

    async def round_trip(self, deadline_s: float) -> float:
        """The shortest of a few; the first of all also connects, and doesn't count."""
        end_s = self._clock() + deadline_s
        await self._send(0, 0, deadline_s)
        shortest_s = math.inf
        for _ in range(ROUND_TRIPS):
            left_s = end_s - self._clock()
            if left_s <= shortest_s < math.inf:
                break
            shortest_s = min(shortest_s, await self._send(0, 0, max(left_s, deadline_s / ROUND_TRIPS)))
        return shortest_s

    async def bandwidth(self, round_trip_s: float, most_s: float, *, up: bool) -> float:
        """Bytes a second, by the longest message for which there was time."""
        size, left_s, measured = FIRST_BYTES, most_s, 0.0
        while True:
            deadline_s = left_s + 2 * round_trip_s
            try:
                took_s = await self._send(size if up else 0, 0 if up else size, deadline_s)
            except PeerTimeoutError:
                return measured or size / left_s
            alone_s = max(took_s - round_trip_s, took_s / FASTEST)
            measured, left_s = size / alone_s, left_s - alone_s
            size *= GROWTH
            if size > MAX_PROBE_BYTES or size / measured > left_s:
                return measured

    async def _send(self, up_bytes: int, down_bytes: int, deadline_s: float) -> float:
        """Send and get so many bytes; return how long it took."""
        vector = memoryview(bytes(up_bytes)) if up_bytes else None
        room = memoryview(bytearray(down_bytes))
        meta = msgspec.msgpack.encode(Probe(down_bytes))
        begin_s = self._clock()
        answer = await self._transport.call(
            self._to,
            self._peer_id,
            self._route,
            meta,
            vector=vector,
            into=(lambda _, nbytes: room if nbytes == down_bytes else None) if down_bytes else None,
            deadline_s=deadline_s,
            lane="bulk",
        )
        took_s = self._clock() - begin_s
        if answer.vector_nbytes != down_bytes:
            raise WireError(f"a probe for {down_bytes} bytes was answered with {answer.vector_nbytes}")
        return max(took_s, 1e-9)


GOOD_FOR_S = 600.0
"""A link is measured again after so long, when a pipeline is formed."""
MOST_S = 0.5
"""For the long messages of one measurement."""
DEADLINE_S = 2.0
"""For the short ones."""
TRIES = 2
ALL_S = 4.0
"""For all links of one pipeline: forming it can't wait for more."""


class LinkTable:
    """What is known of the links from this node."""

    def __init__(
        self, context: StrategyContext, measure: Callable[..., Awaitable[LinkPair]] = measure_link
    ) -> None:
        self._measure = measure
        self._transport, self._clock = context.transport, context.clock
        self._known: dict[str, tuple[LinkPair, float]] = {}

    async def between(
        self, address: Callable[[str], Address], ranks: tuple[str, ...]
    ) -> dict[tuple[int, int], PeerLink]:
        """Return the links from the first rank to the others and back, measured one after another.

        One that can't be measured, or for which no time is left, is as it was known before, else taken for
        free: whoever is gone is found out otherwise.

        Args:
            address: where a member listens; raises `PeerUnreachableError`.
            ranks: node ids, ours first.
        """
        links: dict[tuple[int, int], PeerLink] = {}
        until_s = self._clock.monotonic() + ALL_S
        for index, peer in enumerate(ranks[1:], start=1):
            pair = await self._link(address, peer, until_s)
            links[0, index], links[index, 0] = pair
        return links

    async def _link(self, address: Callable[[str], Address], peer: str, until_s: float) -> LinkPair:
        known, since_s = self._known.get(peer, (LinkPair(FREE, FREE), -math.inf))
        if self._clock.monotonic() < since_s + GOOD_FOR_S:
            return known
        for _ in range(TRIES):
            left_s = until_s - self._clock.monotonic()
            if left_s <= 0:
                break
            try:
                async with asyncio.timeout(left_s):
                    pair = await self._measure(
                        self._transport,
                        address(peer),
                        peer,
                        PIPE_ROUTE,
                        clock=self._clock.monotonic,
                        deadline_s=DEADLINE_S,
                        most_s=MOST_S,
                    )
            except (TransportError, TimeoutError):
                continue
            self._known[peer] = pair, self._clock.monotonic()
            return pair
        return known
