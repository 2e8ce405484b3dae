"""Directed gossip, for SGP and GALA: to whom a node pushes, the messages, and buffers for what arrives."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Iterable, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from p2pdrl.config.strategy import Content, GalaConfig, Partners, SgpConfig
from p2pdrl.group.compatibility import Natural, Short, Summary
from p2pdrl.strategies.admission import BUSY
from p2pdrl.strategies.gossip.asynchronous import ExchangeTimer
from p2pdrl.strategies.gossip.pair_average import WireName
from p2pdrl.transport.protocol import Incoming, Refusal

__all__ = ["BufferPool", "PushAnswer", "PushCore", "PushHead", "out_peers", "up_the_ring"]

FIRST_REST_S = 0.05
"""A lost push costs nobody else anything, so that its peer hardly rests after the first."""


def out_peers(kind: Partners, me: str, others: Iterable[str]) -> list[str]:
    """Return the ids that ``me`` pushes to, the nearest up the ring first.

    Args:
        kind: ``ring``: the next one; ``exponential``: those 1, 2, 4, … places further (Assran 2019, arXiv
            1811.10792, section 3); ``random``: everybody.
    """
    up = up_the_ring(me, others)
    if kind == "random":
        return up
    if kind == "ring":
        return up[:1]
    return [up[(1 << power) - 1] for power in range(len(up).bit_length())]


def up_the_ring(me: str, others: Iterable[str]) -> list[str]:
    """Return the others in the order in which they follow ``me`` on the ring of ids."""
    ring = sorted({*others, me})
    at = ring.index(me)
    return [*ring[at + 1 :], *ring[:at]]


class PushCore(ExchangeTimer):
    """Timing (see `ExchangeTimer`) and choice of out-peers."""

    def __init__(self, config: SgpConfig | GalaConfig, me: str, rng: random.Random) -> None:
        super().__init__(config, rng, FIRST_REST_S)
        self._partners = config.partners
        self._me = me
        self._turn = 0

    def choose(self, alive: Iterable[str], now_s: float, without: Collection[str] = ()) -> str | None:
        """Return whom to push to next, none of ``without``; None while all others rest."""
        return self.choose_among(self._out_peers(alive, now_s), now_s, without)

    def choose_among(self, peers: Sequence[str], now_s: float, without: Collection[str] = ()) -> str | None:
        """The same for ``peers`` that are out-peers already."""
        fit = [peer for peer in self.fit(peers, now_s) if peer not in without]
        if not fit:
            return None
        if self._partners == "random":
            return self._rng.choice(fit)
        while True:
            peer = peers[self._turn % len(peers)]
            self._turn += 1
            if peer in fit:
                return peer

    def choose_all(self, alive: Iterable[str], now_s: float) -> list[str]:
        """Return all to push to at once: one of ``random`` partners, else each out-peer that is fit."""
        if self._partners == "random":
            one = self.choose(alive, now_s)
            return [] if one is None else [one]
        return self.fit(self._out_peers(alive, now_s), now_s)

    def _out_peers(self, alive: Iterable[str], now_s: float) -> list[str]:
        """Own out-peers; on a ring the next one that doesn't rest."""
        if self._partners == "ring":
            return self.fit(up_the_ring(self._me, alive), now_s)[:1]
        return out_peers(self._partners, self._me, alive)


class PushHead(msgspec.Struct, frozen=True):
    """Goes before a pushed vector."""

    boot: Short
    """Drawn anew by each strategy that starts: numbers begin again with it."""
    number: Natural
    """Grows by one with each push of a boot."""
    wire: WireName
    summary: Summary
    content: Content = "parameters"
    mass: Annotated[float, Meta(ge=0)] = 0.0
    """Weight that goes along; see `sgp`."""
    asks: bool = False
    """No vector follows: the sender gets nothing, and asks to be pushed to; see `gala`."""


class PushAnswer(msgspec.Struct, frozen=True):
    """What became of it, now and for ever."""

    number: Natural
    result: Literal["taken", "void"]
    summary: Summary
    verdict: Short = "mix"
    """A `Verdict`: why it is void, if one side is to adopt the other's state."""
    more: bool = False
    """Nobody else pushes to us: go on; see `gala`."""


class BufferPool:
    """At most ``most`` buffers of ``nbytes`` each, made when they are first needed."""

    def __init__(self, nbytes: int, most: int) -> None:
        self.nbytes = nbytes
        self._free: list[memoryview] = []
        self._unmade = most

    @property
    def any_free(self) -> bool:
        """Whether one can be had."""
        return bool(self._free) or self._unmade > 0

    def take(self) -> memoryview | None:
        """Borrow one; None when all are in use."""
        if self._free:
            return self._free.pop()
        if self._unmade <= 0:
            return None
        self._unmade -= 1
        return memoryview(bytearray(self.nbytes))

    def give(self, buffer: memoryview) -> None:
        """Give one back."""
        self._free.append(buffer)

    async def read(self, incoming: Incoming, deadline_s: float) -> memoryview:
        """Read a peer's vector into a buffer, which begins with it; `give` it back when it is used.

        Args:
            incoming: its vector isn't longer than the buffers.
            deadline_s: the longest that it may take.

        Raises:
            Refusal: other vectors are arriving (423); this one is late (408).
        """
        buffer = self.take()
        if buffer is None:
            raise Refusal(BUSY, "other vectors are arriving")
        try:
            async with asyncio.timeout(deadline_s):
                await incoming.read_vector_into(buffer[: incoming.vector_nbytes])
        except TimeoutError as error:
            self.give(buffer)
            raise Refusal(408, "the vector didn't arrive in time") from error
        except BaseException:
            self.give(buffer)
            raise
        return buffer
