"""Which connections there is room for, without sockets."""

from __future__ import annotations

import asyncio

import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.transport.http.listener import Watchdog
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import OTHER_PEERS, TrafficCounters

LIMITS = TransportLimits(max_connections=4, max_connections_per_host=2, watchdog_tick_s=0.01)


class Known:
    """A connection of which everything is known."""

    def __init__(self, proven: bool = False) -> None:
        self.proven = proven
        self.slow = False
        self.aborted = 0
        self.looked_at_s: list[float] = []
        self.twice = asyncio.Event()

    def too_slow(self, now_s: float) -> bool:
        self.looked_at_s.append(now_s)
        if len(self.looked_at_s) == 2:
            self.twice.set()
        return self.slow

    def abort(self) -> None:
        self.aborted += 1
        self.slow = False


@pytest.fixture
def watchdog() -> Watchdog:
    return Watchdog(LIMITS, ManualClock(), TrafficCounters())


def admitted(watchdog: Watchdog, host: str, count: int = 1, proven: bool = True) -> list[Known]:
    connections = [Known(proven) for _ in range(count)]
    for connection in connections:
        assert watchdog.admit(connection, host)
    return connections


def test_connections_are_capped_by_host_and_in_all(watchdog: Watchdog) -> None:
    held = admitted(watchdog, "10.0.0.1", 2)
    assert not watchdog.admit(Known(), "10.0.0.1")
    held += admitted(watchdog, "10.0.0.2") + admitted(watchdog, "10.0.0.3")
    assert not watchdog.admit(Known(), "10.0.0.4")
    assert watchdog.counters.refused_connections == 2
    assert len(watchdog) == 4
    for connection in held:
        watchdog.forget(connection)
        watchdog.forget(connection)
    assert len(watchdog) == 0
    admitted(watchdog, "10.0.0.1", 2)
    assert not any(connection.aborted for connection in held)


def test_loopback_is_only_capped_in_all(watchdog: Watchdog) -> None:
    admitted(watchdog, "127.0.0.1", 4)
    assert not watchdog.admit(Known(), "127.0.0.1")
    assert not watchdog.admit(Known(), "::1")


def test_a_host_that_has_too_many_displaces_its_own_strangers_alone(watchdog: Watchdog) -> None:
    (other,) = admitted(watchdog, "10.0.0.2", 1, proven=False)
    first, second = admitted(watchdog, "10.0.0.1", 2, proven=False)
    assert watchdog.admit(Known(proven=True), "10.0.0.1")
    assert [first.aborted, second.aborted, other.aborted] == [1, 0, 0]
    second.proven = True
    assert not watchdog.admit(Known(), "10.0.0.1")
    assert watchdog.counters.displaced_connections == 1


def test_ipv6_addresses_of_one_network_are_counted_together(watchdog: Watchdog) -> None:
    for host in ("2001:db8::1", "2001:db8::2"):
        assert watchdog.admit(Known(proven=True), host)
    assert not watchdog.admit(Known(), "2001:db8:0:0:ffff::3")
    assert watchdog.admit(Known(), "2001:db8:0:1::1")


def test_strangers_give_way_where_most_of_them_come_from() -> None:
    watchdog = Watchdog(TransportLimits(max_connections=256), ManualClock(), TrafficCounters())
    (lonely,) = admitted(watchdog, "10.0.0.1", 1, proven=False)
    crowd = admitted(watchdog, "10.0.0.2", 63, proven=False)
    assert watchdog.admit(Known(), "10.0.0.3"), "no more than 64 strangers at a time"
    assert (lonely.aborted, crowd[0].aborted, crowd[1].aborted) == (0, 1, 0)


def test_a_member_has_so_many_connections_only(watchdog: Watchdog) -> None:
    class Member(Known):
        node_id = "a" * 32

    arriving = [Known() for _ in range(3)]
    for number, known in enumerate(arriving):
        assert watchdog.admit(known, f"10.0.0.{number}")
    assert [watchdog.replace(known, Member(proven=True)) for known in arriving] == [True, True, False]


def test_who_has_proven_nothing_gives_way_oldest_first(watchdog: Watchdog) -> None:
    first, second, third, fourth = held = admitted(watchdog, "127.0.0.1", 4, proven=False)
    first.proven = True
    fifth, sixth = (admitted(watchdog, "10.0.0.1", 1, proven=False)[0] for _ in range(2))
    assert [connection.aborted for connection in held] == [0, 1, 1, 0]
    assert len(watchdog) == 4
    fourth.proven = fifth.proven = sixth.proven = True
    assert not watchdog.admit(Known(), "10.0.0.2")
    assert not watchdog.displace()
    assert watchdog.counters.displaced_connections == 2
    assert watchdog.counters.refused_connections == 1
    for connection in (second, third):
        watchdog.forget(connection)  # they end by and by
    assert len(watchdog) == 4


def test_a_connection_goes_on_as_another_object(watchdog: Watchdog) -> None:
    arrived, stream = Known(), Known(proven=True)
    assert watchdog.admit(arrived, "10.0.0.1")
    assert watchdog.replace(arrived, stream)
    assert len(watchdog) == 1
    watchdog.forget(arrived)
    assert len(watchdog) == 1
    admitted(watchdog, "10.0.0.1")
    assert not watchdog.admit(Known(), "10.0.0.1"), "it counts as its host's"
    watchdog.forget(stream)
    admitted(watchdog, "10.0.0.1")


def test_a_connection_that_was_cut_meanwhile_does_not_go_on(watchdog: Watchdog) -> None:
    arrived, stream = Known(), Known(proven=True)
    assert watchdog.admit(arrived, "10.0.0.1")
    assert watchdog.displace()
    assert arrived.aborted
    assert not watchdog.replace(arrived, stream)
    assert len(watchdog) == 0


def test_all_can_be_cut(watchdog: Watchdog) -> None:
    held = admitted(watchdog, "10.0.0.1") + admitted(watchdog, "10.0.0.2", proven=False)
    watchdog.cut()
    assert [connection.aborted for connection in held] == [1, 1]
    assert len(watchdog) == 0
    admitted(watchdog, "10.0.0.1", 2)


async def test_all_are_looked_at_and_slow_ones_cut(watchdog: Watchdog) -> None:
    slow, good = admitted(watchdog, "10.0.0.1", 2)
    slow.slow = True
    watchdog.start()
    await asyncio.wait_for(good.twice.wait(), 5)
    watchdog.stop()
    assert good.looked_at_s[0] == watchdog.clock.monotonic()
    assert (slow.aborted, good.aborted) == (1, 0)
    assert watchdog.counters.dropped_connections == 1


def test_peers_beyond_the_bound_are_counted_together() -> None:
    counters = TrafficCounters(max_peers=2)
    for peer in ("a", "b", "c", None, "a"):
        counters.received(peer, 10)
        counters.sent(peer, 1)
    assert counters.bytes_in == 50
    assert counters.bytes_in_by_peer == {"a": 20, "b": 10, OTHER_PEERS: 20}
    assert counters.bytes_out_by_peer == {"a": 2, "b": 1, OTHER_PEERS: 2}
