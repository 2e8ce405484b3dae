"""Callers' streams: kept, replaced, shared and closed; and peers that offer none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError, PeerUnreachableError
from p2pdrl.transport.framing import AnswerFrame
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.protocol import Address, Incoming, Reply

from ..conftest import KEY, SERVER, until
from ..liars import LIMITS, PEER, client
from ..stream_liars import Liar, ask, forever, once, peer

ASKED = "POST /p2p-stream HTTP/1.1"


async def test_a_stream_is_left_after_its_last_answer() -> None:
    async def talk(liar: Liar) -> None:
        await liar.call()
        liar.writer.write(liar.answer(b"bye", b"", AnswerFrame(200, 3, 0, True)))
        await asyncio.sleep(60)

    async with peer(talk) as (to, seen), client() as transport:
        for _ in range(2):
            assert await ask(transport, to) == b"bye"
        assert seen == [ASKED, "stream"] * 2


@pytest.mark.parametrize("how", ["ended", "spoke"])
async def test_a_stale_stream_is_replaced(how: str) -> None:
    async def talk(liar: Liar) -> None:
        await liar.call()
        liar.writer.write(liar.answer())
        if how == "spoke":
            liar.writer.write(b"?")
        else:
            liar.writer.close()

    async with peer(talk) as (to, seen), client() as transport:
        for _ in range(2):
            assert await ask(transport, to) == b"metavector"
            await asyncio.sleep(0.05)
        assert seen == [ASKED, "stream"] * 2


async def test_idle_streams_are_closed() -> None:
    ended = asyncio.Event()

    async def talk(liar: Liar) -> None:
        await liar.call()
        liar.writer.write(liar.answer())
        assert await liar.reader.read() == b""
        ended.set()

    async with peer(talk) as (to, _), client(replace(LIMITS, client_keepalive_s=0.1)) as transport:
        await ask(transport, to)
        await asyncio.wait_for(ended.wait(), 3)


@pytest.mark.parametrize("when", ["asking", "opening", "answering"])
async def test_closing_ends_calls(when: str) -> None:
    more: dict[str, Any] = {"asking": {"offer": lambda _: b"HTTP/1.1"}, "opening": {"welcome": b""}}.get(
        when, {}
    )
    async with peer(once(lambda _: b""), **more) as (to, seen), client() as transport:
        calling = asyncio.create_task(ask(transport, to))
        await until(lambda: len(seen) == (1 if when == "asking" else 2))
        await transport.close()
        with pytest.raises(PeerUnreachableError):
            await asyncio.wait_for(calling, 1)


@asynccontextmanager
async def node(limits: TransportLimits = LIMITS) -> AsyncIterator[tuple[HttpTransport, Listener, Address]]:
    async with client(limits, SERVER) as transport:

        async def echo(incoming: Incoming) -> Reply:
            return Reply(incoming.meta)

        transport.serve("any", echo)
        app = web.Application()
        transport.mount(app)
        listener = Listener(limits, SystemClock(), transport.counters)
        address = await listener.listen(app, "127.0.0.1", 0, has_key=True)
        try:
            yield transport, listener, address
        finally:
            await listener.close()


async def test_peers_without_streams_are_posted_to() -> None:
    async with node(replace(LIMITS, max_streams_per_peer=0)) as (served, _, to), client() as transport:
        for _ in range(3):
            assert await ask(transport, to) == b""
        assert served.counters.refused == {404: 1}, "asked for a stream once"


@pytest.mark.parametrize("status", [404, 405, 426, 501])
async def test_a_peer_that_knows_no_streams_is_posted_to(status: int) -> None:
    def offer(_: object) -> bytes:
        return f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()

    async with peer(offer=offer) as (to, seen), client() as transport:
        with pytest.raises(PeerRefusedError):
            await ask(transport, to)
        assert seen == [ASKED, "POST /p2p/any HTTP/1.1"]


async def test_streams_are_tried_again_after_a_while() -> None:
    async with (
        node(replace(LIMITS, max_streams_per_peer=0)) as (served, _, to),
        client(replace(LIMITS, stream_retry_s=0.05)) as transport,
    ):
        await ask(transport, to)
        await asyncio.sleep(0.06)
        await ask(transport, to)
        assert served.counters.refused == {404: 2}


async def test_many_calls_share_a_few_streams() -> None:
    async with node() as (_, listener, to), client() as transport:
        await asyncio.gather(*(ask(transport, to) for _ in range(20)))
        most = LIMITS.bulk_connections_per_host
        assert listener.connections <= 2 * most, "streams, and the connections over which they were asked for"
        await transport.close()
        await until(lambda: listener.connections == 0)


async def test_a_node_that_closes_is_unreachable() -> None:
    async with node() as (_, listener, to), client() as transport:
        await ask(transport, to)
        await listener.close()
        assert listener.connections == 0
        with pytest.raises(PeerUnreachableError) as info:
            await ask(transport, to)
        assert not info.value.sent


async def test_the_probe_lane_takes_no_streams() -> None:
    async with node(replace(LIMITS, max_streams_per_peer=0)) as (served, _, to), client() as transport:
        await transport.call(to, PEER, "any", b"", deadline_s=3)
        assert not served.counters.refused, "never asked for a stream"


@pytest.mark.parametrize("anew", [True, False])
async def test_streams_end_with_the_key_by_which_their_peers_proved_themselves(anew: bool) -> None:
    async with peer(forever) as (to, seen), client() as transport:
        assert await ask(transport, to) == b"metavector"
        transport.use_keys([KEY, b"the next key"], anew=anew)
        assert await ask(transport, to) == b"metavector"
        assert seen == [ASKED, "stream"] * (2 if anew else 1)


async def test_a_swarm_without_a_key_has_none_to_be_replaced() -> None:
    transport = HttpTransport(PEER, "default", None, clock=SystemClock())
    with pytest.raises(ValueError, match="without a key"):
        transport.use_keys([KEY], anew=True)
