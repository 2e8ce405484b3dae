"""What somebody sees who listens between two nodes, and what it is worth to him."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.opening import HELLO
from p2pdrl.transport.protocol import Address, Incoming, Reply

from .conftest import SERVER_ID, until
from .pipes import LONG_S, end_of
from .stages import Served, calling, staged

META, VECTOR = b"the task's name, say", b"32 weights of a policy, say, ..."
LONG_VECTOR = VECTOR * (PIECE_BYTES // len(VECTOR)) * 2 + VECTOR


@dataclass
class Wire:
    """All connections that were made, each with what was said both ways."""

    address: Address
    said: list[list[bytearray]] = field(default_factory=list)

    def tells(self, words: bytes) -> bool:
        return any(words in bytes(way) for ways in self.said for way in ways)

    @property
    def hellos(self) -> list[bytes]:
        """What callers said on streams and pipes."""
        return [bytes(up) for up, _ in self.said if up.startswith(HELLO)]


@asynccontextmanager
async def tapped(target: Address) -> AsyncIterator[Wire]:
    """A place between a node and those who call it where all is recorded."""
    writers: list[asyncio.StreamWriter] = []
    wire: Wire

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, said: bytearray) -> None:
        try:
            while data := await reader.read(1 << 16):
                said += data
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection(target.host, target.port)
        writers.extend((writer, back))
        ways = [bytearray(), bytearray()]
        wire.said.append(ways)
        await asyncio.gather(carry(reader, back, ways[0]), carry(there, writer, ways[1]))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    wire = Wire(Address("127.0.0.1", server.sockets[0].getsockname()[1]))
    try:
        yield wire
    finally:
        server.close()
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()
        await asyncio.sleep(0)


def serve_mirror(served: Served) -> None:
    async def mirror(incoming: Incoming) -> Reply:
        got = memoryview(bytearray(incoming.vector_nbytes))
        await incoming.read_vector_into(got)
        return Reply(incoming.meta, got)

    served.transport.serve("mirror", mirror, max_vector_bytes=4 * PIECE_BYTES)


async def mirrored(served: Served, wire: Wire, lane: str, **options: Any) -> None:
    """Send something there and back."""
    out = memoryview(bytearray(len(LONG_VECTOR)))
    async with calling(served, **options) as caller:
        answer = await caller.call(
            wire.address,
            SERVER_ID,
            "mirror",
            META,
            vector=memoryview(LONG_VECTOR),
            into=lambda _meta, _nbytes: out,
            deadline_s=LONG_S,
            lane=lane,  # type: ignore[arg-type]
        )
    assert (answer.meta, out) == (META, LONG_VECTOR)


def tells_nothing(wire: Wire) -> bool:
    return not any(map(wire.tells, (META, META[:8], VECTOR, VECTOR[:8], b"P2PDRL", b"mirror", b"stage")))


async def test_posts_tell_nothing(served: Served) -> None:
    serve_mirror(served)
    async with tapped(served.address) as wire:
        await mirrored(served, wire, "probe")
        assert sum(len(way) for ways in wire.said for way in ways) > 2 * len(LONG_VECTOR)
        assert tells_nothing(wire)
        assert not wire.hellos


async def test_streams_tell_no_more_than_the_name_of_a_route(served: Served) -> None:
    serve_mirror(served)
    async with tapped(served.address) as wire:
        await mirrored(served, wire, "bulk")
        assert sum(len(way) for ways in wire.said for way in ways) > 2 * len(LONG_VECTOR)
        (hello,) = wire.hellos
        assert b"mirror" in hello
        assert not any(map(wire.tells, (META, META[:8], VECTOR, VECTOR[:8], b"P2PDRL")))


async def test_pipes_tell_nothing(served: Served) -> None:
    async with staged(served) as (stage, caller), tapped(served.address) as wire:
        pipe = await caller.open_pipe(wire.address, SERVER_ID, "stage", META, deadline_s=LONG_S)
        await until(lambda: len(stage.pipes) == 1)
        with end_of(pipe) as one, end_of(stage.pipes[0]) as other:
            for end, peer in ((one, other), (other, one)):
                end.send(1, META, memoryview(LONG_VECTOR), deadline_s=LONG_S)
                message = await asyncio.to_thread(peer.receive, deadline_s=LONG_S)
                assert (message.meta, message.vector) == (META, LONG_VECTOR)
        assert len(wire.hellos) == 1
        assert tells_nothing(wire)


@pytest.mark.parametrize("who", ["both", "the caller alone", "the callee alone"])
async def test_it_is_shown_only_where_both_trust_their_network(serve_with: Any, quick: Any, who: str) -> None:
    """And this is how it would look if it weren't hidden."""
    limits = replace(quick, header_deadline_s=5.0, stall_deadline_s=5.0)
    async for served in serve_with(limits, hides=who == "the caller alone"):
        serve_mirror(served)
        async with tapped(served.address) as wire:
            await mirrored(served, wire, "bulk", hides=who == "the callee alone")
            assert wire.tells(META) is wire.tells(VECTOR) is (who == "both")
        async with tapped(served.address) as wire:
            await mirrored(served, wire, "probe", hides=False)
            assert tells_nothing(wire), "posts go over TLS all the same"


async def test_a_recorded_stream_is_worth_nothing(served: Served) -> None:
    serve_mirror(served)
    async with tapped(served.address) as wire:
        await mirrored(served, wire, "bulk")
        (hello,) = wire.hellos
    before = served.transport.counters.bytes_in
    assert await served.closes_within(hello[: len(HELLO) + 16], 3.0, None) == b""
    assert await served.closes_within(hello, 3.0, None) == b""
    assert served.transport.counters.refused_connections == 2
    assert served.transport.counters.bytes_in == before


async def test_a_recorded_post_is_worth_nothing(served: Served) -> None:
    async with tapped(served.address) as wire, calling(served) as caller:
        await caller.call(wire.address, SERVER_ID, "take", META, deadline_s=LONG_S)
    assert len(served.taken) == 1
    ((up, _),) = wire.said
    assert META not in await served.closes_within(bytes(up), 3.0, None)
    await until(lambda: served.transport.counters.failed_handshakes == 1)
    assert len(served.taken) == 1
