"""Peers that answer wrongly, hugely, slowly, or send the caller elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, TransportError, WireError
from p2pdrl.transport.auth import new_nonce
from p2pdrl.transport.http.headers import AnswerHead
from p2pdrl.transport.protocol import Address

from .liars import KEYS, PEER, Talk, client, listening, request_of
from .liars import ask as ask_over

Answer = Callable[[str], bytes]


async def ask(to: Address, deadline_s: float = 3.0) -> bytes:
    """What ``to`` answers to the first call of a new caller."""
    async with client() as transport:
        return await ask_over(transport, to, deadline_s)


def once(answer: Answer) -> Talk:
    """Answer the first request with bytes made from its nonce, then stay silent."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, nonce = await request_of(reader)
        writer.write(answer(nonce))
        await writer.drain()

    return talk


def made(
    nonce: str,
    *,
    change: Callable[[AnswerHead], AnswerHead] = lambda head: head,
    forge: Callable[[AnswerHead], AnswerHead] = lambda head: head,
    status: str = "200 OK",
    extra: str = "",
    body: Callable[[bytes], bytes] = lambda body: body,
) -> bytes:
    """An answer, right in all that isn't overridden."""
    head = AnswerHead(sender=PEER, meta_nbytes=4, vector_nbytes=6, nonce=new_nonce())
    head = forge(change(head).sign(KEYS, nonce))
    mac = KEYS.answer_pieces(nonce, head.nonce)
    content = body(b"meta" + mac.of(b"meta") + b"vector" + mac.of(b"vector"))
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.to_headers().items())
    return f"HTTP/1.1 {status}\r\n{lines}{extra}Content-Length: {len(content)}\r\n\r\n".encode() + content


async def test_a_right_answer_is_taken() -> None:
    async with listening(once(made)) as to:
        assert await ask(to) == b"metavector"


WRONG: dict[str, Answer] = {
    "not HTTP": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "endless header line": lambda _: b"HTTP/1.1 200 OK\r\nX: " + b"x" * 100_000,
    "other content type": lambda _: (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 0\r\n\r\n"
    ),
    "no headers of ours": lambda _: (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/x-p2pdrl\r\nContent-Length: 0\r\n\r\n"
    ),
    "gzip": lambda n: made(n, extra="Content-Encoding: gzip\r\n"),
    "redirect": lambda n: made(n, status="302 Found", extra="Location: http://169.254.169.254/\r\n"),
    "no mac": lambda n: made(n, forge=lambda head: replace(head, mac="")),
    "forged length": lambda n: made(n, forge=lambda head: replace(head, vector_nbytes=5)),
    "answer to another request": lambda _: made(new_nonce()),
    "another node": lambda n: made(n, change=lambda head: replace(head, sender="c" * 32)),
    "huge metadata": lambda n: made(n, change=lambda head: replace(head, meta_nbytes=10**12)),
    "huge vector": lambda n: made(n, change=lambda head: replace(head, vector_nbytes=10**12)),
    "unwanted vector": lambda n: made(
        n, change=lambda head: replace(head, vector_nbytes=101), body=lambda body: body + bytes(95)
    ),
    "longer body": lambda n: made(n, body=lambda body: body + b"x"),
    "changed metadata": lambda n: made(n, body=lambda body: b"M" + body[1:]),
    "changed vector": lambda n: made(n, body=lambda body: body[:20] + b"V" + body[21:]),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_answers_are_wire_errors(name: str) -> None:
    async with listening(once(WRONG[name])) as to:
        with pytest.raises(WireError):
            await ask(to)


async def test_an_answer_that_breaks_off_is_a_wire_error() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await once(lambda nonce: made(nonce)[:-5])(reader, writer)
        writer.close()

    async with listening(talk) as to:
        with pytest.raises(WireError):
            await ask(to)


async def test_a_connection_that_breaks_before_the_answer() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.close()

    async with listening(talk) as to:
        with pytest.raises(PeerUnreachableError, match="broke"):
            await ask(to)


SLOW: dict[str, Answer] = {
    "silent": lambda _: b"",
    "half a header": lambda n: made(n)[:50],
    "no body": lambda n: made(n).partition(b"\r\n\r\n")[0] + b"\r\n\r\n",
    "half a vector": lambda n: made(n)[:-5],
}


@pytest.mark.parametrize("name", SLOW)
async def test_slow_answers_meet_a_deadline(name: str) -> None:
    started = time.monotonic()
    async with listening(once(SLOW[name])) as to:
        with pytest.raises(PeerTimeoutError):
            await ask(to, deadline_s=0.3)
    assert time.monotonic() - started < 2.0


async def test_endless_interim_answers_meet_the_deadline() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        while True:
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 10)
            await writer.drain()
            await asyncio.sleep(0.005)

    async with listening(talk) as to:
        with pytest.raises(TransportError):
            await ask(to, deadline_s=0.3)


async def test_a_refusal_is_cut_and_made_printable() -> None:
    text = b"\x1b[31m<script>\0\xff" + b"x" * 1_000_000
    head = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    async with listening(once(lambda _: head + text)) as to:
        with pytest.raises(PeerRefusedError) as info:
            await ask(to)
    assert info.value.status == 403
    assert len(info.value.reason) == 500
    assert info.value.reason.isprintable()


async def test_a_stalled_refusal_is_still_a_refusal() -> None:
    async with listening(once(lambda _: b"HTTP/1.1 429 Slow Down\r\nContent-Length: 100\r\n\r\nbusy")) as to:
        with pytest.raises(PeerRefusedError, match="busy"):
            await ask(to)


async def test_a_call_after_closing_is_told_plainly() -> None:
    async with client() as transport:
        pass
    with pytest.raises(PeerUnreachableError, match="closed"):
        await transport.call(Address("127.0.0.1", 1), None, "any", b"", deadline_s=1)


async def test_metadata_addresses_are_not_dialled() -> None:
    async with client() as transport:
        with pytest.raises(PeerUnreachableError, match="metadata"):
            await transport.call(Address("169.254.169.254", 80), None, "any", b"", deadline_s=1)
