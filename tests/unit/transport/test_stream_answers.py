"""Callers on streams: peers that answer wrongly, slowly or not at all, and peers that offer no streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError, PeerTimeoutError, PeerUnreachableError, WireError
from p2pdrl.transport.auth import MAC_BYTES, SerialMac, SwarmKeys, new_nonce
from p2pdrl.transport.headers import AnswerHead
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import PIECE_BYTES, TransportLimits
from p2pdrl.transport.listener import Listener
from p2pdrl.transport.protocol import Address, Incoming, Reply
from p2pdrl.transport.stream_frames import HEAD_BYTES, AnswerFrame, CallFrame, batches

KEY, KEYS = b"key", SwarmKeys(b"key")
US, PEER = "a" * 32, "b" * 32
LIMITS = TransportLimits(stall_deadline_s=0.1, max_answer_meta_bytes=1000, shutdown_grace_s=0.05)


@dataclass
class Liar:
    """The server's end of a stream in the hands of a liar."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    out: SerialMac

    async def call(self) -> CallFrame:
        frame = CallFrame.decode(await self.reader.readexactly(HEAD_BYTES))
        await self.reader.readexactly(frame.route_nbytes + frame.meta_nbytes + MAC_BYTES)
        return frame

    def answer(
        self, meta: bytes = b"meta", vector: bytes = b"vector", frame: AnswerFrame | None = None
    ) -> bytes:
        head = frame if frame is not None else AnswerFrame(200, len(meta), len(vector), False)
        lists = batches(head.encode() + meta, [memoryview(vector)] if vector else [], self.out)
        return b"".join(bytes(buffer) for batch in lists for buffer in batch)


Talk = Callable[[Liar], Awaitable[None]]
Open = Callable[[str], bytes]


def opened(
    nonce: str,
    *,
    change: Callable[[AnswerHead], AnswerHead] = lambda head: head,
    forge: Callable[[AnswerHead], AnswerHead] = lambda head: head,
    upgrade: str = "p2pdrl",
    answer_nonce: str | None = None,
    extra: bytes = b"",
) -> bytes:
    """The answer to a request for a stream, right in all that isn't overridden."""
    head = AnswerHead(sender=PEER, meta_nbytes=0, vector_nbytes=0, nonce=answer_nonce or new_nonce())
    head = forge(change(head).sign(KEYS, nonce))
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.to_headers().items())
    return f"HTTP/1.1 101 Switching\r\nUpgrade: {upgrade}\r\n{lines}\r\n".encode() + extra


@asynccontextmanager
async def peer(
    talk: Talk | None = None, opening: Open | None = None
) -> AsyncIterator[tuple[Address, list[str]]]:
    """A server that opens streams and then talks; ``seen`` holds the request lines."""
    writers: list[asyncio.StreamWriter] = []
    seen: list[str] = []

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            seen.append(head.partition("\r\n")[0])
            nonce = next(
                line.split(": ")[1] for line in head.split("\r\n") if line.startswith("P2PDRL-Nonce")
            )
            if opening is not None:
                writer.write(opening(nonce))
            else:
                ours = new_nonce()
                writer.write(opened(nonce, answer_nonce=ours))
                assert talk is not None
                await talk(Liar(reader, writer, KEYS.stream(nonce, ours)[1]))
        except (ConnectionError, asyncio.IncompleteReadError):
            pass

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1]), seen
    finally:
        for writer in writers:
            writer.transport.abort()
        server.close()
        await server.wait_closed()


@asynccontextmanager
async def client(limits: TransportLimits = LIMITS, node_id: str = US) -> AsyncIterator[HttpTransport]:
    transport = HttpTransport(node_id, "default", KEY, clock=SystemClock(), limits=limits)
    await transport.start()
    try:
        yield transport
    finally:
        await transport.close()


