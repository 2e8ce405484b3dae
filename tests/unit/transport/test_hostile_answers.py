"""Peers that answer wrongly, hugely, slowly, or send the caller elsewhere."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, TransportError, WireError
from p2pdrl.transport.protocol import Address

from .answers import WRONG, answered
from .conftest import CLIENT, OTHER_ID
from .liars import OTHER_TLS, Talk, client, listening, request_of
from .liars import ask as ask_over


async def ask(to: Address, deadline_s: float = 3.0) -> bytes:
    """What ``to`` answers to the first call of a new caller."""
    async with client() as transport:
        return await ask_over(transport, to, deadline_s)


def once(answer: bytes) -> Talk:
    """Answer the first request, then stay silent."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answer)
        await writer.drain()

    return talk


async def test_a_right_answer_is_taken() -> None:
    async with listening(once(answered())) as to:
        assert await ask(to) == b"metavector"


WRONG_ANSWERS: dict[str, bytes] = {
    **WRONG,
    "gzip": answered(extra="Content-Encoding: gzip\r\n"),
    "another length": answered(change=lambda head: replace(head, vector_nbytes=5)),
    "huge metadata": answered(change=lambda head: replace(head, meta_nbytes=10**12)),
    "huge vector": answered(change=lambda head: replace(head, vector_nbytes=10**12)),
    "unwanted vector": answered(vector=bytes(101)),
    "longer body": answered(body=lambda body: body + b"x"),
    "another's name": answered(change=lambda head: replace(head, sender=OTHER_ID)),
}


@pytest.mark.parametrize("name", WRONG_ANSWERS)
async def test_wrong_answers_are_wire_errors(name: str) -> None:
    async with listening(once(WRONG_ANSWERS[name])) as to:
        with pytest.raises(WireError):
            await ask(to)


async def test_nobody_answers_in_another_s_name() -> None:
    async with listening(once(answered()), tls=OTHER_TLS) as to:
        with pytest.raises(WireError, match=f"{OTHER_ID} answered in the name of"):
            await ask(to)


async def test_nobody_answers_in_place_of_another() -> None:
    answer = answered(change=lambda head: replace(head, sender=OTHER_ID))
    async with listening(once(answer), tls=OTHER_TLS) as to:
        with pytest.raises(WireError, match=f"{OTHER_ID} answered in place of"):
            await ask(to)
        async with client() as transport:
            with pytest.raises(WireError, match="isn't wanted"):
                await transport.call(to, None, "any", b"", deadline_s=3)
    async with (
        listening(
            once(answered(vector=b"", change=lambda h: replace(h, sender=OTHER_ID))), tls=OTHER_TLS
        ) as to,
        client() as transport,
    ):
        assert (await transport.call(to, None, "any", b"", deadline_s=3)).sender == OTHER_ID


async def test_each_answer_on_a_kept_connection_is_checked() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await request_of(reader)
        writer.write(answered())
        await request_of(reader)
        writer.write(answered(change=lambda head: replace(head, sender=OTHER_ID)))

    async with listening(talk) as to, client() as transport:
        assert await ask_over(transport, to) == b"metavector"
        with pytest.raises(WireError, match="in the name of"):
            await ask_over(transport, to)


async def test_a_peer_of_another_swarm_is_told_from_its_certificate() -> None:
    strangers = CLIENT.tls([b"another key"]).server
    async with listening(once(answered()), tls=strangers) as to:
        for lane in ("probe", "bulk"):
            async with client() as transport:
                with pytest.raises(PeerRefusedError, match="--swarm-key-file") as info:
                    await ask_over(transport, to, lane=lane)
                assert info.value.status == 403
                assert "another swarm" in info.value.reason


async def test_a_peer_without_tls_is_nobody_for_sure() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")

    async with listening(talk, tls=None) as to:
        with pytest.raises(PeerRefusedError, match="without TLS") as info:
            await ask(to)
        assert info.value.status == 503


async def test_a_peer_that_hangs_up_in_the_handshake_is_unreachable() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.close()

    async with listening(talk, tls=None) as to:
        with pytest.raises(PeerUnreachableError) as info:
            await ask(to)
        assert not info.value.sent


@pytest.mark.parametrize("status", [429, 404, 410, 503])
async def test_a_refusal_in_anothers_name_isnt_believed(status: int) -> None:
    """It would count as a sign of life of the one that was asked, or of its absence."""
    raw = f"HTTP/1.1 {status} x\r\nContent-Length: 2\r\n\r\nno".encode()
    async with listening(once(raw), tls=OTHER_TLS) as to:
        with pytest.raises(WireError, match=f"{OTHER_ID} refused in place of"):
            await ask(to)


async def test_who_is_another_may_say_so() -> None:
    raw = b"HTTP/1.1 403 x\r\nContent-Length: 2\r\n\r\nno"
    async with listening(once(raw), tls=OTHER_TLS) as to:
        with pytest.raises(PeerRefusedError, match="403"):
            await ask(to)


async def test_keys_that_are_replaced_are_used_by_the_next_call() -> None:
    """Also where a connection is kept that was good with the old ones."""
    async with listening(once(answered())) as to, client() as transport:
        assert await ask_over(transport, to) == b"metavector"
        transport.use_keys([b"another key"], anew=False)
        with pytest.raises(PeerRefusedError, match="--swarm-key-file"):
            await ask_over(transport, to)


async def test_an_answer_that_breaks_off_is_a_wire_error() -> None:
    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await once(answered()[:-5])(reader, writer)
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


SLOW: dict[str, bytes] = {
    "silent": b"",
    "half a header": answered()[:50],
    "no body": answered().partition(b"\r\n\r\n")[0] + b"\r\n\r\n",
    "half a vector": answered()[:-5],
}


@pytest.mark.parametrize("name", SLOW)
async def test_slow_answers_meet_a_deadline(name: str) -> None:
    started = time.monotonic()
    async with listening(once(SLOW[name])) as to:
        with pytest.raises(PeerTimeoutError):
            await ask(to, deadline_s=0.3)
    assert time.monotonic() - started < 2.0


async def test_a_handshake_that_isn_t_answered_meets_the_deadline() -> None:
    async def talk(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        await reader.read()

    async with listening(talk, tls=None) as to:
        with pytest.raises(PeerTimeoutError):
            await ask(to, deadline_s=0.3)


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
    async with listening(once(head + text)) as to:
        with pytest.raises(PeerRefusedError) as info:
            await ask(to)
    assert info.value.status == 403
    assert len(info.value.reason) == 500
    assert info.value.reason.isprintable()


async def test_a_stalled_refusal_is_still_a_refusal() -> None:
    async with listening(once(b"HTTP/1.1 429 Slow Down\r\nContent-Length: 100\r\n\r\nbusy")) as to:
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
