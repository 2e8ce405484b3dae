"""A TCP proxy that breaks things: over real sockets on loopback."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.protocol import Address

WAIT_S = 10.0
KEY, CALLER = b"the swarm's key", "a" * 32


class Echo:
    """Sends back what it gets; counts it."""

    def __init__(self) -> None:
        self.received = bytearray()
        self.reading = asyncio.Event()
        self.reading.set()

    async def serve(self, reader, writer):
        try:
            while data := await reader.read(4096):
                await self.reading.wait()
                self.received += data
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()


@asynccontextmanager
async def behind_proxy():
    echo = Echo()
    server = await asyncio.start_server(echo.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    try:
        async with FaultProxy(Address("127.0.0.1", port)) as proxy:
            yield proxy, echo
    finally:
        echo.reading.set()
        server.close()
        await server.wait_closed()
        await asyncio.sleep(0)


@asynccontextmanager
async def connected(proxy):
    async with asyncio.timeout(WAIT_S):
        reader, writer = await asyncio.open_connection(proxy.address.host, proxy.address.port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()  # closing would wait until what is written was taken
        await asyncio.gather(writer.wait_closed(), return_exceptions=True)


async def exchange(reader, writer, data: bytes) -> bytes:
    writer.write(data)
    async with asyncio.timeout(WAIT_S):
        return await reader.readexactly(len(data))


async def silent(reader, seconds=0.1) -> bool:
    """Nothing comes, not even an end."""
    try:
        async with asyncio.timeout(seconds):
            await reader.read(1)
    except TimeoutError:
        return True
    return False


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - counters have no event
            await asyncio.sleep(0.001)


async def megabytes_taken(writer) -> int:
    """How many are taken before the sender is held back; at most 64 are tried."""
    for count in range(64):
        writer.write(bytes(1 << 20))
        try:
            async with asyncio.timeout(0.3):
                await writer.drain()
        except TimeoutError:
            return count
    return 64


async def test_bytes_pass_unchanged_and_are_counted():
    async with behind_proxy() as (proxy, _):
        async with connected(proxy) as (reader, writer):
            data = bytes(range(256)) * 1000
            sending = asyncio.create_task(exchange(reader, writer, data))
            assert await sending == data
            assert (proxy.up.nbytes, proxy.down.nbytes) == (len(data), len(data))
            assert (proxy.accepted, proxy.connections) == (1, 1)
        await until(lambda: proxy.connections == 0)


async def test_an_end_passes_in_one_direction_alone():
    async with behind_proxy() as (proxy, echo), connected(proxy) as (reader, writer):
        writer.write(b"last words")
        writer.write_eof()
        async with asyncio.timeout(WAIT_S):
            assert await reader.read() == b"last words"
        assert echo.received == b"last words"


async def test_both_ways_take_at_least_the_delay():
    async with behind_proxy() as (proxy, _), connected(proxy) as (reader, writer):
        proxy.up.delay_s, proxy.down.delay_s, proxy.down.jitter_s = 0.05, 0.1, 0.05
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        assert await exchange(reader, writer, b"ping") == b"ping"
        assert loop.time() - began_s >= 0.149


async def test_jitter_keeps_the_order():
    async with behind_proxy() as (proxy, _), connected(proxy) as (reader, writer):
        proxy.up.jitter_s = proxy.down.jitter_s = 0.02
        data = bytes(range(100))
        for byte in data:
            writer.write(bytes([byte]))
            await asyncio.sleep(0)
        async with asyncio.timeout(WAIT_S):
            assert await reader.readexactly(len(data)) == data


async def test_a_bounded_flow_takes_at_least_its_time():
    async with behind_proxy() as (proxy, _), connected(proxy) as (reader, writer):
        proxy.up.bytes_per_s = 100_000
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await exchange(reader, writer, bytes(20_000))
        assert loop.time() - began_s >= 0.199


async def test_the_bound_is_that_of_all_connections_together():
    async with behind_proxy() as (proxy, _), connected(proxy) as one, connected(proxy) as other:
        proxy.up.bytes_per_s = 100_000
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        await asyncio.gather(exchange(*one, bytes(10_000)), exchange(*other, bytes(10_000)))
        assert loop.time() - began_s >= 0.199


async def test_reset_breaks_what_is_open_and_lets_new_ones_pass():
    async with behind_proxy() as (proxy, _):
        async with connected(proxy) as (reader, writer):
            await exchange(reader, writer, b"x")
            proxy.reset()
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        async with connected(proxy) as (reader, writer):
            assert await exchange(reader, writer, b"y") == b"y"


async def test_cut_refuses_until_it_is_healed_at_the_same_port():
    async with behind_proxy() as (proxy, _):
        address = proxy.address
        async with connected(proxy) as (reader, writer):
            await exchange(reader, writer, b"x")
            proxy.cut()
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
            for _ in range(2):
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.open_connection(address.host, address.port)
        proxy.heal()
        assert proxy.address == address
        async with connected(proxy) as (reader, writer):
            assert await exchange(reader, writer, b"y") == b"y"


async def test_refuse_leaves_what_is_open():
    async with behind_proxy() as (proxy, _), connected(proxy) as (reader, writer):
        await exchange(reader, writer, b"x")
        proxy.refuse()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(proxy.address.host, proxy.address.port)
        assert await exchange(reader, writer, b"y") == b"y"


async def test_hang_accepts_and_answers_nobody_and_loses_nothing():
    async with behind_proxy() as (proxy, echo), connected(proxy) as (reader, writer):
        await exchange(reader, writer, b"x")
        proxy.hang()
        writer.write(b"before")
        async with connected(proxy) as (new_reader, new_writer):
            new_writer.write(b"hello")
            assert await silent(reader)
            assert await silent(new_reader)
            assert echo.received == b"x"
            proxy.heal()
            async with asyncio.timeout(WAIT_S):
                assert await reader.readexactly(6) == b"before"
                assert await new_reader.readexactly(5) == b"hello"


async def test_one_direction_may_vanish_and_healing_resets_what_has_holes():
    async with behind_proxy() as (proxy, echo):
        async with connected(proxy) as (reader, writer):
            await exchange(reader, writer, b"x")
            proxy.down.lost = True
            writer.write(b"lost")
            await until(lambda: proxy.down.lost_nbytes == 4)
            assert echo.received == b"xlost"
            assert await silent(reader)
            proxy.heal()
            with pytest.raises(ConnectionResetError):
                await reader.read(1)
        async with connected(proxy) as (reader, writer):
            assert await exchange(reader, writer, b"y") == b"y"


async def test_a_stalled_direction_holds_back_the_sender():
    """What nobody takes piles up no further than the proxy's bound and the kernel's buffers."""
    async with behind_proxy() as (proxy, echo), connected(proxy) as (reader, writer):
        await exchange(reader, writer, b"x")
        echo.reading.clear()
        assert await megabytes_taken(writer) < 64
        assert proxy.up.nbytes < 64 << 20


async def test_nobody_behind_it_shows_as_a_broken_connection():
    async with FaultProxy(Address("127.0.0.1", 1)) as proxy, connected(proxy) as (reader, _):
        with pytest.raises(ConnectionResetError):
            await reader.read(1)


async def test_leaving_closes_everything_in_any_state():
    for fault in ("cut", "hang", "refuse", "heal", "reset"):
        async with behind_proxy() as (proxy, _), connected(proxy) as (reader, writer):
            await exchange(reader, writer, b"x")
            proxy.down.delay_s = 30.0
            writer.write(b"under way")
            getattr(proxy, fault)()


async def test_an_address_before_it_listens_is_an_error():
    with pytest.raises(RuntimeError, match="async with"):
        _ = FaultProxy(Address("127.0.0.1", 1)).address
