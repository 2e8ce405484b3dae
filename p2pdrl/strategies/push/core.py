"""When to push, and to whom: directed gossip. Pure.

Out-peers (SGP, arXiv 1811.10792, section 3): anyone; the next in id order; or those at distances
1, 2, 4, … up the ring of ids, in turn, which mixes as fast as the complete graph for powers of two. While the
next in id order rests, because it refused or didn't answer, its place is taken by the one after it: on a ring
nobody else would have what we push.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Sequence

from p2pdrl.config.strategy import Partners
from p2pdrl.strategies.occasions import Occasions, Timetable

__all__ = ["PushCore", "out_peers", "up_the_ring"]

COOL_FIRST_S = 0.05
"""A lost push costs nobody else anything, so that its peer hardly rests after the first."""


def out_peers(kind: Partners, me: str, others: Iterable[str]) -> list[str]:
    """Return the ids that ``me`` pushes to, the nearest up the ring first.

    Args:
        kind: see the module; ``random`` gives everybody.
        me: own id.
        others: ids of the living members; own id is ignored.
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


class PushCore(Occasions):
    """Timing (see `Occasions`) and choice of out-peers.

    Args:
        config: the strategy's options.
        me: own node id.
        rng: source of the random choices.
    """

    def __init__(self, config: Timetable, me: str, rng: random.Random) -> None:
        super().__init__(config, rng, COOL_FIRST_S)
        self._partners = config.partners
        self._me = me
        self._turn = 0

    def choose(self, alive: Iterable[str], now_s: float, without: Collection[str] = ()) -> str | None:
        """Return whom to push to next, or None while nobody is fit.

        Args:
            alive: the living members.
            now_s: monotonic time.
            without: peers that aren't to be chosen now.
        """
        return self.choose_among(self._out_peers(alive, now_s), now_s, without)

    def choose_among(self, peers: Sequence[str], now_s: float, without: Collection[str] = ()) -> str | None:
        """The same for peers that are out-peers already."""
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
        """Those that we push to; on a ring the next one that doesn't rest."""
        if self._partners == "ring":
            return self.fit(up_the_ring(self._me, alive), now_s)[:1]
        return out_peers(self._partners, self._me, alive)