async def ask(transport: HttpTransport, to: Address, deadline_s: float = 3.0, **more: Any) -> bytes:
    """Call ``to`` with room for an answer's vector of up to 100 bytes."""
    out = bytearray(100)
    answer = await transport.call(
        to,
        PEER,
        "any",
        b"",
        into=lambda _meta, nbytes: memoryview(out)[:nbytes] if nbytes <= 100 else None,
        deadline_s=deadline_s,
        lane="bulk",
        **more,
    )
    assert answer.sender == PEER
    return answer.meta + bytes(out[: answer.vector_nbytes])


def once(make: Callable[[Liar], bytes], then: str = "silence") -> Talk:
    async def talk(liar: Liar) -> None:
        await liar.call()
        liar.writer.write(make(liar))
        if then == "end":
            await liar.writer.drain()
            liar.writer.close()
        else:
            await asyncio.sleep(60)

    return talk


async def forever(liar: Liar) -> None:
    while True:
        await liar.call()
        liar.writer.write(liar.answer())


async def test_right_answers_on_one_stream() -> None:
    async with peer(forever) as (to, seen), client() as transport:
        for _ in range(3):
            assert await ask(transport, to) == b"metavector"
        assert seen == ["GET /p2p/stream HTTP/1.1"]


WRONG_OPENING: dict[str, Open] = {
    "not HTTP": lambda _: b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
    "endless header": lambda _: b"HTTP/1.1 101 x\r\nX: " + b"x" * 100_000,
    "header without a colon": lambda _: b"HTTP/1.1 101 x\r\nnonsense\r\n\r\n",
    "no headers of ours": lambda _: b"HTTP/1.1 101 x\r\nUpgrade: p2pdrl\r\n\r\n",
    "another protocol": lambda n: opened(n, upgrade="websocket"),
    "no mac": lambda n: opened(n, forge=lambda head: replace(head, mac="")),
    "bad mac": lambda n: opened(n, forge=lambda head: replace(head, mac="0" * 64)),
    "forged nonce": lambda n: opened(n, forge=lambda head: replace(head, nonce=new_nonce())),
    "answer to another request": lambda _: opened(new_nonce()),
    "another node": lambda n: opened(n, change=lambda head: replace(head, sender="c" * 32)),
    "words before a call": lambda n: opened(n, extra=b"x"),
    "success": lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
    "redirect": lambda _: b"HTTP/1.1 302 Found\r\nLocation: http://169.254.169.254/\r\n\r\n",
    "interim answers": lambda _: b"HTTP/1.1 100 Continue\r\n\r\n" * 10,
}


@pytest.mark.parametrize("name", WRONG_OPENING)
async def test_wrong_openings_are_wire_errors(name: str) -> None:
    async with peer(opening=WRONG_OPENING[name]) as (to, _), client() as transport:
        with pytest.raises(WireError):
            await ask(transport, to)


WRONG: dict[str, Callable[[Liar], bytes]] = {
    "not a frame": lambda _: b"HTTP/1.1 200 OK\r\n\r\n",
    "a call": lambda _: CallFrame(4, 0, 0).encode() + b"take" + bytes(16),
    "odd status": lambda liar: liar.answer(frame=AnswerFrame(302, 4, 6, False)),
    "no mac": lambda _: AnswerFrame(200, 4, 0, False).encode() + b"meta" + bytes(16),
    "huge metadata": lambda _: AnswerFrame(200, 10**9, 0, False).encode(),
    "huge refusal": lambda _: AnswerFrame(403, 10**6, 0, False).encode(),
    "refusal with a vector": lambda liar: liar.answer(frame=AnswerFrame(403, 4, 6, False)),
    "huge vector": lambda liar: liar.answer(frame=AnswerFrame(200, 4, 10**12, False)),
    "vector beyond all bounds": lambda _: AnswerFrame(200, 4, 0, False).encode()[:8] + b"\xff" * 8,
    "unwanted vector": lambda liar: liar.answer(vector=bytes(101)),
    "changed metadata": lambda liar: liar.answer().replace(b"meta", b"Meta"),
    "changed vector": lambda liar: liar.answer().replace(b"vector", b"Vector"),
    "forged refusal": lambda liar: (
        liar.answer(vector=b"")[:0] + AnswerFrame(403, 0, 0, True).encode() + bytes(16)
    ),
    "an answer left out": lambda liar: liar.answer()[:0] + liar.answer(),
}


