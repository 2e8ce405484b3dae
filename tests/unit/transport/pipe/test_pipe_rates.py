"""Pipes keep to their node's rates, which they share with its daemon by a file."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import PIECE_BYTES, TransportLimits
from p2pdrl.transport.pipe.end import PipeEnd
from p2pdrl.transport.pipe.ticket import PipeReply, PipeTicket
from p2pdrl.transport.protocol import Incoming
from p2pdrl.transport.rate import BURST_S, NodeRates, RateLimits

from ..pipes import KEYS, LONG_S, anywhere, tcp_pair

FAST = 64 << 20


@contextmanager
def ends_at(limits: RateLimits) -> Iterator[tuple[PipeEnd, PipeEnd]]:
    """The first keeps to the rates."""
    one, other = tcp_pair()
    with (
        PipeEnd(one, KEYS, into=anywhere, rates=limits) as first,
        PipeEnd(other, KEYS[::-1], into=anywhere) as second,
    ):
        yield first, second


@pytest.mark.parametrize("nbytes", [0, 100, 3 * PIECE_BYTES + 17])
def test_both_ways_count(tmp_path: Path, nbytes: int) -> None:
    limits = RateLimits(str(tmp_path / "rates"), FAST, FAST)
    rates = NodeRates(limits, anew=True)
    vector = np.random.default_rng(nbytes).bytes(nbytes)
    began_s = time.monotonic()
    with ends_at(limits) as (one, other):
        for number in range(1, 4):
            for end, peer in ((one, other), (other, one)):
                end.send(number, b"meta", memoryview(vector), deadline_s=LONG_S)
                message = peer.receive(deadline_s=LONG_S)
                assert (message.kind, bytes(message.vector or b"")) == (number, vector)
        one.flush(deadline_s=LONG_S)
        moved = one.bytes_out, one.bytes_in
    for rate, nbytes_moved in zip((rates.upload, rates.download), moved, strict=True):
        assert rate is not None
        due_s = rate.reserve(0)
        assert due_s is not None
        assert (due_s + BURST_S - began_s) * FAST >= nbytes_moved * 0.999


def test_whoever_waits_for_a_rate_is_bounded_as_ever(tmp_path: Path) -> None:
    limits = RateLimits(str(tmp_path / "rates"), 1024, 1024)
    NodeRates(limits, anew=True).close()
    long = memoryview(bytes(PIECE_BYTES))
    with ends_at(limits) as (one, other):
        one.send(1, vector=long, deadline_s=LONG_S)
        with pytest.raises(PeerTimeoutError):
            one.flush(deadline_s=0.05)
        other.send(1, vector=long, deadline_s=LONG_S)
        with pytest.raises(PeerTimeoutError):
            one.receive(deadline_s=0.05)
        other.close()
        with pytest.raises(PeerUnreachableError):
            one.flush(deadline_s=LONG_S)


def test_without_the_file_there_is_no_pipe(tmp_path: Path) -> None:
    one, other = tcp_pair()
    with one, other, pytest.raises(FileNotFoundError):
        PipeEnd(one, None, into=anywhere, rates=RateLimits(str(tmp_path / "none"), 5, 5))


def test_a_ticket_carries_the_rates_to_another_process() -> None:
    ticket = PipeTicket(None, b"early", rates=RateLimits("/data/rates", 5, 7))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(ticket), type=PipeTicket) == ticket
    older = msgspec.msgpack.encode({"keys": None, "leftover": b""})
    assert msgspec.msgpack.decode(older, type=PipeTicket).rates is None


async def test_tickets_of_both_ends_carry_the_rates_of_their_nodes(tmp_path: Path) -> None:
    clock, limits, taken = SystemClock(), TransportLimits(shutdown_grace_s=0.05), []
    rates = [NodeRates(RateLimits(str(tmp_path / name), FAST), anew=True) for name in ("one", "other")]
    one, other = (
        HttpTransport(name * 32, "default", None, clock=clock, limits=limits, rates=its)
        for name, its in zip("ab", rates, strict=True)
    )
    app = web.Application()
    other.mount(app)
    listener = Listener(limits, clock, other.counters)
    at = await listener.listen(app, "127.0.0.1", 0)
    await one.start()

    async def accept(_: Incoming) -> PipeReply:
        return PipeReply(b"", taken.append)

    other.serve_pipes("stage", accept)
    pipe = await one.open_pipe(at, "b" * 32, "stage", b"", deadline_s=LONG_S)
    found = pipe.ticket.rates, taken[0].ticket.rates
    assert found == (rates[0].limits, rates[1].limits)
    pipe.close()
    taken[0].close()
    for node in (one, other):
        await node.close()
    await listener.close()


def test_a_small_rate_has_a_small_buffer(tmp_path: Path) -> None:
    limits = RateLimits(str(tmp_path / "rates"), 0, 16_000)
    NodeRates(limits, anew=True).close()
    one, other = tcp_pair()
    usual = one.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    with other, one.dup() as same, PipeEnd(one, None, into=anywhere, rates=limits):
        assert same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF) < usual
