"""Streams that keep to their node's rates: all counts, nobody is cut for what we hold back ourselves."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError
from p2pdrl.transport.cipher import OPEN
from p2pdrl.transport.framing import Filling, batches
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import PIECE_BYTES, TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply
from p2pdrl.transport.rate import BURST_S, NodeRates, Rate, RateLimits
from p2pdrl.transport.stream.socket import StreamSocket

FAST = 64 << 20
SERVER, CALLER = "b" * 32, "a" * 32


def rates_in(folder: Path, name: str = "rates", *, upload: int = 0, download: int = 0) -> NodeRates:
    return NodeRates(RateLimits(str(folder / name), upload, download), anew=True)


def counted(rate: Rate | None, bytes_s: int, since_s: float) -> float:
    """Bytes that were counted at least, if the rate's first byte passed at ``since_s``."""
    assert rate is not None
    due_s = rate.reserve(0)
    assert due_s is not None
    return (due_s + BURST_S - since_s) * bytes_s


async def carry(one: StreamSocket, other: StreamSocket, nbytes: int, stall_s: float = 5.0) -> None:
    """Send a vector behind a head, in bulk, and see that it comes."""
    vector = np.random.default_rng(nbytes).bytes(nbytes)
    out = memoryview(bytearray(nbytes))
    message = batches(b"head", b"", [memoryview(vector)], OPEN)
    sending = asyncio.create_task(one.send(message, 4 + nbytes, bulk=True))
    assert await other.read(4) == b"head"
    await other.fill(Filling(out), stall_s)
    assert await sending
    assert bytes(out) == vector


@pytest.mark.parametrize("nbytes", [100, 40_000, 3 * PIECE_BYTES + 17])
async def test_what_is_sent_and_received_counts(
    tmp_path: Path, ends: tuple[StreamSocket, StreamSocket], nbytes: int
) -> None:
    ours, theirs = rates_in(tmp_path, "ours", upload=FAST), rates_in(tmp_path, "theirs", download=FAST)
    ends[0].keep_to(ours)
    ends[1].keep_to(theirs)
    began_s = asyncio.get_running_loop().time()
    for _ in range(3):
        await carry(*ends, nbytes)
    assert counted(ours.upload, FAST, began_s) >= 3 * (nbytes + 4) * 0.999
    assert counted(theirs.download, FAST, began_s) >= 3 * (nbytes + 4) * 0.999


async def test_short_messages_count_and_dont_wait(
    tmp_path: Path, ends: tuple[StreamSocket, StreamSocket]
) -> None:
    one, other = ends
    one.keep_to(rates_in(tmp_path, upload=1, download=1))
    for _ in range(10):
        assert await one.send(iter([[b"ping"]]), 4)
        assert await other.read(4) == b"ping"
        assert await other.send(iter([[b"pong"]]), 4)
        assert await one.read(4) == b"pong"


async def test_our_own_rate_is_no_silence_of_the_peer(
    tmp_path: Path, ends: tuple[StreamSocket, StreamSocket]
) -> None:
    ends[1].keep_to(rates_in(tmp_path, download=64_000))  # a chunk in 0.06 s
    await carry(*ends, 50_000, stall_s=0.03)


async def test_silence_is(tmp_path: Path, ends: tuple[StreamSocket, StreamSocket]) -> None:
    ends[1].keep_to(rates_in(tmp_path, download=64_000))
    with pytest.raises(PeerTimeoutError):
        await ends[1].fill(Filling(memoryview(bytearray(10))), 0.01)


async def test_a_cancelled_message_leaves_the_rate_to_others(
    tmp_path: Path, ends: tuple[StreamSocket, StreamSocket]
) -> None:
    one, other = ends
    one.keep_to(rates_in(tmp_path, upload=100_000))
    long = batches(b"head", b"", [memoryview(bytes(10 * PIECE_BYTES))], OPEN)
    sending = asyncio.create_task(one.send(long, 10 * PIECE_BYTES + 4, bulk=True))
    await other.read(4)
    sending.cancel()
    await asyncio.wait([sending])
    assert one.unsent_nbytes == one.awaiting_nbytes == 0


async def test_a_connection_that_ends_is_noticed_while_the_rate_holds_a_message_back(
    tmp_path: Path, ends: tuple[StreamSocket, StreamSocket]
) -> None:
    one, other = ends
    one.keep_to(rates_in(tmp_path, upload=16_000))
    message = batches(b"head", b"", [memoryview(bytes(100_000))], OPEN)
    sending = asyncio.create_task(one.send(message, 100_004, bulk=True))
    await other.read(4)
    assert one.awaiting_nbytes == 0  # it isn't the peer that we wait for
    other.close()
    with pytest.raises(ConnectionError):
        await sending


