"""Faults of the network in memory."""

from __future__ import annotations

import asyncio
import random

import pytest

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError
from p2pdrl.testing.memory_transport import MemoryNetwork, MemoryTransport
from p2pdrl.transport.protocol import Address, Incoming, Reply

A, B = "a" * 32, "b" * 32
AT_A, AT_B = Address("10.0.0.1", 1), Address("10.0.0.2", 1)


async def pair(network: MemoryNetwork) -> tuple[MemoryTransport, MemoryTransport, list[bytes]]:
    """Two started nodes, and what both of them were sent."""
    a, b = network.join(A, AT_A), network.join(B, AT_B)
    got: list[bytes] = []

    async def note(incoming: Incoming) -> Reply:
        got.append(incoming.meta)
        return Reply(b"noted")

    for transport in (a, b):
        transport.serve("note", note)
        await transport.start()
    return a, b, got


async def test_cuts_both_ways_one_way_and_heal() -> None:
    network = MemoryNetwork()
    a, b, got = await pair(network)
    network.cut(A, B, one_way=True)
    with pytest.raises(PeerTimeoutError):
        await a.call(AT_B, B, "note", b"1", deadline_s=0.01)
    with pytest.raises(PeerTimeoutError):  # arrives, but the answer doesn't
        await b.call(AT_A, A, "note", b"2", deadline_s=0.01)
    assert got == [b"2"]
    network.heal(A, B)
    await a.call(AT_B, B, "note", b"3", deadline_s=1)
    network.cut(A, B)
    with pytest.raises(PeerTimeoutError):
        await b.call(AT_A, A, "note", b"4", deadline_s=0.01)
    network.heal()
    await b.call(AT_A, A, "note", b"5", deadline_s=1)
    assert got == [b"2", b"3", b"5"]


async def test_a_lost_answer_is_told_as_not_sent() -> None:
    network = MemoryNetwork()
    a, b, _ = await pair(network)
    ends: list[bool] = []

    async def give(_: Incoming) -> Reply:
        return Reply(b"", on_end=ends.append)

    b.serve("give", give)
    network.cut(B, A, one_way=True)
    with pytest.raises(PeerTimeoutError):
        await a.call(AT_B, B, "give", b"", deadline_s=0.01)
    assert ends == [False]


async def test_loss_is_drawn_from_the_generator() -> None:
    async def run(seed: int) -> list[bool]:
        network = MemoryNetwork(random.Random(seed), loss=0.3)
        a, _, _ = await pair(network)
        outcomes = []
        for _ in range(30):
            try:
                await a.call(AT_B, B, "note", b"", deadline_s=0.001)
                outcomes.append(True)
            except PeerTimeoutError:
                outcomes.append(False)
        return outcomes

    first = await run(5)
    assert first == await run(5)
    assert 5 < sum(first) < 25


async def test_duplicates_run_the_handler_twice() -> None:
    network = MemoryNetwork(duplicate=1.0)
    a, _, got = await pair(network)
    assert (await a.call(AT_B, B, "note", b"x", deadline_s=1)).meta == b"noted"
    await asyncio.sleep(0)
    assert got == [b"x", b"x"]


async def test_a_frozen_node_answers_when_it_is_thawed() -> None:
    network = MemoryNetwork()
    a, _, got = await pair(network)
    network.freeze(B)
    with pytest.raises(PeerTimeoutError):
        await a.call(AT_B, B, "note", b"late", deadline_s=0.01)
    call = asyncio.create_task(a.call(AT_B, B, "note", b"waits", deadline_s=5))
    await asyncio.sleep(0)
    assert not got
    network.thaw(B)
    network.thaw(B)
    assert (await call).meta == b"noted"
    assert sorted(got) == [b"late", b"waits"]


async def test_a_closed_node_is_unreachable_and_its_successor_is_not() -> None:
    network = MemoryNetwork()
    a, b, _ = await pair(network)
    await b.close()
    with pytest.raises(PeerUnreachableError):
        await a.call(AT_B, B, "note", b"", deadline_s=1)
    successor = network.join(B, AT_B)
    await successor.start()
    await b.close()
    assert network.at(AT_B) is successor


async def test_delays_pass_on_the_given_clock() -> None:
    waited: list[float] = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)
        if seconds > 1:  # the deadline
            await asyncio.Event().wait()

    network = MemoryNetwork(delay_s=(0.1, 0.2), sleep=sleep)
    a, _, _ = await pair(network)
    await a.call(AT_B, B, "note", b"", deadline_s=9)
    assert waited.count(9) == 1
    assert len(waited) == 3
    assert all(0.1 <= seconds <= 0.2 for seconds in waited if seconds != 9)
