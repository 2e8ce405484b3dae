"""One suite over every transport: what membership and strategies may rely on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from p2pdrl.errors import (
    LayoutMismatchError,
    PeerRefusedError,
    PeerTimeoutError,
    PeerUnreachableError,
    WireError,
)
from p2pdrl.testing.memory_transport import MemoryTransport
from p2pdrl.transport.protocol import Address, Incoming, Refusal, Reply, RouteRoles
from p2pdrl.transport.rate import NodeRates, RateLimits

from .transports import ALICE, BOB, MIB, Pair, http, memory, relayed

KEY = b"the swarm's key"
MAKERS: dict[str, Callable[[], AsyncIterator[Pair]]] = {
    "memory": memory,
    "posts in the open": lambda: http(None, streams=False),
    "streams in the open": lambda: http(None, streams=True),
    "posts over TLS": lambda: http(KEY, streams=False),
    "streams that hide": lambda: http(KEY, streams=True, other_key=b"another key"),
    "streams that prove": lambda: http(KEY, streams=True, hides=False, other_key=b"another key"),
    "posts through a relay, in the open": lambda: relayed(None, streams=False),
    "posts through a relay": lambda: relayed(KEY, streams=False),
    "streams through a relay": lambda: relayed(KEY, streams=True),
}


def keyed_at_a_rate(streams: bool, rates: Callable[[str], NodeRates]) -> AsyncIterator[Pair]:
    return http(KEY, streams=streams, other_key=b"another key" if streams else None, rates=rates)


@pytest.fixture(params=[*MAKERS, "posts at a rate", "streams at a rate"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    def rates(name: str) -> NodeRates:
        return NodeRates(RateLimits(str(tmp_path / name), 40 * MIB, 40 * MIB), anew=True)

    make = MAKERS.get(request.param)
    async for made in make() if make else keyed_at_a_rate("streams" in request.param, rates):
        yield made


ACTOR, TRAINERS = frozenset({"actor"}), frozenset({"learner", "server"})
LIMITED: dict[str, Callable[[], AsyncIterator[Pair]]] = {
    "memory": lambda: memory(ACTOR),
    "posts": lambda: http(KEY, streams=False, roles=ACTOR),
    "streams": lambda: http(KEY, streams=True, roles=ACTOR),
}


@pytest.fixture(params=LIMITED)
async def limited(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    """Alice is certified to act, and for nothing else."""
    async for made in LIMITED[request.param]():
        yield made


def vector(nbytes: int) -> memoryview:
    return memoryview(np.random.default_rng(7).integers(0, 256, nbytes, dtype=np.uint8))


async def test_metadata_goes_there_and_back(pair: Pair) -> None:
    seen: list[Incoming] = []

    async def echo(incoming: Incoming) -> Reply:
        seen.append(incoming)
        return Reply(incoming.meta[::-1])

    pair.bob.serve("echo", echo)
    answer = await pair.alice.call(pair.bob_at, BOB, "echo", b"abc\0\xff", deadline_s=5)
    assert (answer.meta, answer.vector_nbytes, answer.sender) == (b"\xff\0cba", 0, BOB)
    assert (seen[0].sender, seen[0].route, seen[0].vector_nbytes) == (ALICE, "echo", 0)
    assert seen[0].remote_host


async def test_empty_metadata_and_unknown_target(pair: Pair) -> None:
    async def nothing(_: Incoming) -> Reply:
        return Reply(b"")

    pair.bob.serve("nothing", nothing)
    answer = await pair.alice.call(pair.bob_at, None, "nothing", b"", deadline_s=5)
    assert (answer.meta, answer.sender) == (b"", BOB)


@pytest.mark.parametrize("nbytes", [1, 4, MIB - 1, MIB, MIB + 1, 3 * MIB + 17])
async def test_vectors_go_both_ways(pair: Pair, nbytes: int) -> None:
    sent = vector(nbytes)

    async def mirror(incoming: Incoming) -> Reply:
        got = bytearray(incoming.vector_nbytes)
        await incoming.read_vector_into(memoryview(got))
        return Reply(b"m", memoryview(got))

    pair.bob.serve("mirror", mirror, max_vector_bytes=4 * MIB)
    out = np.zeros(nbytes, np.uint8)
    asked: list[tuple[bytes, int]] = []

    def into(meta: bytes, size: int) -> memoryview:
        asked.append((meta, size))
        return memoryview(out)

    answer = await pair.alice.call(
        pair.bob_at, BOB, "mirror", b"x", vector=sent, into=into, deadline_s=20, lane="bulk"
    )
    assert answer.vector_nbytes == nbytes
    assert asked == [(b"m", nbytes)]
    assert bytes(out) == bytes(sent)


async def test_float_vectors_and_vectors_in_parts(pair: Pair) -> None:
    parts = [np.arange(n, dtype=np.float32) for n in (3, 300_000, 0, 5, 400_000)]

    async def give(_: Incoming) -> Reply:
        return Reply(b"", [memoryview(part) for part in parts])

    pair.bob.serve("give", give)
    out = np.zeros(sum(part.size for part in parts), np.float32)
    await pair.alice.call(pair.bob_at, BOB, "give", b"", into=lambda _m, _n: memoryview(out), deadline_s=20)
    assert np.array_equal(out, np.concatenate(parts))


async def test_on_end_is_called_once_after_the_answer(pair: Pair) -> None:
    sent = asyncio.Event()
    calls: list[bool] = []

    def note(written: bool) -> None:
        calls.append(written)
        sent.set()

    async def give(_: Incoming) -> Reply:
        return Reply(b"", vector(2 * MIB), on_end=note)

    pair.bob.serve("give", give)
    out = memoryview(bytearray(2 * MIB))
    await pair.alice.call(pair.bob_at, BOB, "give", b"", into=lambda _m, _n: out, deadline_s=20)
    await asyncio.wait_for(sent.wait(), 5)
    assert calls == [True]


async def test_a_refusal_keeps_its_status_and_reason(pair: Pair) -> None:
    async def refuse(_: Incoming) -> Reply:
        raise Refusal(409, "older than ours: round 7")

    pair.bob.serve("refuse", refuse)
    with pytest.raises(PeerRefusedError) as info:
        await pair.alice.call(pair.bob_at, BOB, "refuse", b"", deadline_s=5)
    assert (info.value.status, info.value.reason) == (409, "older than ours: round 7")
    assert pair.bob.counters.refused[409] == 1


async def test_a_refusal_with_an_unread_vector_is_seen(pair: Pair) -> None:
    async def refuse(_: Incoming) -> Reply:
        raise Refusal(429, "busy")

    pair.bob.serve("refuse", refuse, max_vector_bytes=8 * MIB)
    for _ in range(3):
        with pytest.raises(PeerRefusedError, match="busy"):
            await pair.alice.call(pair.bob_at, BOB, "refuse", b"", vector=vector(8 * MIB), deadline_s=10)


async def test_a_wrong_layout_is_told_as_422(pair: Pair) -> None:
    async def refuse(_: Incoming) -> Reply:
        raise LayoutMismatchError("the network has another shape")

    pair.bob.serve("refuse", refuse)
    with pytest.raises(PeerRefusedError, match="422: the network has another shape"):
        await pair.alice.call(pair.bob_at, BOB, "refuse", b"", deadline_s=5)


@pytest.mark.parametrize(
    ("target", "route", "meta_nbytes", "vector_nbytes", "status"),
    [
        ("d" * 32, "small", 1, 0, 403),
        (BOB, "missing", 1, 0, 404),
        (BOB, "small", 9, 0, 413),
        (BOB, "small", 1, 9, 413),
    ],
)
async def test_what_is_refused_before_the_handler(
    pair: Pair, target: str, route: str, meta_nbytes: int, vector_nbytes: int, status: int
) -> None:
    ran: list[int] = []

    async def small(_: Incoming) -> Reply:
        ran.append(1)
        return Reply(b"")

    pair.bob.serve("small", small, max_meta_bytes=8, max_vector_bytes=8)
    with pytest.raises(PeerRefusedError) as info:
        await pair.alice.call(
            pair.bob_at, target, route, bytes(meta_nbytes), vector=vector(vector_nbytes), deadline_s=5
        )
    assert info.value.status == status
    assert not ran
    assert pair.bob.counters.refused[status] == 1


async def test_another_swarm_is_refused(pair: Pair) -> None:
    async def nothing(_: Incoming) -> Reply:
        return Reply(b"")

    pair.bob.serve("nothing", nothing)
    with pytest.raises(PeerRefusedError) as info:
        await pair.stranger.call(pair.bob_at, None, "nothing", b"", deadline_s=5)
    assert info.value.status in (401, 403)
    assert "swarm" in info.value.reason


async def test_nobody_there(pair: Pair) -> None:
    with pytest.raises(PeerUnreachableError):
        await pair.alice.call(pair.nowhere, None, "nothing", b"", deadline_s=5)


async def test_a_slow_handler_meets_the_deadline(pair: Pair) -> None:
    async def hang(_: Incoming) -> Reply:
        await asyncio.sleep(30)
        return Reply(b"")

    pair.bob.serve("hang", hang)
    with pytest.raises(PeerTimeoutError):
        await pair.alice.call(pair.bob_at, BOB, "hang", b"", deadline_s=0.05)


async def test_an_unwanted_vector_is_refused_by_the_caller(pair: Pair) -> None:
    async def give(_: Incoming) -> Reply:
        return Reply(b"", vector(1000))

    pair.bob.serve("give", give)
    with pytest.raises(WireError):
        await pair.alice.call(pair.bob_at, BOB, "give", b"", deadline_s=5)
    with pytest.raises(WireError):
        await pair.alice.call(pair.bob_at, BOB, "give", b"", into=lambda _m, _n: None, deadline_s=5)


async def test_a_buffer_of_another_length_is_a_bug(pair: Pair) -> None:
    problems: list[type[Exception]] = []

    async def take(incoming: Incoming) -> Reply:
        try:
            await incoming.read_vector_into(memoryview(bytearray(3)))
        except ValueError as error:
            problems.append(type(error))
        await incoming.read_vector_into(memoryview(bytearray(4)))
        try:
            await incoming.read_vector_into(memoryview(bytearray(4)))
        except ValueError as error:
            problems.append(type(error))
        return Reply(b"")

    pair.bob.serve("take", take, max_vector_bytes=8)
    await pair.alice.call(pair.bob_at, BOB, "take", b"", vector=vector(4), deadline_s=5)
    assert problems == [ValueError, ValueError]


async def test_bytes_are_counted_by_peer(pair: Pair) -> None:
    async def take(incoming: Incoming) -> Reply:
        await incoming.read_vector_into(memoryview(bytearray(incoming.vector_nbytes)))
        return Reply(bytes(100))

    pair.bob.serve("take", take, max_vector_bytes=MIB)
    alice, bob = pair.alice.counters, pair.bob.counters
    await pair.alice.call(pair.bob_at, BOB, "take", b"first", vector=vector(1), deadline_s=5)
    out, into = alice.bytes_out, alice.bytes_in
    await pair.alice.call(pair.bob_at, BOB, "take", b"1234", vector=vector(1000), deadline_s=5)
    assert 1004 <= alice.bytes_out - out < 1100
    assert 100 <= alice.bytes_in - into < 200
    assert alice.bytes_out == sum(alice.bytes_out_by_peer.values())  # of Bob, and of a relay
    assert alice.bytes_in == sum(alice.bytes_in_by_peer.values())
    assert bob.bytes_in_by_peer[ALICE] == alice.bytes_out_by_peer[BOB]
    assert bob.bytes_out_by_peer[ALICE] == alice.bytes_in_by_peer[BOB]


async def test_many_calls_at_once(pair: Pair) -> None:
    async def echo(incoming: Incoming) -> Reply:
        await asyncio.sleep(0)
        return Reply(incoming.meta)

    pair.bob.serve("echo", echo)
    answers = await asyncio.gather(
        *(pair.alice.call(pair.bob_at, BOB, "echo", str(i).encode(), deadline_s=10) for i in range(20))
    )
    assert [answer.meta for answer in answers] == [str(i).encode() for i in range(20)]


async def test_a_cancelled_call_leaves_the_transport_usable(pair: Pair) -> None:
    started = asyncio.Event()

    async def hang(_: Incoming) -> Reply:
        started.set()
        await asyncio.sleep(0.2)
        return Reply(b"")

    async def echo(incoming: Incoming) -> Reply:
        return Reply(incoming.meta)

    pair.bob.serve("hang", hang)
    pair.bob.serve("echo", echo)
    task = asyncio.create_task(pair.alice.call(pair.bob_at, BOB, "hang", b"", deadline_s=5))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    answer = await pair.alice.call(pair.bob_at, BOB, "echo", b"still here", deadline_s=5)
    assert answer.meta == b"still here"


def test_routes_are_named_well_and_once(pair: Pair) -> None:
    async def nothing(_: Incoming) -> Reply:
        return Reply(b"")

    pair.bob.serve("swim/ping", nothing)
    for route in ("swim/ping", "", "/x", "Up", "a/../b", "a b"):
        with pytest.raises(ValueError, match="route"):
            pair.bob.serve(route, nothing)


async def test_a_bug_in_a_handler_is_told_to_the_loop(pair: Pair) -> None:
    told: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))

    async def broken(_: Incoming) -> Reply:
        raise KeyError("a secret of ours")

    pair.bob.serve("broken", broken)
    with pytest.raises(PeerRefusedError) as info:
        await pair.alice.call(pair.bob_at, BOB, "broken", b"", deadline_s=5)
    assert info.value.status == 500
    assert "secret" not in info.value.reason
    assert isinstance(told[0]["exception"], KeyError)


async def test_a_bug_in_on_end_is_told_to_the_loop_and_spoils_nothing(pair: Pair) -> None:
    told: list[dict[str, object]] = []
    failed = asyncio.Event()

    def note(_loop: object, context: dict[str, object]) -> None:
        told.append(context)
        failed.set()

    asyncio.get_running_loop().set_exception_handler(note)

    def broken(_: bool) -> None:
        raise KeyError("commit")

    async def give(_: Incoming) -> Reply:
        return Reply(b"fine", on_end=broken)

    pair.bob.serve("give", give)
    assert (await pair.alice.call(pair.bob_at, BOB, "give", b"", deadline_s=5)).meta == b"fine"
    await asyncio.wait_for(failed.wait(), 5)
    assert isinstance(told[0]["exception"], KeyError)


async def test_closing_twice(pair: Pair) -> None:
    async def echo(incoming: Incoming) -> Reply:
        return Reply(incoming.meta)

    pair.bob.serve("echo", echo)
    await pair.alice.call(pair.bob_at, BOB, "echo", b"x", deadline_s=5)
    await pair.alice.close()
    await pair.alice.close()


# Roles


async def test_a_route_is_for_certain_roles(limited: Pair) -> None:
    """Whoever is certified for others alone is refused by the callee, whatever it says of itself."""
    taken: list[str] = []

    async def take(incoming: Incoming) -> Reply:
        taken.append(incoming.route)
        return Reply(b"")

    limited.bob.serve("exchange", take, roles=RouteRoles(callers=TRAINERS), max_vector_bytes=MIB)
    limited.bob.serve("experience", take, roles=RouteRoles(callers=ACTOR | TRAINERS))
    limited.bob.serve("anything", take)
    with pytest.raises(PeerRefusedError, match="for actor alone makes no learner or server") as told:
        await limited.alice.call(limited.bob_at, BOB, "exchange", b"", vector=vector(4096), deadline_s=5)
    assert told.value.status == 403
    for route in ("experience", "anything"):
        await limited.alice.call(limited.bob_at, BOB, route, b"", deadline_s=5)
    assert taken == ["experience", "anything"]
    assert limited.bob.roles_of(ALICE) == ACTOR
    assert limited.alice.roles_of(BOB) is None


async def test_without_limits_every_route_is_open(pair: Pair) -> None:
    async def take(_: Incoming) -> Reply:
        return Reply(b"")

    pair.bob.serve("exchange", take, roles=RouteRoles(callers=TRAINERS, callees=TRAINERS))
    pair.alice.serve("exchange", take, roles=RouteRoles(callers=TRAINERS, callees=TRAINERS))
    await pair.alice.call(pair.bob_at, BOB, "exchange", b"", deadline_s=5)
    assert pair.bob.roles_of(ALICE) is None


async def test_nobody_is_asked_for_what_its_certificate_doesnt_allow(limited: Pair) -> None:
    """Once it has shown that; an answer that was asked for before isn't believed."""

    async def take(_: Incoming) -> Reply:
        return Reply(b"")

    limited.bob.serve("hello", take)
    limited.bob.serve("state", take, roles=RouteRoles(callees=TRAINERS))
    await limited.alice.call(limited.bob_at, BOB, "hello", b"", deadline_s=5)
    with pytest.raises(PeerRefusedError, match=r"for actor alone .* who alone are asked for state"):
        await limited.bob.call(address_of(limited), ALICE, "state", b"", deadline_s=5)


def address_of(pair: Pair) -> Address:
    """Where Alice listens, or would."""
    return pair.alice.address if isinstance(pair.alice, MemoryTransport) else pair.nowhere