@pytest.mark.parametrize("name", WRONG)
async def test_wrong_answers_are_wire_errors(name: str) -> None:
    async with peer(once(WRONG[name])) as (to, _), client() as transport:
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
        assert len(seen) == 2, "the stream isn't used again"


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
        assert len(seen) == 1, "a call that may have been served isn't sent again"


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


async def test_a_silent_opening_meets_the_deadline() -> None:
    async with peer(opening=lambda _: b"HTTP/1.1 101") as (to, _), client() as transport:
        with pytest.raises(PeerTimeoutError):
            await ask(transport, to, deadline_s=0.1)


async def test_refusals_of_streams_are_told() -> None:
    text = b"\x1b[31m<script>\0\xff" + b"x" * 1_000_000
    raw = f"HTTP/1.1 403 Forbidden\r\nContent-Length: {len(text)}\r\n\r\n".encode() + text
    async with peer(opening=lambda _: raw) as (to, _), client() as transport:
        with pytest.raises(PeerRefusedError) as info:
            await ask(transport, to)
    assert info.value.status == 403
    assert len(info.value.reason) == 500
    assert info.value.reason.isprintable()
    raw = b"HTTP/1.1 429 Slow Down\r\nContent-Length: 100\r\n\r\nbusy"
    async with peer(opening=lambda _: raw) as (to, _), client() as transport:
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


async def test_a_stream_is_left_after_its_last_answer() -> None:
    async def talk(liar: Liar) -> None:
        await liar.call()
        liar.writer.write(liar.answer(b"bye", b"", AnswerFrame(200, 3, 0, True)))
        await asyncio.sleep(60)

    async with peer(talk) as (to, seen), client() as transport:
        for _ in range(2):
            assert await ask(transport, to) == b"bye"
        assert len(seen) == 2


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
        assert len(seen) == 2


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


@pytest.mark.parametrize("when", ["opening", "answering"])
async def test_closing_ends_calls(when: str) -> None:
    opening = (lambda _: b"HTTP/1.1") if when == "opening" else None
    async with peer(once(lambda _: b""), opening) as (to, _), client() as transport:
        calling = asyncio.create_task(ask(transport, to))
        await asyncio.sleep(0.05)
        await transport.close()
        with pytest.raises(PeerUnreachableError):
            await asyncio.wait_for(calling, 1)


@asynccontextmanager
async def node(limits: TransportLimits = LIMITS) -> AsyncIterator[tuple[HttpTransport, Listener, Address]]:
    async with client(limits, PEER) as transport:

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
async def test_what_stands_between_may_know_no_upgrades(status: int) -> None:
    def opening(_: str) -> bytes:
        return f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()

    async with peer(opening=opening) as (to, seen), client() as transport:
        with pytest.raises(PeerRefusedError):
            await ask(transport, to)
        assert [line.split()[0] for line in seen] == ["GET", "POST"]


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
        assert listener.connections == LIMITS.bulk_connections_per_host


async def test_a_node_that_closes_is_unreachable() -> None:
    async with node() as (_, listener, to), client() as transport:
        await ask(transport, to)
        await listener.close()
        assert listener.connections == 0
        with pytest.raises(PeerUnreachableError) as info:
            await ask(transport, to)
        assert not info.value.sent


async def test_the_probe_lane_takes_no_streams() -> None:
    async with node() as (_, _, to), client() as transport:
        await transport.call(to, PEER, "any", b"", deadline_s=3)
        assert not transport._client._streams._pools
