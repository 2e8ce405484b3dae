"""How many bytes a second may pass, whoever of a node's processes moves them."""

from __future__ import annotations

import asyncio
import fcntl
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2pdrl.clock import ManualClock
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.rate import (
    BURST_S,
    MOST_CHARGED_S,
    RETRY_S,
    Allowance,
    Gcra,
    NodeRates,
    Rate,
    RateLimits,
    first_of,
)

BYTES_S = 1_600_000


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(1000.0)


@pytest.fixture
def rates(tmp_path: Path, clock: ManualClock) -> NodeRates:
    limits = RateLimits(str(tmp_path / "rates"), BYTES_S, 2 * BYTES_S)
    return NodeRates(limits, anew=True, clock=clock.monotonic)


def upload(rates: NodeRates) -> Rate:
    assert rates.upload is not None
    return rates.upload


def moved(allowances: list[Allowance], clock: ManualClock, seconds: float) -> list[int]:
    """Let each move all that it may, in turns; return how much each moved."""
    counts = [0] * len(allowances)
    end_s = clock.monotonic() + seconds
    while True:
        waits = []
        for number, allowance in enumerate(allowances):
            while (wait_s := allowance.ask(PIECE_BYTES)) <= 0:
                counts[number] += allowance.nbytes
                allowance.used(allowance.nbytes)
            waits.append(wait_s)
        if clock.monotonic() + min(waits) > end_s:
            return counts
        clock.advance(max(min(waits), 1e-6))


def test_a_rate_is_kept_beside_a_burst(rates: NodeRates, clock: ManualClock) -> None:
    (count,) = moved([Allowance(upload(rates))], clock, 10.0)
    most = BYTES_S * (10.0 + BURST_S) + upload(rates).chunk_nbytes
    assert BYTES_S * 9.9 < count <= most
    clock.advance(100.0)  # silence saves up no more than the burst
    (again,) = moved([Allowance(upload(rates))], clock, 1.0)
    assert again <= BYTES_S * (1.0 + BURST_S) + upload(rates).chunk_nbytes


def test_connections_of_all_processes_share_it_equally(rates: NodeRates, clock: ManualClock) -> None:
    others = NodeRates(rates.limits, clock=clock.monotonic)
    allowances = [Allowance(upload(each)) for each in (rates, others) for _ in range(5)]
    counts = moved(allowances, clock, 10.0)
    assert sum(counts) <= BYTES_S * (10.0 + BURST_S) + 10 * upload(rates).chunk_nbytes
    assert sum(counts) > BYTES_S * 9.0
    burst_nbytes = int(BURST_S * BYTES_S)  # of who came first of all
    assert max(counts) - min(counts) <= burst_nbytes + upload(rates).chunk_nbytes


def test_directions_have_rates_of_their_own(rates: NodeRates, clock: ManualClock) -> None:
    assert rates.download is not None
    moved([Allowance(upload(rates))], clock, 1.0)
    assert Allowance(upload(rates)).ask(1) > 0
    assert Allowance(rates.download).ask(1) == 0
    limits = RateLimits(rates.limits.path, 0, 5)
    assert NodeRates(limits).upload is None


def test_what_is_charged_never_waits_and_holds_others_up(rates: NodeRates, clock: ManualClock) -> None:
    upload(rates).charge(BYTES_S)
    wait_s = Allowance(upload(rates)).ask(1)
    assert wait_s == pytest.approx(1.0 - BURST_S)
    upload(rates).charge(1000 * BYTES_S)
    assert Allowance(upload(rates)).ask(1) <= MOST_CHARGED_S
    clock.advance(MOST_CHARGED_S)
    assert Allowance(upload(rates)).ask(1) == 0


def test_what_isnt_needed_is_given_back(rates: NodeRates) -> None:
    for _ in range(100):
        allowance = Allowance(upload(rates))
        assert allowance.ask(PIECE_BYTES) == 0
        allowance.used(10)
        allowance.give_back()
        allowance.give_back()
        assert allowance.nbytes == 0


def test_more_than_was_reserved_is_charged(rates: NodeRates) -> None:
    allowance = Allowance(upload(rates))
    assert allowance.ask(10) == 0
    allowance.used(BYTES_S)
    assert allowance.nbytes == 0
    assert allowance.ask(1) == pytest.approx(1.0 - BURST_S, abs=1e-4)


def test_what_is_reserved_at_once_follows_the_rate() -> None:
    assert Gcra(1.0).chunk_nbytes == 1024
    assert Gcra(160_000).chunk_nbytes == 10_000
    assert Gcra(1e12).chunk_nbytes == PIECE_BYTES


