"""Names, the cache of names, and what is never dialled."""

from __future__ import annotations

import socket

import psutil
import pytest

from p2pdrl.clock import ManualClock
from p2pdrl.errors import PeerUnreachableError
from p2pdrl.transport.dial import Dialer, forbidden, is_own
from p2pdrl.transport.protocol import Address


@pytest.mark.parametrize(
    "ip",
    [
        "169.254.169.254",
        "::ffff:169.254.169.254",
        "fd00:ec2::254",
        "100.100.100.200",
        "0.0.0.0",
        "::",
        "224.0.0.1",
        "ff02::1",
        "255.255.255.255",
        "not an ip",
        "",
    ],
)
def test_what_is_never_dialled(ip: str) -> None:
    assert forbidden(ip) is not None


@pytest.mark.parametrize("ip", ["127.0.0.1", "::1", "10.0.0.1", "192.168.1.1", "8.8.8.8", "2001:db8::1"])
def test_what_may_be_dialled(ip: str) -> None:
    assert forbidden(ip) is None


class Names:
    def __init__(self, table: dict[str, list[str]]) -> None:
        self.table = table
        self.asked = 0

    async def __call__(self, host: str, port: int) -> list[str]:
        self.asked += 1
        if host not in self.table:
            raise OSError("unknown name")
        return self.table[host]


@pytest.mark.parametrize(
    ("host", "own"),
    [
        ("127.0.0.1", True),
        ("::1", True),
        ("192.0.2.7", False),
        ("0.0.0.0", False),
        ("::", False),
        ("lab", False),
    ],
)
def test_which_addresses_are_this_machines(host: str, own: bool) -> None:
    assert is_own(host) == own


def test_an_interfaces_address_is_this_machines() -> None:
    addresses = [one for each in psutil.net_if_addrs().values() for one in each]
    assert all(is_own(one.address) for one in addresses if one.family == socket.AF_INET)


async def test_names_are_resolved_and_kept_for_a_while() -> None:
    clock, names = ManualClock(), Names({"peer": ["10.0.0.1", "10.0.0.1", "10.0.0.2"]})
    dialer = Dialer(clock, 10.0, resolve=names)
    expected = [Address("10.0.0.1", 1), Address("10.0.0.2", 1)]
    assert await dialer.addresses(Address("peer", 1)) == expected
    names.table["peer"] = ["10.0.0.3"]
    assert await dialer.addresses(Address("peer", 1)) == expected
    assert names.asked == 1
    clock.advance(11)
    assert await dialer.addresses(Address("peer", 1)) == [Address("10.0.0.3", 1)]


async def test_literals_are_not_looked_up() -> None:
    dialer = Dialer(ManualClock(), 10.0, resolve=Names({}))
    assert await dialer.addresses(Address("::1", 1)) == [Address("::1", 1)]


async def test_unknown_names_and_names_of_forbidden_addresses() -> None:
    dialer = Dialer(ManualClock(), 10.0, resolve=Names({"evil": ["169.254.169.254"], "empty": []}))
    for host, word in (("missing", "resolved"), ("evil", "metadata"), ("empty", "no address")):
        with pytest.raises(PeerUnreachableError, match=word):
            await dialer.addresses(Address(host, 1))


async def test_of_several_addresses_those_that_may_be_dialled() -> None:
    dialer = Dialer(ManualClock(), 10.0, resolve=Names({"mixed": ["169.254.169.254", "10.1.2.3"]}))
    assert await dialer.addresses(Address("mixed", 1)) == [Address("10.1.2.3", 1)]