@asynccontextmanager
async def nodes(
    limits: TransportLimits, caller: NodeRates | None, server: NodeRates | None
) -> AsyncIterator[tuple[HttpTransport, HttpTransport, Address]]:
    """A caller and a server that echoes, at ``echo``, and refuses whatever comes, at ``busy``."""
    clock = SystemClock()
    one = HttpTransport(CALLER, "default", None, clock=clock, limits=limits, rates=caller)
    other = HttpTransport(SERVER, "default", None, clock=clock, limits=limits, rates=server)
    app = web.Application()
    other.mount(app)
    listener = Listener(limits, clock, other.counters)
    at = await listener.listen(app, "127.0.0.1", 0)

    async def echo(incoming: Incoming) -> Reply:
        vector = memoryview(bytearray(incoming.vector_nbytes))
        await incoming.read_vector_into(vector)
        return Reply(b"", vector)

    async def busy(_: Incoming) -> Reply:
        raise Refusal(503, "busy")

    other.serve("echo", echo, max_vector_bytes=1 << 30)
    other.serve("busy", busy, max_vector_bytes=1 << 30)
    for node in (one, other):
        await node.start()
    try:
        yield one, other, at
    finally:
        for node in (one, other):
            await node.close()
        await listener.close()


async def echoed(caller: HttpTransport, at: Address, nbytes: int) -> None:
    vector = np.random.default_rng(nbytes).bytes(nbytes)
    out = memoryview(bytearray(nbytes))
    await caller.call(
        at,
        SERVER,
        "echo",
        b"",
        vector=memoryview(vector),
        into=lambda _meta, _nbytes: out,
        deadline_s=20,
        lane="bulk",
    )
    assert bytes(out) == vector


IMPATIENT = TransportLimits(stall_deadline_s=0.3, watchdog_tick_s=0.02, shutdown_grace_s=0.05)


@pytest.mark.parametrize("side", ["caller", "server"])
@pytest.mark.parametrize("way", ["upload", "download"])
@pytest.mark.parametrize("streams", [True, False], ids=["stream", "post"])
async def test_nobody_is_cut_at_a_low_rate(tmp_path: Path, side: str, way: str, streams: bool) -> None:
    """A chunk comes each 0.06 s, and each end has others cut that say nothing for 0.3 s."""
    rates = rates_in(tmp_path, **{way: 200_000})
    limits = IMPATIENT if streams else replace(IMPATIENT, max_streams_per_peer=0)
    given = (rates, None) if side == "caller" else (None, rates)
    async with nodes(limits, *given) as (caller, server, at):
        await echoed(caller, at, 150_000)
        assert server.counters.dropped_connections == 0
        assert caller.counters.bytes_out == server.counters.bytes_in == 150_000


async def test_what_we_hold_back_is_no_slow_body(tmp_path: Path) -> None:
    """Who sends less than a megabyte a second is cut, but not when it may not send more."""
    limits = replace(IMPATIENT, min_body_bytes_s=1e6)
    async with nodes(limits, None, rates_in(tmp_path, download=200_000)) as (caller, server, at):
        await echoed(caller, at, 200_000)
        assert server.counters.dropped_connections == 0


async def test_a_peer_that_takes_little_at_a_time_takes_something(tmp_path: Path) -> None:
    """Our kernel takes more of us only when a third of its buffer is free, hundreds of KiB at a time."""
    limits = replace(IMPATIENT, stall_deadline_s=0.6)
    async with nodes(limits, rates_in(tmp_path, download=500_000), None) as (caller, server, at):
        await echoed(caller, at, 1_600_000)
        assert server.counters.dropped_connections == 0


@pytest.mark.parametrize("download", [0, 4_000_000], ids=["free", "at a rate"])
async def test_of_a_refused_call_counts_what_was_sent(tmp_path: Path, download: int) -> None:
    rates = rates_in(tmp_path, download=download) if download else None
    vector = memoryview(bytes(64 * PIECE_BYTES))
    async with nodes(TransportLimits(shutdown_grace_s=0.05), None, rates) as (caller, _, at):
        for _ in range(2):
            with pytest.raises(PeerRefusedError):
                await caller.call(at, SERVER, "busy", b"", vector=vector, deadline_s=20, lane="bulk")
        assert caller.counters.bytes_out < len(vector)
