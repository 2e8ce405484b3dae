"""Nodes of several releases: in which protocol they talk, and what they say when there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.membership.identity import Identity
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Lane, Reply
from p2pdrl.versions import ProtocolRange

KEY = b"the swarm's key"
CALLEE, CALLER = Identity(b"a" * 32), Identity(b"b" * 32)
LIMITS = TransportLimits(shutdown_grace_s=0.05)


class Callee:
    """A node of some release, and in which protocols it was called."""

    def __init__(self, spoken: ProtocolRange, *, tells: bool = True) -> None:
        self.written: list[str] = []
        self.refused: list[str] = []
        self.transport = HttpTransport(
            CALLEE.node_id, "default", CALLEE.tls([KEY]), clock=SystemClock(), limits=LIMITS, spoken=spoken
        )
        self.transport.tell_other_protocols(lambda node, why: self.refused.append(f"{node}: {why}"))
        self.transport.serve("hello", self._answer, max_vector_bytes=8)
        self.app = web.Application(middlewares=[self._note])
        if not tells:
            self.app.on_response_prepare.append(self._before_ranges)
        self.transport.mount(self.app)

    @web.middleware
    async def _note(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        self.written.append(request.headers["P2PDRL-Protocol"])
        return await handler(request)

    @staticmethod
    async def _before_ranges(_: web.Request, response: web.StreamResponse) -> None:
        del response.headers["P2PDRL-Protocols"]

    @staticmethod
    async def _answer(incoming: Incoming) -> Reply:
        got = bytearray(incoming.vector_nbytes)
        await incoming.read_vector_into(memoryview(got))
        return Reply(bytes(got))


@asynccontextmanager
async def callee(
    spoken: ProtocolRange, port: int = 0, *, tells: bool = True
) -> AsyncIterator[tuple[Callee, Address]]:
    node = Callee(spoken, tells=tells)
    listener = Listener(LIMITS, SystemClock(), node.transport.counters)
    at = await listener.listen(node.app, "127.0.0.1", port, has_key=True)
    try:
        yield node, at
    finally:
        await node.transport.close()
        await listener.close()


@pytest.fixture
async def caller_of() -> AsyncIterator[Callable[[ProtocolRange], Awaitable[HttpTransport]]]:
    async with AsyncExitStack() as stack:

        async def make(spoken: ProtocolRange) -> HttpTransport:
            tls = CALLER.tls([KEY])
            made = HttpTransport(
                CALLER.node_id, "default", tls, clock=SystemClock(), limits=LIMITS, spoken=spoken
            )
            await made.start()
            stack.push_async_callback(made.close)
            return made

        yield make


async def hello(caller: HttpTransport, at: Address, lane: Lane = "probe") -> bytes:
    vector = memoryview(b"12345678")
    answer = await caller.call(at, CALLEE.node_id, "hello", b"", vector=vector, deadline_s=5.0, lane=lane)
    return answer.meta


@pytest.mark.parametrize("lane", ["probe", "bulk"])
@pytest.mark.parametrize(
    ("caller", "called", "written"),
    [
        ((6, 7), (6, 7), ["6", "7", "7"]),  # until it is known, the oldest
        ((6, 7), (7, 8), ["6", "7", "7", "7"]),  # the first is refused, and says what can be
        ((7, 8), (6, 7), ["7", "7", "7"]),
        ((6, 9), (5, 8), ["6", "8", "8"]),
        ((6, 6), (6, 7), ["6", "6", "6"]),
    ],
)
async def test_the_newest_that_both_speak(caller_of, caller, called, written, lane: Lane) -> None:
    async with callee(ProtocolRange(*called)) as (node, at):
        mine = await caller_of(ProtocolRange(*caller))
        for _ in range(3):
            assert await hello(mine, at, lane) == b"12345678"
        if lane == "probe":
            assert node.written == written
        assert node.refused == []


async def test_a_release_that_tells_no_range(caller_of) -> None:
    async with callee(ProtocolRange(6, 6), tells=False) as (node, at):
        mine = await caller_of(ProtocolRange(6, 7))
        for _ in range(2):
            assert await hello(mine, at) == b"12345678"
        assert node.written == ["6", "6"]


async def test_a_node_that_goes_back_to_an_earlier_release(caller_of) -> None:
    mine = await caller_of(ProtocolRange(6, 7))
    async with callee(ProtocolRange(6, 7)) as (_, at):
        await hello(mine, at)
    async with callee(ProtocolRange(6, 6), at.port, tells=False) as (node, at):
        for _ in range(2):
            assert await hello(mine, at) == b"12345678"
        assert node.written == ["7", "6", "6"]


@pytest.mark.parametrize("tells", [True, False])
async def test_where_there_is_none_both_ends_say_so(caller_of, tells: bool) -> None:
    async with callee(ProtocolRange(7, 8), tells=tells) as (node, at):
        mine = await caller_of(ProtocolRange(5, 5))
        for _ in range(2):
            with pytest.raises(PeerRefusedError) as refused:
                await hello(mine, at)
            assert refused.value.reason == (
                "this node speaks protocol 5, that one 7–8: install a newer p2pdrl where this node runs"
            )
        words = "this node speaks protocol 7–8, that one 5: install a newer p2pdrl where that one runs"
        assert node.refused == [f"{CALLER.node_id}: {words}"]
