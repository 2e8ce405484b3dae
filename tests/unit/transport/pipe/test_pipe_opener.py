"""Asking for pipes: peers that answer wrongly, slowly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import TransportLimits
from p2pdrl.transport.opening import HELLO, OPENED, TOKEN_BYTES, ConnectionOpening
from p2pdrl.transport.pipe.server import PipeAnswer
from p2pdrl.transport.pipe.ticket import MAX_PIPE_META_BYTES, Pipe
from p2pdrl.transport.protocol import Address

from ..answers import WRONG, answered
from ..conftest import OTHER_ID, until
from ..liars import LIMITS, PEER, client, listening, request_of
from ..pipes import LONG_S, Writer, end_of

META = b"welcome"
NOWHERE = Address("127.0.0.1", 1)
Offer = Callable[[ConnectionOpening], bytes]


def offered(opening: ConnectionOpening, **changes: Any) -> bytes:
    """The answer to a request for a pipe, right in all that isn't overridden."""
    return answered(PipeAnswer(opening, META).encode(), b"", **changes)


@asynccontextmanager
async def peer(
    offer: Offer = offered,
    then: str = "silence",
    welcome: Callable[[ConnectionOpening], bytes] = lambda _: OPENED,
) -> AsyncIterator[tuple[Address, list[bytes]]]:
    """A server that answers requests for pipes; ``bodies`` holds what they carried, and the hellos."""
    bodies: list[bytes] = []
    openings: list[ConnectionOpening] = []

    async def asked(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await request_of(reader) == "POST /p2p-pipe/stage HTTP/1.1"
        bodies.append(await reader.readexactly(5))
        openings.append(ConnectionOpening.new(sealed=True, hides=True))
        writer.write(offer(openings[-1]))
        if then == "end":
            writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        bodies.append(await reader.readexactly(len(HELLO) + TOKEN_BYTES))
        assert bodies[-1] == HELLO + openings[-1].token
        writer.write(welcome(openings[-1]))
        if then == "end after the welcome":
            writer.close()

    async with listening(asked, connected) as address:
        yield address, bodies


async def ask(transport: HttpTransport, to: Address, deadline_s: float = 3.0) -> Pipe:
    return await transport.open_pipe(to, PEER, "stage", b"hello", deadline_s=deadline_s)


async def test_the_answer_and_what_follows_it_at_once() -> None:
    keys: list[tuple[bytes, bytes] | None] = []

    def welcome(opening: ConnectionOpening) -> bytes:
        assert opening.keys is not None
        keys.append(opening.keys)
        return OPENED + Writer(opening.keys[1]).message(4, b"early", b"vector")

    async with peer(welcome=welcome) as (to, bodies), client() as transport:
        pipe = await ask(transport, to)
        assert (pipe.peer, pipe.meta, pipe.ticket.keys) == (PEER, META, keys[0])
        assert pipe.ticket.hides
        assert bodies[0] == b"hello"
        with end_of(pipe) as end:
            message = await asyncio.to_thread(end.receive, deadline_s=LONG_S)
            assert (message.kind, message.meta, message.vector) == (4, b"early", b"vector")


def with_meta(opening: ConnectionOpening, meta: bytes) -> bytes:
    return answered(PipeAnswer(opening, meta).encode(), b"")


WRONG_OFFERS: dict[str, Offer] = {
    **{name: lambda _, raw=raw: raw for name, raw in WRONG.items()},
    "another's name": lambda o: offered(o, change=lambda h: replace(h, sender=OTHER_ID)),
    "no opening": lambda _: answered(META, b""),
    "an opening alone": lambda o: answered(o.encode(), b""),
    "a short token": lambda o: offered(ConnectionOpening(o.token[:-1], o.keys, o.hides)),
    "a short key": lambda o: offered(ConnectionOpening(o.token, (bytes(31), bytes(32)), o.hides)),
    "no keys": lambda o: offered(ConnectionOpening(o.token, None, o.hides)),
    "proofs alone": lambda o: offered(ConnectionOpening(o.token, o.keys, hides=False)),
    "huge metadata": lambda o: with_meta(o, bytes(MAX_PIPE_META_BYTES + 1)),
    "a vector": lambda o: answered(PipeAnswer(o, META).encode(), b"vector"),
}
ROOMY = replace(LIMITS, max_answer_meta_bytes=TransportLimits().max_answer_meta_bytes)


@pytest.mark.parametrize("name", WRONG_OFFERS)
async def test_wrong_offers_are_wire_errors(name: str) -> None:
    async with peer(WRONG_OFFERS[name]) as (to, bodies), client(ROOMY) as transport:
        with pytest.raises(WireError):
            await ask(transport, to)
        assert len(bodies) == 1, "nothing was opened"


async def test_who_wants_no_more_than_proofs_takes_them() -> None:
    async with (
        peer(lambda o: offered(ConnectionOpening(o.token, o.keys, hides=False))) as (to, _),
        client(hides=False) as transport,
    ):
        pipe = await ask(transport, to)
        assert not pipe.ticket.hides
        assert pipe.ticket.keys is not None
        pipe.close()


@pytest.mark.parametrize("welcome", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0"])
async def test_wrong_welcomes_are_wire_errors(welcome: bytes) -> None:
    async with peer(welcome=lambda _: welcome) as (to, _), client() as transport:
        with pytest.raises(WireError, match="another protocol"):
            await ask(transport, to)


@pytest.mark.parametrize("status", [404, 405, 426, 501, 500])
async def test_a_refusal_keeps_its_status_and_reason(status: int) -> None:
    raw = f"HTTP/1.1 {status} x\r\nContent-Length: 2\r\n\r\nno".encode()
    async with peer(lambda _: raw) as (to, _), client() as transport:
        with pytest.raises(PeerRefusedError) as info:
            await ask(transport, to)
        assert (info.value.status, info.value.reason) == (status, "no")


@pytest.mark.parametrize(
    ("cut", "kind"), [(0, PeerUnreachableError), (10, PeerUnreachableError), (-1, WireError)]
)
async def test_an_answer_that_breaks_off(cut: int, kind: type[Exception]) -> None:
    async with peer(lambda o: offered(o)[:cut], then="end") as (to, _), client() as transport:
        with pytest.raises(kind):
            await ask(transport, to)


async def test_a_connection_that_breaks_before_its_welcome() -> None:
    async with (
        peer(then="end after the welcome", welcome=lambda _: b"") as (to, _),
        client() as transport,
    ):
        with pytest.raises(PeerUnreachableError, match="broke"):
            await ask(transport, to)


@pytest.mark.parametrize("cut", [0, 10, -1])
async def test_an_answer_that_stops(cut: int) -> None:
    async with peer(lambda o: offered(o)[:cut]) as (to, _), client() as transport:
        with pytest.raises(PeerTimeoutError):
            await ask(transport, to, 0.3)


async def test_a_welcome_that_doesn_t_come() -> None:
    async with peer(welcome=lambda _: b"") as (to, _), client() as transport:
        with pytest.raises(PeerTimeoutError):
            await ask(transport, to)


async def test_nobody_there() -> None:
    async with peer() as (to, _), client() as transport:
        pass
    async with client() as transport:
        with pytest.raises(PeerUnreachableError, match="nothing listens"):
            await ask(transport, to)
    with pytest.raises(PeerUnreachableError, match="closed"):
        await ask(transport, to)


@pytest.mark.parametrize("when", ["asking", "opening"])
async def test_closing_ends_what_is_being_opened(when: str) -> None:
    offer: Offer = (lambda _: b"") if when == "asking" else offered
    patient = replace(LIMITS, stall_deadline_s=LONG_S)
    async with peer(offer, welcome=lambda _: b"") as (to, bodies), client(patient) as transport:
        opening = asyncio.create_task(ask(transport, to, LONG_S))
        await until(lambda: len(bodies) == (1 if when == "asking" else 2))
        await transport.close()
        with pytest.raises(PeerUnreachableError):
            await opening


async def test_names_and_lengths_that_cannot_be_asked_for() -> None:
    async with client() as transport:
        with pytest.raises(ValueError, match="route"):
            await transport.open_pipe(NOWHERE, PEER, "../stage", b"", deadline_s=1)
        with pytest.raises(ValueError, match="too many"):
            await transport.open_pipe(NOWHERE, PEER, "stage", bytes(MAX_PIPE_META_BYTES + 1), deadline_s=1)
