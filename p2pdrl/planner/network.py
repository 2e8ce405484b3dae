"""When a message arrives: links with a queue each way, delays, and what TCP makes of loss.

A message leaves when the sender's link is free, and arrives when the receiver's has taken it in. Loss of
packets never loses a message: it bounds the rate of a connection (Mathis 1997, "The macroscopic behavior of
the TCP congestion avoidance algorithm", equation 3: MSS / RTT · 1.22 / √p), and now and then costs a
retransmission timeout at a message's end, where no later packet tells that one is missing.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

from p2pdrl.planner.description import SwarmDescription
from p2pdrl.planner.statistics import Statistics

__all__ = ["Network", "Passage", "on_wire_bytes"]

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
    """All links.

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
