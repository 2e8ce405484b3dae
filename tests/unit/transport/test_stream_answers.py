"""Callers on streams: peers that answer wrongly, slowly or not at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.framing import HEAD_BYTES, AnswerFrame, CallFrame
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.opening import OPENED, TOKEN_BYTES, ConnectionOpening

from .answers import WRONG, answered
from .conftest import OTHER_ID
from .liars import PEER, client
from .stream_liars import Liar, Offer, ask, forever, offered, once, peer

ASKED = "POST /p2p-stream HTTP/1.1"


async def test_right_answers_on_one_stream() -> None:
    async with peer(forever) as (to, seen), client() as transport:
        for _ in range(3):
            assert await ask(transport, to) == b"metavector"
        assert seen == [ASKED, "stream"]


def without_keys(opening: ConnectionOpening) -> bytes:
    return offered(ConnectionOpening(opening.token, None, opening.hides))


WRONG_OFFERS: dict[str, Offer] = {
    **{name: lambda _, raw=raw: raw for name, raw in WRONG.items()},
    "another's name": lambda o: offered(o, change=lambda head: replace(head, sender=OTHER_ID)),
    "no opening": lambda _: answered(b"", b""),
    "not msgpack": lambda _: answered(b"\xc1" * 40, b""),
    "a short token": lambda o: answered(o.encode().replace(o.token, o.token[:-1]), b""),
    "a vector": lambda o: answered(o.encode(), b"vector"),
    "no keys": without_keys,
    "proofs alone": lambda o: offered(ConnectionOpening(o.token, o.keys, hides=False)),
}


@pytest.mark.parametrize("name", WRONG_OFFERS)
async def test_wrong_offers_are_wire_errors(name: str) -> None:
    async with peer(offer=WRONG_OFFERS[name]) as (to, seen), client() as transport:
        with pytest.raises(WireError):
            await ask(transport, to)
        assert seen == [ASKED], "nothing was opened"


async def test_who_wants_no_more_than_proofs_takes_either() -> None:
    for hides in (True, False):
        async with peer(forever, hides=hides) as (to, _), client(hides=False) as transport:
            assert await ask(transport, to) == b"metavector"
    async with peer(offer=without_keys) as (to, _), client(hides=False) as transport:
        with pytest.raises(WireError, match="isn't encrypted"):
            await ask(transport, to)


@pytest.mark.parametrize("welcome", [b"HTTP/1.1 400 Bad Request\r\n\r\n", b"\0", OPENED + b"x"])
async def test_wrong_welcomes_are_wire_errors(welcome: bytes) -> None:
    async with peer(welcome=welcome) as (to, _), client() as transport:
        with pytest.raises(WireError):
            await ask(transport, to)


async def test_a_token_that_isn_t_known_any_more() -> None:
    def offer(opening: ConnectionOpening) -> bytes:
        return offered(ConnectionOpening(bytes(TOKEN_BYTES), opening.keys, opening.hides))

    async with peer(offer=offer, talk=forever) as (to, seen), client() as transport:
        with pytest.raises(PeerUnreachableError, match="broke"):
            await ask(transport, to)
        assert seen == [ASKED]


def changed(raw: bytes, at: int) -> bytes:
    bad = bytearray(raw)
    bad[at] ^= 1
    return bytes(bad)


WRONG_ANSWERS: dict[str, Callable[[Liar], bytes]] = {
    "not a frame": lambda _: b"HTTP/1.1 200 OK\r\n\r\n",
    "a call": lambda _: CallFrame(4, 0, 0).encode() + b"take" + bytes(16),
    "odd status": lambda liar: liar.answer(frame=AnswerFrame(302, 4, 6, False)),
    "no tag": lambda _: AnswerFrame(200, 4, 0, False).encode() + b"meta" + bytes(16),
    "huge metadata": lambda _: AnswerFrame(200, 10**9, 0, False).encode(),
    "huge refusal": lambda _: AnswerFrame(403, 10**6, 0, False).encode(),
    "refusal with a vector": lambda liar: liar.answer(frame=AnswerFrame(403, 4, 6, False)),
    "huge vector": lambda liar: liar.answer(frame=AnswerFrame(200, 4, 10**12, False)),
    "vector beyond all bounds": lambda _: AnswerFrame(200, 4, 0, False).encode()[:8] + b"\xff" * 8,
    "unwanted vector": lambda liar: liar.answer(vector=bytes(101)),
    "changed head": lambda liar: changed(liar.answer(), 2),
    "changed metadata": lambda liar: changed(liar.answer(), HEAD_BYTES),
    "changed vector": lambda liar: changed(liar.answer(), -17),
    "changed tag": lambda liar: changed(liar.answer(), -1),
    "forged refusal": lambda _: AnswerFrame(403, 0, 0, True).encode() + bytes(16),
    "an answer left out": lambda liar: liar.answer()[:0] + liar.answer(),
}


@pytest.mark.parametrize("hides", [True, False], ids=["hidden", "proven"])
@pytest.mark.parametrize("name", WRONG_ANSWERS)
async def test_wrong_answers_are_wire_errors(name: str, hides: bool) -> None:
    async with peer(once(WRONG_ANSWERS[name]), hides=hides) as (to, _), client(hides=hides) as transport:
        with pytest.raises(WireError):
            await ask(transport, to)


async def test_an_answer_of_another_length_than_the_buffer_is_a_bug() -> None:
    async with peer(forever) as (to, seen), client() as transport:
        for _ in range(2):
            with pytest.raises(ValueError, match="buffer"):
                await transport.call(
                    to,
                    PEER,
                    "any",
                    b"",
                    into=lambda _m, _n: memoryview(bytearray(3)),
                    deadline_s=1,
                    lane="bulk",
                )
        assert seen == [ASKED, "stream"] * 2, "the stream isn't used again"


async def test_an_answer_that_breaks_off_is_a_wire_error() -> None:
    async with peer(once(lambda liar: liar.answer()[:-5], "end")) as (to, _), client() as transport:
        with pytest.raises(WireError, match="broke off"):
            await ask(transport, to)


@pytest.mark.parametrize("count", [0, 7])
async def test_a_connection_that_breaks_before_the_answer(count: int) -> None:
    async with peer(once(lambda liar: liar.answer()[:count], "end")) as (to, seen), client() as transport:
        with pytest.raises(PeerUnreachableError, match="broke") as info:
            await ask(transport, to)
        assert info.value.sent
        assert seen == [ASKED, "stream"], "a call that may have been served isn't sent again"


async def test_a_connection_that_breaks_before_it_is_a_stream() -> None:
    async def hang_up(liar: Liar) -> None:
        liar.writer.close()

    async with peer(hang_up) as (to, _), client() as transport:
        with pytest.raises(PeerUnreachableError, match="broke"):
            await ask(transport, to)


SLOW: dict[str, Callable[[Liar], bytes]] = {
    "silent": lambda _: b"",
    "half a head": lambda liar: liar.answer()[:9],
    "no metadata": lambda liar: liar.answer()[:HEAD_BYTES],
    "half a vector": lambda liar: liar.answer()[:-5],
}


@pytest.mark.parametrize("name", SLOW)
async def test_slow_answers_meet_a_deadline(name: str) -> None:
    started = time.monotonic()
    async with peer(once(SLOW[name])) as (to, _), client() as transport:
        with pytest.raises(PeerTimeoutError):
            await ask(transport, to, deadline_s=0.3)
    assert time.monotonic() - started < 2.0


async def test_a_silent_offer_meets_the_deadline() -> None:
    async with peer(offer=lambda _: b"HTTP/1.1 200") as (to, _), client() as transport:
        with pytest.raises(PeerTimeoutError):
            await ask(transport, to, deadline_s=0.1)


async def test_a_silent_welcome_meets_a_deadline() -> None:
    async with peer(welcome=b"") as (to, _), client() as transport:
        with pytest.raises(PeerTimeoutError):
            await ask(transport, to)


async def test_refusals_of_streams_are_told() -> None:
    text = b"\x1b[31m<script>\0\xff" + b"x" * 1_000_000
    raw = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
    async with peer(offer=lambda _: raw) as (to, _), client() as transport:
        with pytest.raises(PeerRefusedError) as info:
            await ask(transport, to)
    assert info.value.status == 403
    assert len(info.value.reason) == 500
    assert info.value.reason.isprintable()
    raw = b"HTTP/1.1 429 Slow Down\r\nContent-Length: 100\r\n\r\nbusy"
    async with peer(offer=lambda _: raw) as (to, _), client() as transport:
        with pytest.raises(PeerRefusedError, match="busy"):
            await ask(transport, to)


async def test_a_refusal_in_the_middle_of_a_vector_is_heard() -> None:
    async def talk(liar: Liar) -> None:
        await liar.call()
        await asyncio.sleep(0.05)
        liar.writer.write(liar.answer(b"busy", b"", AnswerFrame(429, 4, 0, True)))
        await asyncio.sleep(60)

    async with peer(talk) as (to, _), client() as transport:
        with pytest.raises(PeerRefusedError, match="busy"):
            await ask(transport, to, vector=memoryview(bytes(64 * PIECE_BYTES)))
