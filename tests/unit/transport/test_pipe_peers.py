"""Pipes to processes that die, freeze, or lie beyond a bad network."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import numpy as np
import pytest

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.testing.fault_proxy import FaultProxy
from p2pdrl.transport.limits import PIECE_BYTES, PipeBounds
from p2pdrl.transport.pipe.end import PipeEnd
from p2pdrl.transport.protocol import Address

from .pipes import KEYS, LONG_S, anywhere, tcp_pair

ECHO = textwrap.dedent(
    """
    import socket, sys
    from p2pdrl.errors import TransportError
    from p2pdrl.transport.pipe.end import PipeEnd

    def into(kind, meta, nbytes):
        return memoryview(bytearray(nbytes))

    keys = bytes.fromhex(sys.argv[2]), bytes.fromhex(sys.argv[3])
    with PipeEnd(socket.socket(fileno=int(sys.argv[1])), keys, into=into) as end:
        for module in ("aiohttp", "torch"):
            assert module not in sys.modules, module
        try:
            while True:
                message = end.receive(deadline_s=60)
                end.send(message.kind, message.meta, message.vector, deadline_s=60)
        except TransportError:
            pass
    """
)
VECTOR = np.random.default_rng(1).bytes(PIECE_BYTES + 5)


@contextmanager
def other_process(bounds: PipeBounds | None = None) -> Iterator[tuple[PipeEnd, subprocess.Popen[bytes]]]:
    """A pipe to a process that sends everything back."""
    one, other = tcp_pair()
    with PipeEnd(one, KEYS, into=anywhere, bounds=bounds) as end:
        keys = [key.hex() for key in KEYS[::-1]]
        command = [sys.executable, "-c", ECHO, str(other.fileno()), *keys]
        with subprocess.Popen(command, pass_fds=[other.fileno()]) as process:
            other.close()
            try:
                yield end, process
            finally:
                process.kill()


def echoed(end: PipeEnd, kind: int = 1) -> None:
    end.send(kind, b"meta", memoryview(VECTOR), deadline_s=LONG_S)
    message = end.receive(deadline_s=LONG_S)
    assert (message.kind, message.meta, message.vector) == (kind, b"meta", VECTOR)


def test_another_process_and_its_death() -> None:
    with other_process() as (end, process):
        for kind in range(3):
            echoed(end, kind)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerUnreachableError):
            end.receive(deadline_s=LONG_S)
        with pytest.raises(PeerUnreachableError):
            end.send(1, deadline_s=LONG_S)


def test_a_process_that_dies_while_it_is_sent_to() -> None:
    with other_process(PipeBounds(queued_bytes=PIECE_BYTES)) as (end, process):
        echoed(end)
        os.kill(process.pid, signal.SIGSTOP)
        end.send(1, vector=memoryview(bytes(16 * PIECE_BYTES)), deadline_s=LONG_S)
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(PeerUnreachableError):
            end.send(1, vector=memoryview(VECTOR), deadline_s=LONG_S)


def test_an_end_that_closes_ends_the_other_process() -> None:
    with other_process() as (end, process):
        echoed(end)
        end.close()
        assert process.wait(LONG_S) == 0


def test_a_frozen_process_costs_deadlines_and_goes_on_later() -> None:
    with other_process(PipeBounds(queued_bytes=4 * PIECE_BYTES)) as (end, process):
        echoed(end)
        os.kill(process.pid, signal.SIGSTOP)
        sent = 0
        with pytest.raises(PeerTimeoutError):
            end.receive(deadline_s=0.05)
        try:
            while True:
                sent = end.send(sent, b"meta", memoryview(VECTOR), deadline_s=0.05)
        except PeerTimeoutError:
            pass
        with pytest.raises(PeerTimeoutError):
            end.flush(deadline_s=0.05)
        os.kill(process.pid, signal.SIGCONT)
        for kind in (0, *range(2, sent)):
            message = end.receive(deadline_s=LONG_S)
            assert (message.kind, message.vector) == (kind, VECTOR)
        echoed(end)


def test_a_process_that_stays_frozen_is_given_up_by_the_kernel() -> None:
    with other_process(PipeBounds(silence_s=1.0)) as (end, process):
        echoed(end)
        os.kill(process.pid, signal.SIGSTOP)
        end.send(1, vector=memoryview(bytes(32 * PIECE_BYTES)), deadline_s=LONG_S)
        started_s = time.monotonic()
        with pytest.raises(PeerUnreachableError):
            end.flush(deadline_s=LONG_S)
        assert time.monotonic() - started_s < LONG_S / 2


@asynccontextmanager
async def through_a_proxy(
    bounds: PipeBounds | None = None,
) -> AsyncIterator[tuple[PipeEnd, PipeEnd, FaultProxy]]:
    loop = asyncio.get_running_loop()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        async with FaultProxy(Address("127.0.0.1", listening.getsockname()[1])) as proxy:
            connecting = asyncio.to_thread(socket.create_connection, (proxy.address.host, proxy.address.port))
            one, (other, _) = await asyncio.gather(connecting, loop.sock_accept(listening))
            first = PipeEnd(one, KEYS, into=anywhere, bounds=bounds)
            second = PipeEnd(other, KEYS[::-1], into=anywhere, bounds=bounds)
            try:
                yield first, second, proxy
            finally:
                await asyncio.gather(*(asyncio.to_thread(end.close) for end in (first, second)))


async def passed(one: PipeEnd, other: PipeEnd, vector: bytes = VECTOR) -> None:
    await asyncio.to_thread(one.send, 1, b"meta", memoryview(vector), deadline_s=LONG_S)
    message = await asyncio.to_thread(other.receive, deadline_s=LONG_S)
    assert message.vector == vector


async def test_delays_jitter_and_little_bandwidth() -> None:
    async with through_a_proxy() as (one, other, proxy):
        proxy.up.delay_s = proxy.down.delay_s = 0.02
        proxy.up.jitter_s = proxy.down.jitter_s = 0.01
        proxy.up.bytes_per_s = proxy.down.bytes_per_s = 30e6
        for _ in range(3):
            await asyncio.gather(passed(one, other), passed(other, one))


async def test_a_trickle_is_slow_and_nothing_else() -> None:
    async with through_a_proxy() as (one, other, proxy):
        proxy.up.bytes_per_s = 20_000
        await asyncio.to_thread(one.send, 1, b"meta", memoryview(bytes(2000)), deadline_s=LONG_S)
        late = 0
        while True:
            try:
                message = await asyncio.to_thread(other.receive, deadline_s=0.01)
            except PeerTimeoutError:
                late += 1
                continue
            assert message.vector == bytes(2000)
            break
        assert late


@pytest.mark.parametrize("fault", ["reset", "cut"])
async def test_a_cut_wakes_both_ends(fault: str) -> None:
    async with through_a_proxy(PipeBounds(queued_bytes=PIECE_BYTES)) as (one, other, proxy):
        await passed(one, other)
        proxy.up.stalled = True
        await asyncio.to_thread(one.send, 1, b"", memoryview(bytes(24 * PIECE_BYTES)), deadline_s=LONG_S)
        waiting = [
            asyncio.create_task(asyncio.to_thread(call, deadline_s=LONG_S))
            for call in (one.receive, other.receive, one.flush)
        ]
        await asyncio.sleep(0.02)
        getattr(proxy, fault)()
        results = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), LONG_S / 2)
        assert [type(result) for result in results] == [PeerUnreachableError] * 3


async def test_a_cut_in_the_middle_of_messages_loses_whole_ones_only() -> None:
    async with through_a_proxy() as (one, other, proxy):
        proxy.up.bytes_per_s = 20e6
        for kind in range(20):
            await asyncio.to_thread(one.send, kind, b"", memoryview(VECTOR), deadline_s=LONG_S)
        got = []
        try:
            while True:
                message = await asyncio.to_thread(other.receive, deadline_s=LONG_S)
                assert message.vector == VECTOR
                got.append(message.kind)
                if len(got) == 3:
                    proxy.reset()
        except TransportError as error:
            assert isinstance(error, PeerUnreachableError)  # noqa: PT017 - counted in the loop
        assert got == list(range(len(got)))
        assert 3 <= len(got) < 20


async def test_a_network_that_hangs_costs_a_deadline_and_loses_nothing() -> None:
    async with through_a_proxy() as (one, other, proxy):
        await passed(one, other)
        proxy.hang()
        await asyncio.to_thread(one.send, 1, b"meta", memoryview(VECTOR), deadline_s=LONG_S)
        with pytest.raises(PeerTimeoutError):
            await asyncio.to_thread(other.receive, deadline_s=0.05)
        proxy.heal()
        assert (await asyncio.to_thread(other.receive, deadline_s=LONG_S)).vector == VECTOR
        await passed(other, one)
