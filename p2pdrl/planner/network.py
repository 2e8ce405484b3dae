"""What takes how long: links, processors, and the bytes of vectors."""

from __future__ import annotations

import heapq
import math
import random
from typing import NamedTuple

from p2pdrl.config.strategy import Compression
from p2pdrl.planner.description import CallCosts, SwarmDescription
from p2pdrl.planner.forecast import Statistics
from p2pdrl.tensors.positions import encoded_nbytes

__all__ = [
    "Network",
    "Passage",
    "Processors",
    "dense_nbytes",
    "on_wire_bytes",
    "payload_nbytes",
    "sparse_nbytes",
]

MSS = 1448.0
PACKET_BYTES = 66.0
"""Headers of one packet."""
RTO_S = 0.2
TAIL = 3
"""Packets at a message's end whose loss only a timeout shows."""


def on_wire_bytes(nbytes: float) -> float:
    """Bytes of a message with the headers of its packets."""
    return nbytes + PACKET_BYTES * math.ceil(nbytes / MSS)


class Passage(NamedTuple):
    """One message's way.

    Args:
        written_s: when its last byte left.
        arrived_s: when its last byte was there.
    """

    written_s: float
    arrived_s: float


class Network:
    """When a message arrives: links with a queue each way, delays, and what TCP makes of loss.

    A message leaves when the sender's link is free, and arrives when the receiver's has taken it in. Loss of
    packets never loses a message: it bounds the rate of a connection (Mathis 1997, "The macroscopic behavior
    of the TCP congestion avoidance algorithm", equation 3: MSS / RTT · 1.22 / √p), and now and then costs a
    retransmission timeout at a message's end, where no later packet tells that one is missing.

    Args:
        swarm: whose links they are.
        capacity: nodes at most.
        statistics: where bytes are counted.
        rng: of jitter and loss.
    """

    def __init__(
        self, swarm: SwarmDescription, capacity: int, statistics: Statistics, rng: random.Random
    ) -> None:
        self._statistics, self._rng = statistics, rng
        self._links = [swarm.link(node) for node in range(capacity)]
        self._out_free_s = [0.0] * capacity
        self._in_free_s = [0.0] * capacity
        self._pairs = {(p.one, p.other): (p.delay_s, p.bytes_s) for p in swarm.pairs}
        self._pairs |= {(p.other, p.one): (p.delay_s, p.bytes_s) for p in swarm.pairs}
        self._plain = not self._pairs and all(link.loss == link.jitter_s == 0 for link in swarm.links)

    def delay_s(self, source: int, target: int) -> float:
        """One way, without jitter."""
        if (source, target) in self._pairs:
            return self._pairs[source, target][0]
        return self._links[source].delay_s + self._links[target].delay_s

    def rates(self, source: int, target: int) -> tuple[float, float]:
        """Bytes per second that leave ``source``, and that ``target`` takes in."""
        one, other = self._links[source], self._links[target]
        out, into = one.out_bytes_s, other.in_bytes_s
        if self._plain:
            return out, into
        most = self._pairs[source, target][1] if (source, target) in self._pairs else math.inf
        loss = 1.0 - (1.0 - one.loss) * (1.0 - other.loss)
        if loss:
            round_trip_s = max(2.0 * self.delay_s(source, target), 1e-4)
            most = min(most, MSS / round_trip_s * 1.22 / math.sqrt(loss))
        return min(out, most), min(into, most)

    def send(self, source: int, target: int, payload: float, extra: float, begin_s: float) -> Passage:
        """Send a message.

        Args:
            source: who sends.
            target: who gets it.
            payload: bytes that count for the strategy.
            extra: bytes of heads and MACs.
            begin_s: when it is ready; now or later.
        """
        total = payload + extra
        packets = math.ceil(total / MSS)
        on_wire = total + PACKET_BYTES * packets
        self._statistics.message(source, target, payload, on_wire)
        if self._plain:  # by far the most messages of a large swarm go here
            one, other = self._links[source], self._links[target]
            out, into, delay_s = one.out_bytes_s, other.in_bytes_s, one.delay_s + other.delay_s
        else:
            out, into = self.rates(source, target)
            delay_s = self.delay_s(source, target)
            delay_s += self._trouble_s(source, target, packets, delay_s)
        free_s = self._out_free_s[source]
        start_s = begin_s if begin_s > free_s else free_s
        self._out_free_s[source] = written_s = start_s + on_wire / out
        here_s, free_s = start_s + delay_s, self._in_free_s[target]
        in_s = (here_s if here_s > free_s else free_s) + on_wire / into
        self._in_free_s[target] = in_s
        last_s = written_s + delay_s
        return Passage(written_s, in_s if in_s > last_s else last_s)

    def _trouble_s(self, source: int, target: int, packets: int, delay_s: float) -> float:
        one, other = self._links[source], self._links[target]
        late_s = self._rng.random() * (one.jitter_s + other.jitter_s)
        loss = 1.0 - (1.0 - one.loss) * (1.0 - other.loss)
        wait_s = max(RTO_S, 4.0 * delay_s)
        while loss and self._rng.random() < 1.0 - (1.0 - loss) ** min(packets, TAIL):
            late_s += wait_s
            wait_s *= 2.0
            packets = 1
        return late_s


class Processors:
    """The daemons' cores: each does one thing at a time, on a core of its own or on cores that all share.

    Args:
        costs: of calls and bytes.
        capacity: nodes at most.
    """

    def __init__(self, costs: CallCosts, capacity: int) -> None:
        self._call_s, self._byte_s = costs.call_s, costs.byte_s
        self._free_s = [0.0] * capacity
        self._cores = [0.0] * costs.cores

    def work(self, node: int, begin_s: float, *, calls: float = 0.0, nbytes: float = 0.0) -> float:
        """Do the work of ``calls`` and ``nbytes`` on a node, from ``begin_s`` on; return when it is done."""
        seconds = calls * self._call_s + nbytes * self._byte_s
        start_s = max(begin_s, self._free_s[node])
        if self._cores:
            start_s = max(start_s, self._cores[0])
            heapq.heapreplace(self._cores, start_s + seconds)
        self._free_s[node] = start_s + seconds
        return start_s + seconds


INT8_ROW = 1024
"""Elements that share one float32 scale, about."""
HEAD_BYTES = 8.0
"""Before the positions of a sparse message."""


def dense_nbytes(size: int, compression: Compression) -> float:
    """What an average or a copy of parameters takes: float32 with ``none``, else bf16."""
    return (4.0 if compression == "none" else 2.0) * size


def sparse_nbytes(size: int, moved: float) -> float:
    """A message of ±τ about ``moved`` of ``size`` entries."""
    count = max(1, round(moved * size))
    return HEAD_BYTES + encoded_nbytes(count, size) + -(-count // 8)


def payload_nbytes(size: int, compression: Compression, *, keep: float, moved: float) -> float:
    """What a gradient or difference takes.

    Args:
        size: elements.
        compression: the strategy's.
        keep: share of the entries that ``topk`` sends.
        moved: share of the entries that ``threshold`` sends.
    """
    if compression == "int8":
        return size + 4.0 * -(-size // INT8_ROW)
    if compression == "topk":
        count = max(1, round(keep * size))
        return HEAD_BYTES + encoded_nbytes(count, size) + 2.0 * count
    if compression == "threshold":
        return sparse_nbytes(size, moved)
    return dense_nbytes(size, compression)
