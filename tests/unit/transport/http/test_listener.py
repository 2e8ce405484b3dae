"""Binding the port."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import UsageError
from p2pdrl.transport.dial import is_loopback
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, TrafficCounters


@pytest.fixture
async def listener() -> AsyncIterator[Listener]:
    made = Listener(TransportLimits(), SystemClock(), TrafficCounters())
    yield made
    await made.close()
    await made.close()


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield other.getsockname()[1]


async def test_a_free_port_is_told(listener: Listener) -> None:
    address = await listener.listen(web.Application(), "localhost", 0)
    assert address.host == "localhost"
    with socket.create_connection(("127.0.0.1", address.port), 1):
        pass


async def test_a_taken_port_that_was_asked_for(listener: Listener, taken: int) -> None:
    with pytest.raises(UsageError, match=f"port {taken} of 127.0.0.1 is taken"):
        await listener.listen(web.Application(), "127.0.0.1", taken)


async def test_a_taken_port_that_nobody_asked_for(listener: Listener, taken: int) -> None:
    address = await listener.listen(web.Application(), "127.0.0.1", taken, port_is_default=True)
    assert taken < address.port < taken + 100


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
async def test_beyond_loopback_a_key_is_needed(listener: Listener, host: str) -> None:
    with pytest.raises(UsageError, match="--insecure"):
        await listener.listen(web.Application(), host, 0)


@pytest.mark.parametrize("allow", [{"has_key": True}, {"insecure": True}])
async def test_beyond_loopback_with_a_key_or_on_demand(listener: Listener, allow: dict[str, bool]) -> None:
    address = await listener.listen(web.Application(), "0.0.0.0", 0, **allow)
    assert address == Address("0.0.0.0", address.port)


@pytest.mark.parametrize("host", ["192.0.2.1", "name.invalid"])
async def test_hosts_that_are_not_ours(listener: Listener, host: str) -> None:
    with pytest.raises(UsageError, match="can't listen"):
        await listener.listen(web.Application(), host, 0, has_key=True)


def test_loopback() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1")))
    assert not any(map(is_loopback, ("10.0.0.1", "localhost", "", "::", "0.0.0.0")))
