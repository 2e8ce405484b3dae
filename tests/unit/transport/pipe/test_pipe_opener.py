"""Asking for pipes: peers that answer wrongly, slowly or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.auth import MAC_BYTES, SwarmKeys, new_nonce
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.pipe.ticket import MAX_PIPE_META_BYTES, Pipe
from p2pdrl.transport.protocol import Address

from ..liars import KEYS, PEER, client, listening, request_of
from ..pipes import LONG_S, Writer, end_of
from ..stream_liars import opened

META = b"welcome"
NOWHERE = Address("127.0.0.1", 1)
Open = Callable[[str], bytes]


def answered(nonce: str, mac: bytes | None = None, **more: Any) -> bytes:
    """The answer to a request for a pipe, right in all that isn't overridden."""
    ours = new_nonce()
    if mac is None:
        mac = KEYS.answer_pieces(nonce, ours).of(META)
    more = {"change": lambda head: replace(head, meta_nbytes=len(META)), "upgrade": "p2pdrl-pipe", **more}
    return opened(nonce, answer_nonce=ours, extra=META + mac, **more)


@asynccontextmanager
async def peer(opening: Open, then: str = "silence") -> AsyncIterator[tuple[Address, list[bytes]]]:
    """A server that answers requests for pipes; ``bodies`` holds what they carried."""
    bodies: list[bytes] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line, nonce = await request_of(reader)
        assert line == "POST /p2p-pipe/stage HTTP/1.1"
        bodies.append(await reader.readexactly(5 + MAC_BYTES))
        writer.write(opening(nonce))
        if then == "end":
            writer.close()

    async with listening(connected) as address:
        yield address, bodies


async def ask(transport: HttpTransport, to: Address, deadline_s: float = 3.0) -> Pipe:
    return await transport.open_pipe(to, PEER, "stage", b"hello", deadline_s=deadline_s)


async def test_the_answer_and_what_follows_it_at_once() -> None:
    keys: list[tuple[bytes, bytes]] = []

    def opening(nonce: str) -> bytes:
        ours = new_nonce()
        keys.append(KEYS.pipe(nonce, ours))
        mac = KEYS.answer_pieces(nonce, ours).of(META)
        early = Writer(keys[0][1]).message(4, b"early", b"vector")
        return opened(
            nonce,
            answer_nonce=ours,
            upgrade="p2pdrl-pipe",
            change=lambda head: replace(head, meta_nbytes=len(META)),
            extra=META + mac + early,
        )

    async with peer(opening) as (to, bodies), client() as transport:
        pipe = await ask(transport, to)
        assert (pipe.peer, pipe.meta, pipe.ticket.keys) == (PEER, META, keys[0])
        assert bodies[0][:5] == b"hello"
        with end_of(pipe) as end:
            message = await asyncio.to_thread(end.receive, deadline_s=LONG_S)
            assert (message.kind, message.meta, message.vector) == (4, b"early", b"vector")


WRONG: dict[str, Open] = {
    "not HTTP": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "endless header": lambda _: b"HTTP/1.1 101 x\r\nX: " + b"x" * 100_000,
    "success": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "redirect": lambda _: b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n",
    "no headers of ours": lambda _: b"HTTP/1.1 101 x\r\nUpgrade: p2pdrl-pipe\r\n\r\n",
    "a stream": lambda n: answered(n, upgrade="p2pdrl"),
    "no mac": lambda n: answered(n, forge=lambda head: replace(head, mac="")),
    "bad mac": lambda n: answered(n, forge=lambda head: replace(head, mac="0" * 64)),
    "forged nonce": lambda n: answered(n, forge=lambda head: replace(head, nonce=new_nonce())),
    "answer to another request": lambda _: answered(new_nonce()),
    "another node": lambda n: answered(n, change=lambda h: replace(h, sender="c" * 32, meta_nbytes=7)),
    "another swarm's key": lambda n: answered(
        n, forge=lambda head: replace(head, mac="").sign(SwarmKeys(b"other"), n)
    ),
    "changed metadata": lambda n: answered(n)[: -MAC_BYTES - 1] + b"E" + answered(n)[-MAC_BYTES:],
    "metadata with another mac": lambda n: answered(n, mac=bytes(MAC_BYTES)),
    "shortened metadata": lambda n: answered(n, forge=lambda head: replace(head, meta_nbytes=6)),
    "huge metadata": lambda n: answered(n, change=lambda h: replace(h, meta_nbytes=MAX_PIPE_META_BYTES + 1)),
    "a vector": lambda n: answered(n, change=lambda h: replace(h, meta_nbytes=7, vector_nbytes=1)),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_answers_are_wire_errors(name: str) -> None:
    async with peer(WRONG[name]) as (to, _), client() as transport:
        with pytest.raises(WireError):
            await ask(transport, to)


@pytest.mark.parametrize("status", [404, 405, 426, 501, 500])
async def test_a_refusal_keeps_its_status_and_reason(status: int) -> None:
    raw = f"HTTP/1.1 {status} x\r\nContent-Length: 2\r\n\r\nno".encode()
    async with peer(lambda _: raw) as (to, _), client() as transport:
        with pytest.raises(PeerRefusedError) as info:
            await ask(transport, to)
        assert (info.value.status, info.value.reason) == (status, "no")


@pytest.mark.parametrize("cut", [0, 10, -1, -MAC_BYTES - 3])
async def test_an_answer_that_breaks_off(cut: int) -> None:
    async with peer(lambda n: answered(n)[:cut], then="end") as (to, _), client() as transport:
        with pytest.raises(PeerUnreachableError):
            await ask(transport, to)


@pytest.mark.parametrize("cut", [0, 10, -1])
async def test_an_answer_that_stops(cut: int) -> None:
    async with peer(lambda n: answered(n)[:cut]) as (to, _), client() as transport:
        with pytest.raises(PeerTimeoutError):
            await ask(transport, to, 0.3)


async def test_nobody_there() -> None:
    async with peer(answered) as (to, _), client() as transport:
        pass
    async with client() as transport:
        with pytest.raises(PeerUnreachableError, match="nothing listens"):
            await ask(transport, to)
    with pytest.raises(PeerUnreachableError, match="closed"):
        await ask(transport, to)


async def test_closing_ends_what_is_being_opened() -> None:
    async with peer(lambda _: b"") as (to, bodies), client() as transport:
        opening = asyncio.create_task(ask(transport, to, LONG_S))
        async with asyncio.timeout(5):
            while not bodies:  # noqa: ASYNC110 - the peer tells nobody
                await asyncio.sleep(0.005)
        await transport.close()
        with pytest.raises(PeerUnreachableError):
            await opening


async def test_names_and_lengths_that_cannot_be_asked_for() -> None:
    async with client() as transport:
        with pytest.raises(ValueError, match="route"):
            await transport.open_pipe(NOWHERE, PEER, "../stage", b"", deadline_s=1)
        with pytest.raises(ValueError, match="too many"):
            await transport.open_pipe(NOWHERE, PEER, "stage", bytes(MAX_PIPE_META_BYTES + 1), deadline_s=1)
