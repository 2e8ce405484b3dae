"""Which of a few peers gets which stage: every order is tried that can still beat the best so far."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from p2pdrl.errors import ConfigError
from p2pdrl.pipeline.layers import FREE, Layer, Links, Peer, PeerLink
from p2pdrl.pipeline.partition import PLAIN, Demands, Matrix, Partition, StageTables, partition

__all__ = ["MOST_PEERS", "in_order", "partition_in_best_order"]

MOST_PEERS = 8
"""With eight there are 40,320 orders."""


def partition_in_best_order(
    layers: Sequence[Layer],
    peers: Sequence[Peer],
    *,
    links: Links = FREE,
    demands: Demands = PLAIN,
    first: int | None = None,
) -> tuple[tuple[int, ...], Partition]:
    """Choose the order of the peers and the cut, with the quickest slowest stage that any order has.

    Args:
        layers: the chain, at least as many as peers.
        peers: at most `MOST_PEERS`.
        links: between peers, by their places in ``peers``; each direction of each pair.
        demands: on memory; ``stored`` is by place in the pipeline.
        first: index of the peer that is to have the first stage; None has it chosen.

    Returns:
        The peers' indices in the order of their stages (the first found of equally good ones), and the cut.

    Raises:
        ConfigError: as `partition`, or there are too many peers.
    """
    if len(peers) > MOST_PEERS:
        raise ConfigError(
            f"the order of {len(peers)} peers must be given: all orders are tried up to {MOST_PEERS}"
        )
    search = _Search(StageTables(layers, peers, links, demands), alike=isinstance(links, PeerLink))
    order = search.best_order(first)
    if order is None:  # nothing fits in any order: `partition` says why
        order = tuple(sorted(range(len(peers)), key=lambda index: index != first))
    found = partition(layers, [peers[one] for one in order], links=in_order(links, order), demands=demands)
    return order, found


def in_order(links: Links, order: Sequence[int]) -> Links:
    """Links by place in an order, from links by index of peer."""
    if not isinstance(links, Mapping):
        return links
    place = {peer: at for at, peer in enumerate(order)}
    return {(place[a], place[b]): link for (a, b), link in links.items() if a in place and b in place}


class _Search:
    """Depth-first through the orders, the same dynamic programming as `partition` on the way down.

    Args:
        tables: of the stages.
        alike: whether peers of the same speed and memory may be exchanged, because all links are the same.
    """

    def __init__(self, tables: StageTables, *, alike: bool) -> None:
        self._tables, self._alike = tables, alike
        self._best_s = math.inf
        self._order: tuple[int, ...] | None = None

    def best_order(self, first: int | None) -> tuple[int, ...] | None:
        """The order with the quickest slowest stage, maybe of those that begin alike; None when none fits."""
        start = np.full(len(self._tables.layers) + 1, np.inf)
        start[0] = -np.inf
        for head in self._choices(()) if first is None else (first,):
            self._extend((head,), start)
        return self._order

    def _extend(self, order: tuple[int, ...], slowest_s: Matrix) -> None:
        """Go on behind ``order``, whose last peer's stage isn't in ``slowest_s`` (by layers so far) yet."""
        place = len(order) - 1
        if len(order) == len(self._tables.peers):
            total_s = float(_step(slowest_s, self._tables.seconds(place, order[-1], None))[-1])
            if total_s < self._best_s:
                self._best_s, self._order = total_s, order
            return
        for following in self._choices(order):
            after_s = _step(slowest_s, self._tables.seconds(place, order[-1], following))
            if after_s.min() < self._best_s:
                self._extend((*order, following), after_s)

    def _choices(self, order: tuple[int, ...]) -> Iterator[int]:
        seen = set()
        for index, peer in enumerate(self._tables.peers):
            kind = (peer.speed, peer.memory_bytes)
            if index in order or (self._alike and kind in seen):
                continue
            seen.add(kind)
            yield index


def _step(slowest_s: Matrix, seconds: Matrix) -> Matrix:
    through: Matrix = np.maximum(slowest_s[:, None], seconds).min(axis=0)
    return through
