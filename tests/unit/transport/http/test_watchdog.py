"""Connection caps, without sockets."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.transport.http.listener import Watchdog, Watched
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import OTHER_PEERS, TrafficCounters


class FakeTransport(asyncio.Transport):
    """Notes what is written and whether it was closed."""

    def __init__(self, host: str) -> None:
        super().__init__({"peername": (host, 1234)})
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True


@pytest.fixture
def watchdog() -> Watchdog:
    limits = TransportLimits(max_connections=4, max_connections_per_host=2)
    return Watchdog(limits, ManualClock(), TrafficCounters())


def connect(watchdog: Watchdog, host: str) -> tuple[asyncio.Protocol, FakeTransport]:
    protocol, transport = watchdog.factory(asyncio.Protocol)(), FakeTransport(host)
    protocol.connection_made(transport)
    return protocol, transport


def test_connections_are_capped_by_host_and_in_all(watchdog: Watchdog) -> None:
    held = [connect(watchdog, "10.0.0.1")[0] for _ in range(2)]
    _, third = connect(watchdog, "10.0.0.1")
    assert third.closed
    assert third.written.startswith(b"HTTP/1.1 429 ")
    held += [connect(watchdog, host)[0] for host in ("10.0.0.2", "10.0.0.3")]
    assert connect(watchdog, "10.0.0.4")[1].closed
    assert watchdog.counters.refused_connections == 2
    for protocol in held:
        protocol.connection_lost(None)
    assert len(watchdog) == 0
    assert not connect(watchdog, "10.0.0.1")[1].closed


def test_loopback_is_only_capped_in_all(watchdog: Watchdog) -> None:
    closed = [connect(watchdog, "127.0.0.1")[1].closed for _ in range(5)]
    assert closed == [False] * 4 + [True]


def test_a_refused_connection_is_deaf(watchdog: Watchdog) -> None:
    for _ in range(4):
        connect(watchdog, "::1")
    protocol, transport = connect(watchdog, "::1")
    protocol.data_received(b"GET / HTTP/1.1\r\n\r\n")
    protocol.pause_writing()
    protocol.resume_writing()
    assert protocol.eof_received() is None
    protocol.connection_lost(None)
    assert transport.written.count(b"HTTP/1.1") == 1
    assert len(watchdog) == 4


def test_an_upgraded_connection_counts_and_is_watched_by_its_new_owner(watchdog: Watchdog) -> None:
    class Borrower:
        slow, aborted = False, False

        def tick(self, now_s: float) -> bool:
            return self.slow

        def abort(self) -> None:
            self.aborted = True

    connection, borrower = connect(watchdog, "10.0.0.1")[0], Borrower()
    assert isinstance(connection, Watched)
    connection.hand_over(borrower)
    assert len(watchdog) == 1
    assert not connection.too_slow(1e6)
    borrower.slow = True
    assert connection.too_slow(0.0)
    connection.abort()
    assert borrower.aborted
    connection.connection_lost(None)
    assert len(watchdog) == 0


def test_peers_beyond_the_bound_are_counted_together() -> None:
    counters = TrafficCounters(max_peers=2)
    for peer in ("a", "b", "c", None, "a"):
        counters.received(peer, 10)
        counters.sent(peer, 1)
    assert counters.bytes_in == 50
    assert counters.bytes_in_by_peer == {"a": 20, "b": 10, OTHER_PEERS: 20}
    assert counters.bytes_out_by_peer == {"a": 2, "b": 1, OTHER_PEERS: 2}
