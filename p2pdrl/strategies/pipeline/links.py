"""What the links from this node to others were measured to be, remembered for a while."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable

from p2pdrl.errors import TransportError
from p2pdrl.pipeline.layers import FREE, Link
from p2pdrl.strategies.pipeline.calls import Peers
from p2pdrl.strategies.pipeline.port import PIPE_ROUTE
from p2pdrl.strategies.pipeline.probe import LinkPair, measure_link
from p2pdrl.strategies.protocol import Context

__all__ = ["LinkBook"]

GOOD_FOR_S = 600.0
"""A link is measured again after so long, when a pipeline is formed."""
MOST_S = 0.5
"""For the long messages of one measurement."""
DEADLINE_S = 2.0
"""For the short ones."""
TRIES = 2
ALL_S = 4.0
"""For all links of one pipeline: forming it can't wait for more."""


class LinkBook:
    """Links from here.

    Args:
        context: what the node gives.
        measure: measures one link.
    """

    def __init__(self, context: Context, measure: Callable[..., Awaitable[LinkPair]] = measure_link) -> None:
        self._measure = measure
        self._transport, self._clock = context.transport, context.clock
        self._known: dict[str, tuple[LinkPair, float]] = {}

    async def between(self, peers: Peers, ranks: tuple[str, ...]) -> dict[tuple[int, int], Link]:
        """Return the links from the first rank to the others and back, measured one after another.

        One that can't be measured, or for which no time is left, is as it was known before, else taken for
        free: whoever is gone is found out otherwise.

        Args:
            peers: where they are.
            ranks: node ids, ours first.
        """
        links: dict[tuple[int, int], Link] = {}
        until_s = self._clock.monotonic() + ALL_S
        for index, peer in enumerate(ranks[1:], start=1):
            pair = await self._link(peers, peer, until_s)
            links[0, index], links[index, 0] = pair
        return links

    async def _link(self, peers: Peers, peer: str, until_s: float) -> LinkPair:
        known, since_s = self._known.get(peer, (LinkPair(FREE, FREE), -math.inf))
        if self._clock.monotonic() < since_s + GOOD_FOR_S:
            return known
        for _ in range(TRIES):
            left_s = until_s - self._clock.monotonic()
            if left_s <= 0:
                break
            try:
                async with asyncio.timeout(left_s):
                    pair = await self._measured(peers, peer)
            except (TransportError, TimeoutError):
                continue
            self._known[peer] = pair, self._clock.monotonic()
            return pair
        return known

    async def _measured(self, peers: Peers, peer: str) -> LinkPair:
        return await self._measure(
            self._transport,
            peers.address(peer),
            peer,
            PIPE_ROUTE,
            clock=self._clock.monotonic,
            deadline_s=DEADLINE_S,
            most_s=MOST_S,
        )
