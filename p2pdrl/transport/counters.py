"""Traffic counters of one node: what the metrics page shows and strategies report.

Both ends of the transport write here; the node reads. Bytes are those of message bodies
(metadata, vectors and their MACs), without HTTP headers. All grow only.
"""

from __future__ import annotations

from collections import Counter

__all__ = ["OTHER_PEERS", "TrafficCounters"]

OTHER_PEERS = "other"
"""Key that gathers peers beyond the table's bound and callers whose id isn't known."""


class TrafficCounters:
    """Bytes in and out by peer, and refusals by status.

    Args:
        max_peers: peers counted by id; later ones share the key ``other``.

    Attributes:
        bytes_in: total body bytes received.
        bytes_out: total body bytes sent.
        bytes_in_by_peer: the same by node id.
        bytes_out_by_peer: the same by node id.
        refused: requests that we refused, by HTTP status.
        refused_connections: connections closed at once because of the caps.
        dropped_connections: connections cut because they were too slow.
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
