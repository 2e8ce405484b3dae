"""The transport's rows of the abuse table: what is sent, what is answered, and that nothing ran."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.transport.auth import format_time, new_nonce
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.protocol import Address, Incoming, Reply

Served = Any
Send = Callable[[Served], bytes]
BIG = bytes(range(256)) * (PIECE_BYTES // 256) + b"tail"


async def test_a_right_request_is_served(served: Served) -> None:
    status, text = await served.send(served.request(b"meta", BIG))
    assert (status, text[:4]) == (200, "meta")
    assert served.taken == [BIG]


REFUSED: dict[str, tuple[int, Send]] = {
    "foreign host": (403, lambda s: s.request(headers={"Host": "evil.example"})),
    "foreign host that ends like ours": (403, lambda s: s.request(headers={"Host": "evil-node.lan"})),
    "no host": (400, lambda s: s.request(headers={"Host": None})),
    "host with a user": (403, lambda s: s.request(headers={"Host": "127.0.0.1@evil.example"})),
    "foreign origin": (403, lambda s: s.request(headers={"Origin": "http://evil.example"})),
    "null origin": (403, lambda s: s.request(headers={"Origin": "null"})),
    "own origin": (403, lambda s: s.request(headers={"Origin": f"http://{s.address}"})),
    "GET": (405, lambda s: s.request(method="GET", headers={"Content-Length": "0"}, body=lambda _: b"")),
    "pickle": (415, lambda s: s.request(headers={"Content-Type": "application/python-pickle"})),
    "no content type": (415, lambda s: s.request(headers={"Content-Type": None})),
    "gzip": (415, lambda s: s.request(headers={"Content-Encoding": "gzip"})),
    "identity": (415, lambda s: s.request(headers={"Content-Encoding": "identity"})),
    "no sender": (400, lambda s: s.request(headers={"P2PDRL-Sender": None})),
    "bad sender": (400, lambda s: s.request(headers={"P2PDRL-Sender": "<script>"})),
    "negative length": (400, lambda s: s.request(headers={"P2PDRL-Meta-Length": "-1"})),
    "huge number": (400, lambda s: s.request(headers={"P2PDRL-Vector-Length": "9" * 4000})),
    "unicode digits": (400, lambda s: s.request(headers={"P2PDRL-Meta-Length": "٣"})),
    "nan time": (400, lambda s: s.request(headers={"P2PDRL-Time": "nan"})),
    "short nonce": (400, lambda s: s.request(headers={"P2PDRL-Nonce": "ab"})),
    "other protocol": (403, lambda s: s.request(change=lambda h: replace(h, protocol=99))),
    "wrong swarm": (403, lambda s: s.request(change=lambda h: replace(h, swarm="0123456789abcdef"))),
    "wrong target": (403, lambda s: s.request(change=lambda h: replace(h, target="c" * 32))),
    "no mac": (401, lambda s: s.request(forge=lambda h: replace(h, mac=""))),
    "bad mac": (401, lambda s: s.request(forge=lambda h: replace(h, mac="0" * 64))),
    "forged sender": (401, lambda s: s.request(forge=lambda h: replace(h, sender="c" * 32))),
    "forged target": (401, lambda s: s.request(forge=lambda h: replace(h, target="-"))),
    "forged nonce": (401, lambda s: s.request(forge=lambda h: replace(h, nonce=new_nonce()))),
    "forged path": (401, lambda s: s.request(forge=lambda h: replace(h, path="/p2p/take?x=1"))),
    "clock behind": (
        401,
        lambda s: s.request(change=lambda h: replace(h, time=format_time(s.clock.wall() - 61))),
    ),
    "clock ahead": (
        401,
        lambda s: s.request(change=lambda h: replace(h, time=format_time(s.clock.wall() + 61))),
    ),
    "unknown route": (404, lambda s: s.request(route="other")),
    "path traversal": (404, lambda s: s.request(route="../v1/echo")),
    "metadata too long": (413, lambda s: s.request(bytes(4097))),
    "vector too long": (413, lambda s: s.request(b"", bytes(2 * PIECE_BYTES + 1))),
    "announced too long": (413, lambda s: s.request(change=lambda h: replace(h, vector_nbytes=10**14))),
    "parts over-declared": (400, lambda s: s.request(change=lambda h: replace(h, vector_nbytes=4))),
    "parts under-declared": (413, lambda s: s.request(b"abc", change=lambda h: replace(h, meta_nbytes=2))),
    "body longer": (413, lambda s: s.request(b"abc", body=lambda body: body + b"more")),
    "tampered metadata": (400, lambda s: s.request(b"abc", body=lambda body: b"x" + body[1:])),
    "tampered piece": (400, lambda s: s.request(b"", BIG, body=lambda body: body[:500] + b"!" + body[501:])),
    "tampered last piece": (
        400,
        lambda s: s.request(b"", BIG, body=lambda body: body[:-18] + b"!!" + body[-16:]),
    ),
    "tampered mac": (400, lambda s: s.request(b"", BIG, body=lambda body: body[:-1] + b"!")),
    "swapped pieces": (400, lambda s: s.request(b"", BIG[:PIECE_BYTES] * 2, body=_swap)),
}


def _swap(body: bytes) -> bytes:
    first, second = body[16 : 16 + PIECE_BYTES + 16], body[16 + PIECE_BYTES + 16 :]
    return body[:16] + second + first


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused(served: Served, name: str) -> None:
    status, make = REFUSED[name]
    before = sum(served.transport.counters.refused.values())
    assert (await served.send(make(served)))[0] == status
    assert not served.taken
    if name != "no host":  # aiohttp's parser answers that one
        assert served.transport.counters.refused[status] == 1
        assert sum(served.transport.counters.refused.values()) == before + 1
    assert (await served.send(served.request(b"ok")))[0] == 200


async def test_an_older_version_is_told_what_to_do(served: Served) -> None:
    status, text = await served.send(served.request(change=lambda head: replace(head, protocol=1)))
    assert status == 403
    assert "this node speaks protocol 3, yours 1: install the same p2pdrl on both machines" in text


async def test_a_pickle_is_not_executed(served: Served) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (print, ("executed",))

    raw = pickle.dumps(Bomb())
    head = f"POST /p2p/take HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(raw)}\r\n"
    for kind in ("application/octet-stream", "application/zip", "application/x-python-pickle"):
        status, _ = await served.send(f"{head}Content-Type: {kind}\r\n\r\n".encode() + raw)
        assert status == 415
    assert not served.taken


async def test_a_replay_is_refused(served: Served) -> None:
    raw = served.request(b"once")
    assert (await served.send(raw))[0] == 200
    status, reason = await served.send(raw)
    assert (status, reason) == (409, "this request was seen before")
    assert len(served.taken) == 1


async def test_a_replay_is_refused_when_it_became_stale(served: Served) -> None:
    raw = served.request(b"once")
    served.clock.offset_s = 61.0
    status, reason = await served.send(raw)
    assert status == 401
    assert "61 s behind ours" in reason
    assert not served.taken


def chunked(raw: bytes, extra: bytes = b"") -> bytes:
    head, _, body = raw.partition(b"\r\n\r\n")
    lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"content-length")]
    head = b"\r\n".join([*lines, b"Transfer-Encoding: chunked"])
    chunks = b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in (body, extra) if part)
    return head + b"\r\n\r\n" + chunks + b"0\r\n\r\n"


async def test_chunked_bodies_are_bounded_too(served: Served) -> None:
    assert (await served.send(chunked(served.request(b"meta", BIG))))[0] == 200
    assert (await served.send(chunked(served.request(b"meta", BIG), b"x")))[0] == 413
    assert (await served.send(chunked(served.request(b"meta"), bytes(100_000))))[0] == 413
    assert (await served.send(chunked(served.request(b"", bytes(2 * PIECE_BYTES + 1)))))[0] == 413
    assert len(served.taken) == 1


async def test_broken_chunks_and_truncated_bodies_are_refused(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    head, _, _ = chunked(served.request(b"meta")).partition(b"\r\n\r\n")
    assert (await served.send(head + b"\r\n\r\nzz\r\n"))[0] == 400
    status, _ = await served.send(chunked(served.request(b"meta", BIG, body=lambda body: body[:-1])))
    assert status == 400
    assert not served.taken
    assert not caplog.records


async def test_a_caller_that_hangs_up_in_the_body_does_no_harm(served: Served) -> None:
    _, writer = await asyncio.open_connection(served.address.host, served.address.port)
    writer.write(served.request(b"meta", BIG)[:-1000])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await served.send(served.request(b"ok")))[0] == 200
    assert served.taken == [b""]


SLOW: dict[str, Send] = {
    "silent": lambda _: b"",
    "half a request line": lambda _: b"POST /p2p/ta",
    "half a header": lambda s: s.request()[:60],
    "header without its end": lambda s: s.request().partition(b"\r\n\r\n")[0],
    "no body": lambda s: s.request(b"meta").partition(b"\r\n\r\n")[0] + b"\r\n\r\n",
    "half a vector": lambda s: s.request(b"", BIG)[:-1000],
    "half an API body": lambda s: (
        f"POST /v1/echo HTTP/1.1\r\nHost: {s.address}\r\nContent-Length: 9\r\n\r\nabc".encode()
    ),
}


@pytest.mark.parametrize("name", SLOW)
async def test_slow_headers_and_stalled_bodies_are_closed(served: Served, name: str) -> None:
    started = time.monotonic()
    await served.closes_within(SLOW[name](served), 3.0)
    assert time.monotonic() - started >= 0.1
    assert not served.taken


async def test_a_trickling_header_does_not_put_the_deadline_off(served: Served) -> None:
    reader, writer = await asyncio.open_connection(served.address.host, served.address.port)

    async def trickle() -> None:
        for byte in served.request():
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    try:
        ended = await asyncio.wait_for(asyncio.gather(reader.read(), return_exceptions=True), 3.0)
        assert ended[0] == b"" or isinstance(ended[0], ConnectionResetError)
        assert served.transport.counters.dropped_connections == 1
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.close()


async def test_a_trickling_body_is_cut(served: Served) -> None:
    reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
    raw = served.request(b"m" * 4000)
    writer.write(raw[: len(raw) - 3000])

    async def trickle() -> None:
        for byte in raw[-3000:]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    try:
        ended = await asyncio.wait_for(asyncio.gather(reader.read(), return_exceptions=True), 3.0)
        assert not isinstance(ended[0], bytes) or b"200 OK" not in ended[0]
        assert not served.taken
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        writer.close()


async def test_the_second_header_on_a_connection_has_a_deadline_too(served: Served) -> None:
    reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
    try:
        writer.write(served.request(b"ok"))
        assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        await reader.readexactly(2 + 16)
        writer.write(served.request(b"half")[:80])
        ended = await asyncio.wait_for(asyncio.gather(reader.read(), return_exceptions=True), 3.0)
        assert ended[0] == b"" or isinstance(ended[0], ConnectionResetError)
    finally:
        writer.close()


async def test_a_caller_that_does_not_read_its_answer_is_cut(served: Served) -> None:
    ends: list[bool] = []
    vector = memoryview(bytearray(32 * PIECE_BYTES))

    async def give(_: Incoming) -> Reply:
        return Reply(b"", vector, on_end=ends.append)

    served.transport.serve("give", give)
    _, writer = await asyncio.open_connection(served.address.host, served.address.port, limit=1)
    try:
        writer.write(served.request(route="give"))
        await _until(lambda: served.transport.counters.dropped_connections == 1)
    finally:
        writer.transport.abort()
    await _until(lambda: ends == [False])
    await _until(lambda: served.listener.connections == 0)


async def test_an_idle_connection_is_kept(served: Served) -> None:
    reader, writer = await asyncio.open_connection(served.address.host, served.address.port)
    try:
        for _ in range(2):
            writer.write(served.request(b"ok"))
            assert b"200 OK" in await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
            await reader.readexactly(2 + 16)
            await asyncio.sleep(0.3)  # twice the header deadline
    finally:
        writer.close()
    assert len(served.taken) == 2


async def _until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(5):
        while not true():  # noqa: ASYNC110 - the listener has nothing to wait on
            await asyncio.sleep(0.005)


async def test_connections_are_capped(served: Served) -> None:
    held = [await asyncio.open_connection(served.address.host, served.address.port) for _ in range(8)]
    try:
        await _until(lambda: served.listener.connections == 8)
        got = await served.closes_within(b"", 3.0)
        assert got.startswith(b"HTTP/1.1 429 ")
        assert served.transport.counters.refused_connections == 1
    finally:
        for _, writer in held:
            writer.close()
    await _until(lambda: served.listener.connections == 0)
    assert (await served.send(served.request(b"ok")))[0] == 200


async def test_a_flood_by_one_peer_leaves_others_served(served: Served) -> None:
    statuses = [(await served.send(served.request(b"x")))[0] for _ in range(45)]
    assert statuses.count(200) == 40
    assert statuses[40:] == [429] * 5
    probe = served.request(b"x", change=lambda head: replace(head, sender="d" * 32))
    assert (await served.send(probe))[0] == 200


async def test_a_flood_of_bad_requests_is_told_429(served: Served) -> None:
    bad = [
        (await served.send(served.request(forge=lambda h: replace(h, mac="0" * 64))))[0] for _ in range(42)
    ]
    assert bad == [401] * 40 + [429] * 2
    assert (await served.send(served.request(b"x")))[0] == 200


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
async def test_the_api_is_guarded_for_every_method(served: Served, method: str) -> None:
    for extra in ("Host: evil.example\r\n", f"Host: {served.address}\r\nOrigin: http://evil.example\r\n"):
        raw = f"{method} /v1/echo HTTP/1.1\r\n{extra}Connection: close\r\n\r\n".encode()
        assert (await served.closes_within(raw, 3.0)).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]:7600", "localhost:1", "LOCALHOST", "node.lan:7600", "Node.Lan."]
)
async def test_our_own_names_and_origin_may_use_the_api(served: Served, host: str) -> None:
    headers = f"Host: {host}\r\nOrigin: http://{host}\r\nConnection: close"
    raw = f"GET /v1/echo HTTP/1.1\r\n{headers}\r\n\r\n".encode()
    assert (await served.closes_within(raw, 3.0)).startswith(b"HTTP/1.1 200 ")


async def test_api_bodies_are_bounded(served: Served) -> None:
    size = 2 << 20
    head = f"POST /v1/echo HTTP/1.1\r\nHost: {served.address}\r\nContent-Length: {size}\r\n\r\n".encode()
    assert (await served.send(head + bytes(size)))[0] == 413


async def test_compressed_api_bodies_are_not_inflated(served: Served) -> None:
    headers = f"Host: {served.address}\r\nContent-Encoding: gzip\r\nContent-Length: 3"
    raw = f"POST /v1/echo HTTP/1.1\r\n{headers}\r\n\r\nabc".encode()
    assert await served.send(raw) == (200, "abc")


def test_the_address_is_an_ip(served: Served) -> None:
    assert served.address == Address("127.0.0.1", served.address.port)