@settings(max_examples=60, deadline=None)
@given(
    bytes_s=st.floats(1.0, 1e9),
    steps=st.lists(st.tuples(st.floats(0.0, 5.0), st.integers(1, PIECE_BYTES)), min_size=1, max_size=40),
)
def test_no_window_holds_more_than_rate_and_burst(bytes_s: float, steps: list[tuple[float, int]]) -> None:
    gcra, tat_s, now_s = Gcra(bytes_s), 0.0, 0.0
    passed: list[tuple[float, int]] = []
    for pause_s, nbytes in steps:
        now_s += pause_s
        tat_s, due_s = gcra.reserve(tat_s, nbytes, now_s)
        passed.append((max(due_s, now_s), nbytes))
    for first, (from_s, _) in enumerate(passed):
        for last in range(first, len(passed)):
            until_s = passed[last][0]
            count = sum(nbytes for _, nbytes in passed[first : last + 1])
            largest = max(nbytes for _, nbytes in passed[first : last + 1])
            assert count <= (bytes_s * (until_s - from_s + BURST_S) + largest) * (1 + 1e-6)


def test_a_node_that_starts_again_begins_anew(rates: NodeRates, clock: ManualClock) -> None:
    upload(rates).charge(3 * BYTES_S)
    again = NodeRates(rates.limits, anew=True, clock=clock.monotonic)
    assert Allowance(upload(again)).ask(1) == 0


def test_a_process_joins_only_what_is_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        NodeRates(RateLimits(str(tmp_path / "none"), 5, 5))


def test_without_the_file_nothing_is_bounded(rates: NodeRates) -> None:
    allowance = Allowance(upload(rates))
    upload(rates).charge(3 * BYTES_S)
    rates.close()
    rates.close()
    assert allowance.ask(100) == 0


def test_who_finds_the_numbers_in_use_asks_again(rates: NodeRates, clock: ManualClock) -> None:
    """No process ever waits for the lock, for its holder may have been stopped."""
    with Path(rates.limits.path).open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        allowance = Allowance(upload(rates))
        assert allowance.ask(10) == RETRY_S
        assert allowance.nbytes == 0
        upload(rates).charge(BYTES_S)  # is owed
    assert allowance.ask(10) == pytest.approx(1.0 - BURST_S)
    assert allowance.nbytes == 10


@pytest.mark.looptime
async def test_tasks_wait_without_blocking(tmp_path: Path) -> None:
    loop = asyncio.get_running_loop()
    rates = NodeRates(RateLimits(str(tmp_path / "rates"), 16_000), anew=True, clock=loop.time)

    async def move(nbytes: int) -> None:
        allowance = Allowance(upload(rates))
        while nbytes > 0:
            nbytes -= await allowance.take(nbytes)

    began_s = loop.time()
    await asyncio.gather(*(move(40_000) for _ in range(4)))
    assert loop.time() - began_s == pytest.approx(10.0, abs=0.5)
    waiting = asyncio.create_task(move(16_000))
    await asyncio.sleep(0.01)
    waiting.cancel()  # leaves to others what it hasn't moved
    await asyncio.sleep(BURST_S)
    assert await asyncio.wait_for(Allowance(upload(rates)).take(10), 1.0) == 10


def test_a_thread_waits_no_longer_than_it_may(rates: NodeRates) -> None:
    allowance = Allowance(upload(rates))
    assert allowance.block(10, 0.0)
    allowance.used(10 * BYTES_S)
    assert not allowance.block(10, 0.0)
    assert not allowance.block(10, 1e-4)


def test_a_small_rate_has_a_small_buffer(tmp_path: Path) -> None:
    def buffer(bytes_s: int) -> int:
        with socket.socket() as sock:
            NodeRates(RateLimits(str(tmp_path / "rates"), 0, bytes_s), anew=True).bound_buffer(sock)
            return sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)

    with socket.socket() as sock:
        usual = sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
    assert buffer(20_000) < usual
    assert buffer(0) == buffer(1 << 30) == usual


CHARGE = """
import sys
from p2pdrl.transport.rate import NodeRates, RateLimits
rate = NodeRates(RateLimits(sys.argv[1], 4000), clock=lambda: 1e9).upload
for _ in range(2000):
    rate.charge(1)
while rate.reserve(0) is None:  # what was owed, too
    pass
"""
"""Charges single bytes at a time that stands still; all of them come to less than `MOST_CHARGED_S`."""


def test_processes_lose_no_bytes_to_each_other(tmp_path: Path) -> None:
    limits = RateLimits(str(tmp_path / "rates"), 4000)
    rates = NodeRates(limits, anew=True, clock=ManualClock(1e9).monotonic)
    command = [sys.executable, "-c", CHARGE, limits.path]
    processes = [subprocess.Popen(command) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert upload(rates).reserve(0) == pytest.approx(1e9 + 6000 / 4000 - BURST_S)


def test_the_front_of_a_list_of_buffers() -> None:
    buffers = [b"abc", bytearray(b""), memoryview(b"defg"), b"h"]
    for nbytes in range(10):
        found = first_of(buffers, nbytes)
        assert b"".join(map(bytes, found)) == b"abcdefgh"[:nbytes]
    assert first_of(buffers, 3)[0] is buffers[0]
