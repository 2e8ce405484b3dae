"""The transport's rows of the abuse table: what is sent, what is answered, and that nothing ran."""

from __future__ import annotations

import asyncio
import pickle
import socket
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.transport.http.headers import RequestHead
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.limits import PIECE_BYTES
from p2pdrl.transport.opening import HELLO, TOKEN_BYTES
from p2pdrl.transport.protocol import Address, Incoming, Lane, Reply
from p2pdrl.transport.tls import client_context
from p2pdrl.versions import SPOKEN, ProtocolRange

from .conftest import (
    CLIENT,
    CLIENT_ID,
    CLIENT_TLS,
    KEY,
    OTHER_ID,
    OTHER_TLS,
    SERVER_ID,
    Ends,
    answer_of,
    until,
)
from .conftest import until_closed as ended

Served = Any
Send = Callable[[Served], bytes]
Tls = ssl.SSLContext | None
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
    "own origin": (403, lambda s: s.request(headers={"Origin": f"https://{s.address}"})),
    "GET": (405, lambda s: s.request(method="GET", headers={"Content-Length": "0"}, body=lambda _: b"")),
    "pickle": (415, lambda s: s.request(headers={"Content-Type": "application/python-pickle"})),
    "no content type": (415, lambda s: s.request(headers={"Content-Type": None})),
    "gzip": (415, lambda s: s.request(headers={"Content-Encoding": "gzip"})),
    "identity": (415, lambda s: s.request(headers={"Content-Encoding": "identity"})),
    "no protocol": (400, lambda s: s.request(headers={"P2PDRL-Protocol": None})),
    "no sender": (400, lambda s: s.request(headers={"P2PDRL-Sender": None})),
    "bad sender": (400, lambda s: s.request(headers={"P2PDRL-Sender": "<script>"})),
    "negative length": (400, lambda s: s.request(headers={"P2PDRL-Meta-Length": "-1"})),
    "huge number": (400, lambda s: s.request(headers={"P2PDRL-Vector-Length": "9" * 4000})),
    "unicode digits": (400, lambda s: s.request(headers={"P2PDRL-Meta-Length": "٣"})),
    "other protocol": (403, lambda s: s.request(change=lambda h: replace(h, protocol=99))),
    "no range": (
        403,
        lambda s: s.request(change=lambda h: replace(h, protocol=99), headers={"P2PDRL-Protocols": "x"}),
    ),
    "wrong swarm": (403, lambda s: s.request(change=lambda h: replace(h, swarm="0123456789abcdef"))),
    "wrong target": (403, lambda s: s.request(change=lambda h: replace(h, target="c" * 32))),
    "another's name": (403, lambda s: s.request(change=lambda h: replace(h, sender=OTHER_ID))),
    "our own name": (403, lambda s: s.request(change=lambda h: replace(h, sender=SERVER_ID))),
    "unknown route": (404, lambda s: s.request(route="other")),
    "path traversal": (404, lambda s: s.request(route="../v1/echo")),
    "metadata too long": (413, lambda s: s.request(bytes(4097))),
    "vector too long": (413, lambda s: s.request(b"", bytes(2 * PIECE_BYTES + 1))),
    "announced too long": (413, lambda s: s.request(change=lambda h: replace(h, vector_nbytes=10**14))),
    "parts over-declared": (400, lambda s: s.request(change=lambda h: replace(h, vector_nbytes=4))),
    "parts under-declared": (413, lambda s: s.request(b"abc", change=lambda h: replace(h, meta_nbytes=2))),
    "body longer": (413, lambda s: s.request(b"abc", body=lambda body: body + b"more")),
    "body shorter": (400, lambda s: s.request(b"abc", body=lambda body: body[:-1])),
}


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
    told: list[tuple[str, str]] = []
    served.transport.tell_other_protocols(lambda *what: told.append(what))
    older = served.request(
        change=lambda head: replace(head, protocol=3, spoken=ProtocolRange(3, 3)),
        headers={"P2PDRL-Protocols": None},
    )
    for _ in range(2):
        status, text = await served.send(older)
        assert status == 403
        ours = SPOKEN.words
        assert text == (
            f"this node speaks protocol 3, that one {ours}: install a newer p2pdrl where this node runs"
        )
    words = f"this node speaks protocol {ours}, that one 3: install a newer p2pdrl where that one runs"
    assert told == [(CLIENT_ID, words)]  # once


@pytest.mark.parametrize("tls", [None, client_context([KEY])], ids=["in the open", "no certificate"])
@pytest.mark.parametrize("path", ["/p2p/take", "/p2p-stream", "/p2p-pipe/take"])
async def test_nobody_is_believed_without_a_certificate(served: Served, path: str, tls: Tls) -> None:
    status, text = await served.send(served.request(path=path), tls)
    assert status == 401
    assert "TLS" in text
    assert "certificate" in text
    assert not served.taken
    assert served.transport.counters.refused == {401: 1}


async def test_each_member_speaks_in_its_own_name(served: Served) -> None:
    seen: list[str] = []

    async def who(incoming: Incoming) -> Reply:
        seen.append(incoming.sender)
        return Reply(b"")

    served.transport.serve("who", who)
    as_other = served.request(route="who", change=lambda head: replace(head, sender=OTHER_ID))
    assert (await served.send(as_other, OTHER_TLS))[0] == 200
    status, text = await served.send(as_other, CLIENT_TLS)
    assert status == 403
    assert "can't speak in the name of" in text
    assert (await served.send(served.request(route="who"), OTHER_TLS))[0] == 403
    assert seen == [OTHER_ID]


async def test_who_is_barred_is_told_why_by_post_and_on_the_stream_that_it_has(served: Served) -> None:
    client = HttpTransport(CLIENT_ID, "default", CLIENT.tls([KEY]), clock=SystemClock())
    await client.start()

    async def ask(lane: Lane) -> bytes:
        answer = await client.call(served.address, SERVER_ID, "take", b"meta", deadline_s=5.0, lane=lane)
        return answer.meta

    try:
        assert await ask("bulk") == b"meta"
        served.transport.bar(lambda node_id: "banned: floods" if node_id == CLIENT_ID else None)
        for lane in ("bulk", "probe"):
            with pytest.raises(PeerRefusedError, match="403: banned: floods"):
                await ask(lane)
        assert (await served.send(served.request(change=as_other), OTHER_TLS))[0] == 200
        served.transport.bar(lambda node_id: None)
        assert [await ask("bulk"), await ask("probe")] == [b"meta"] * 2
    finally:
        await client.close()
    assert len(served.taken) == 4


def as_other(head: RequestHead) -> RequestHead:
    return replace(head, sender=OTHER_ID)


async def test_a_caller_with_another_key_comes_to_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    stranger = CLIENT.tls([b"another key", KEY])  # believes us, but shows a certificate of another swarm
    raw = served.request(b"meta")
    assert await served.closes_within(raw, 3.0, stranger.client) == b""
    assert not served.taken
    await until(lambda: served.transport.counters.failed_handshakes == 1)
    await until(lambda: served.listener.connections == 0)
    assert not caplog.records


@pytest.mark.parametrize(
    "path", ["/p2p-stream?x=1", "/p2p%2Dstream", "/p2p-pipe/take?x=1", "/p2p%2Dpipe/take"]
)
async def test_a_path_may_be_written_in_other_ways(
    served: Served, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    status, _ = await served.send(served.request(path=path))
    assert status == (200 if "stream" in path else 404)
    assert not caplog.records


async def test_who_hangs_up_before_it_is_told_to_go_on_leaves_no_trace(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    raw = served.request(b"meta", headers={"Expect": "100-continue"}, body=lambda _: b"")
    for _ in range(5):
        _, writer = await served.connect(None)
        writer.write(raw)
        writer.write_eof()
        await asyncio.sleep(0.02)
        writer.transport.abort()
    await until(lambda: served.listener.connections == 0)
    assert not caplog.records


@pytest.mark.parametrize("path", ["/p2p/take", "/v1/act", "/nowhere"])
async def test_what_is_expected_of_us_is_not_quoted(
    served: Served, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    for expected in (b"\xff\xfe", b"100-continue\xff", "১০০".encode()):
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nExpect: ".encode()
        status, text = await served.send(head + expected + b"\r\n\r\n")
        assert (status, text) == (417, "this node knows no expectation but 100-continue")
    assert not caplog.records


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
    _, writer = await served.connect()
    writer.write(served.request(b"meta", BIG)[:-1000])
    await writer.drain()
    writer.close()
    await writer.wait_closed()
    assert (await served.send(served.request(b"ok")))[0] == 200
    assert served.taken == [b""]


def client_hello() -> bytes:
    """The first bytes of a caller that speaks TLS."""
    came, sent = ssl.MemoryBIO(), ssl.MemoryBIO()
    connection = CLIENT_TLS.wrap_bio(came, sent)
    with pytest.raises(ssl.SSLWantReadError):
        connection.do_handshake()
    return sent.read()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells that a caller has hung up")
async def test_who_hung_up_while_we_were_frozen_costs_no_handshake(served: Served) -> None:
    for _ in range(20):  # nothing runs here meanwhile
        with socket.create_connection((served.address.host, served.address.port)) as caller:
            caller.sendall(client_hello())
    assert (await served.send(served.request(b"ok")))[0] == 200
    await until(lambda: served.listener.connections == 0)
    assert served.transport.counters.failed_handshakes == 0


SLOW: dict[str, tuple[Tls, Send]] = {
    "silent": (None, lambda _: b""),
    "first byte of a handshake": (None, lambda _: client_hello()[:1]),
    "half a handshake": (None, lambda _: client_hello()[:100]),
    "handshake that isn't finished": (None, lambda _: client_hello()),
    "first byte of a hello": (None, lambda _: HELLO[:1]),
    "half a hello": (None, lambda _: HELLO[:5]),
    "hello without a whole token": (None, lambda _: HELLO + bytes(TOKEN_BYTES - 1)),
    "half a request line in the open": (None, lambda _: b"POST /v1/ec"),
    "half an API body": (
        None,
        lambda s: f"POST /v1/echo HTTP/1.1\r\nHost: {s.address}\r\nContent-Length: 9\r\n\r\nabc".encode(),
    ),
    "silent after the handshake": (CLIENT_TLS, lambda _: b""),
    "half a request line": (CLIENT_TLS, lambda _: b"POST /p2p/ta"),
    "half a header": (CLIENT_TLS, lambda s: s.request()[:60]),
    "header without its end": (CLIENT_TLS, lambda s: s.request().partition(b"\r\n\r\n")[0]),
    "no body": (CLIENT_TLS, lambda s: s.request(b"meta").partition(b"\r\n\r\n")[0] + b"\r\n\r\n"),
    "half a vector": (CLIENT_TLS, lambda s: s.request(b"", BIG)[:-1000]),
}


@pytest.mark.parametrize("name", SLOW)
async def test_slow_beginnings_and_stalled_bodies_are_closed(impatient: Served, name: str) -> None:
    tls, make = SLOW[name]
    started = time.monotonic()
    await impatient.closes_within(make(impatient), 3.0, tls)
    assert time.monotonic() - started >= 0.1
    assert not impatient.taken
    await until(lambda: impatient.listener.connections == 0)


TRICKLES: dict[str, tuple[Tls, Send]] = {
    "header": (CLIENT_TLS, lambda s: s.request()),
    "header in the open": (None, lambda s: f"GET /v1/echo HTTP/1.1\r\nHost: {s.address}\r\n\r\n".encode()),
    "handshake": (None, lambda _: client_hello()),
    "hello": (None, lambda _: HELLO + bytes(TOKEN_BYTES)),
}


@pytest.mark.parametrize("name", TRICKLES)
async def test_a_trickle_does_not_put_the_deadline_off(impatient: Served, name: str) -> None:
    tls, make = TRICKLES[name]
    reader, writer = await impatient.connect(tls)

    async def trickle() -> None:
        for byte in make(impatient):
            writer.write(bytes([byte]))
            await asyncio.sleep(impatient.transport.limits.header_deadline_s / 8)

    task = asyncio.create_task(trickle())
    try:
        assert await asyncio.wait_for(ended(reader), 3.0) == b""
        counters = impatient.transport.counters
        assert counters.dropped_connections + counters.failed_handshakes == 1
    finally:
        await cancelled(task)
        writer.transport.abort()


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_a_trickling_body_is_cut(impatient: Served) -> None:
    reader, writer = await impatient.connect()
    raw = impatient.request(b"m" * 4000)
    writer.write(raw[: len(raw) - 3000])

    async def trickle() -> None:
        for byte in raw[-3000:]:
            writer.write(bytes([byte]))
            await asyncio.sleep(0.02)

    task = asyncio.create_task(trickle())
    try:
        assert b"200 OK" not in await asyncio.wait_for(ended(reader), 3.0)
        assert not impatient.taken
    finally:
        await cancelled(task)
        writer.transport.abort()


async def test_the_second_header_on_a_connection_has_a_deadline_too(impatient: Served) -> None:
    answered = asyncio.Event()

    async def give(_: Incoming) -> Reply:
        return Reply(b"ok", on_end=lambda _: answered.set())

    impatient.transport.serve("give", give)
    reader, writer = await impatient.connect()
    try:
        writer.write(impatient.request(route="give"))
        assert await answer_of(reader) == (200, b"ok")
        await answered.wait()
        writer.write(impatient.request(b"half")[:80])
        assert await asyncio.wait_for(ended(reader), 3.0) == b""
        assert impatient.transport.counters.dropped_connections == 1
    finally:
        writer.transport.abort()


async def test_a_caller_that_does_not_read_its_answer_is_cut(impatient: Served) -> None:
    ends: list[bool] = []
    vector = memoryview(bytearray(32 * PIECE_BYTES))

    async def give(_: Incoming) -> Reply:
        return Reply(b"", vector, on_end=ends.append)

    impatient.transport.serve("give", give)
    _, writer = await asyncio.open_connection(
        impatient.address.host, impatient.address.port, limit=1, ssl=CLIENT_TLS
    )
    try:
        writer.write(impatient.request(route="give"))
        await until(lambda: impatient.transport.counters.dropped_connections == 1)
    finally:
        writer.transport.abort()
    await until(lambda: ends == [False])
    await until(lambda: impatient.listener.connections == 0)


async def test_an_idle_connection_is_kept(impatient: Served) -> None:
    reader, writer = await impatient.connect()
    try:
        for _ in range(2):
            writer.write(impatient.request(b"ok"))
            assert await answer_of(reader) == (200, b"ok")
            await asyncio.sleep(2 * impatient.transport.limits.header_deadline_s)
    finally:
        writer.transport.abort()
    assert len(impatient.taken) == 2


# How many


def let_go(held: list[Ends]) -> None:
    for _, writer in held:
        writer.transport.abort()


STRANGERS: dict[str, tuple[Tls, Send]] = {
    "silent": (None, lambda _: b""),
    "half a handshake": (None, lambda _: client_hello()),
    "half a hello": (None, lambda _: HELLO),
    "half a header": (None, lambda _: b"GET /v1/echo HTTP/1.1\r\n"),
    "a request to the API": (
        None,
        lambda s: f"GET /v1/echo HTTP/1.1\r\nHost: {s.address}\r\n\r\n".encode(),
    ),
    "a call without a certificate": (client_context([KEY]), lambda s: s.request()),
}


@pytest.mark.parametrize("name", STRANGERS)
async def test_who_has_proven_nothing_gives_way_oldest_first(served: Served, name: str) -> None:
    tls, make = STRANGERS[name]
    counters = served.transport.counters
    held: list[Ends] = []
    try:
        for count in range(1, 9):
            held.append(await served.connect(tls))
            held[-1][1].write(make(served))
            await until(lambda: served.listener.connections == count)  # noqa: B023
        assert counters.displaced_connections == 0
        assert (await served.send(served.request(b"ok"))) == (200, "ok")
        assert counters.displaced_connections == 1
        await asyncio.wait_for(ended(held[0][0]), 3.0)
        assert not held[1][0].at_eof()
        await until(lambda: served.listener.connections == 7)
        assert counters.refused_connections == 0
    finally:
        let_go(held)
    await until(lambda: served.listener.connections == 0)


async def test_who_has_proven_to_be_a_member_is_kept(served: Served) -> None:
    held = [await served.connect() for _ in range(8)]
    caller = HttpTransport(CLIENT.node_id, "default", CLIENT.tls([KEY]), clock=SystemClock())
    await caller.start()
    try:
        for reader, writer in held:
            writer.write(served.request(b"ok"))
            assert await answer_of(reader) == (200, b"ok")
        got = await served.closes_within(b"", 3.0, None)
        assert got.startswith(b"HTTP/1.1 429 ")
        assert got.endswith(b"too many connections")
        with pytest.raises(PeerRefusedError, match=r"503: .* too many connections") as info:
            await caller.call(served.address, SERVER_ID, "take", b"", deadline_s=3)
        assert info.value.status == 503, "neither a sign of life nor of another swarm"
        assert served.transport.counters.refused_connections == 2
        assert served.transport.counters.displaced_connections == 0
        for reader, writer in held:
            writer.write(served.request(b"still here"))
            assert await answer_of(reader) == (200, b"still here")
    finally:
        let_go(held)
        await caller.close()
    await until(lambda: served.listener.connections == 0)
    assert (await served.send(served.request(b"ok")))[0] == 200


async def test_a_crowd_of_strangers_keeps_no_member_out(served: Served) -> None:
    reader, writer = await served.connect()
    held: list[Ends] = []
    try:
        for _ in range(3):
            writer.write(served.request(b"member"))
            assert await answer_of(reader) == (200, b"member")
            held += [await served.connect(None) for _ in range(20)]
            assert (await served.send(served.request(b"newcomer")))[0] == 200
        assert served.transport.counters.refused_connections == 0
        assert served.listener.connections <= 8
    finally:
        let_go(held)
        writer.transport.abort()


async def test_a_flood_by_one_peer_leaves_others_served(served: Served) -> None:
    statuses = [(await served.send(served.request(b"x")))[0] for _ in range(45)]
    assert statuses.count(200) == 40
    assert statuses[40:] == [429] * 5
    probe = served.request(b"x", change=lambda head: replace(head, sender=OTHER_ID))
    assert (await served.send(probe, OTHER_TLS))[0] == 200


async def test_a_flood_of_bad_requests_is_told_429(served: Served) -> None:
    bad = [(await served.send(served.request(), None))[0] for _ in range(42)]
    assert bad == [401] * 40 + [429] * 2
    assert (await served.send(served.request(b"x")))[0] == 200


OVER = pytest.mark.parametrize("tls", [None, client_context([KEY])], ids=["in the open", "over TLS"])


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "DELETE", "OPTIONS", "PATCH", "HEAD"])
@OVER
async def test_the_api_is_guarded_for_every_method(served: Served, method: str, tls: Tls) -> None:
    for extra in ("Host: evil.example\r\n", f"Host: {served.address}\r\nOrigin: http://evil.example\r\n"):
        raw = f"{method} /v1/echo HTTP/1.1\r\n{extra}Connection: close\r\n\r\n".encode()
        assert (await served.closes_within(raw, 3.0, tls)).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "[::1]:7600", "localhost:1", "LOCALHOST", "node.lan:7600", "Node.Lan."]
)
@OVER
async def test_our_own_names_and_origin_may_use_the_api(served: Served, host: str, tls: Tls) -> None:
    headers = f"Host: {host}\r\nOrigin: {'http' if tls is None else 'https'}://{host}\r\nConnection: close"
    raw = f"GET /v1/echo HTTP/1.1\r\n{headers}\r\n\r\n".encode()
    assert (await served.closes_within(raw, 3.0, tls)).startswith(b"HTTP/1.1 200 ")


async def test_api_bodies_are_bounded(served: Served) -> None:
    size = 2 << 20
    head = f"POST /v1/echo HTTP/1.1\r\nHost: {served.address}\r\nContent-Length: {size}\r\n\r\n".encode()
    assert (await served.send(head + bytes(size), None))[0] == 413


async def test_compressed_api_bodies_are_not_inflated(served: Served) -> None:
    headers = f"Host: {served.address}\r\nContent-Encoding: gzip\r\nContent-Length: 3"
    raw = f"POST /v1/echo HTTP/1.1\r\n{headers}\r\n\r\nabc".encode()
    assert await served.send(raw, None) == (200, "abc")


def test_the_address_is_an_ip(served: Served) -> None:
    assert served.address == Address("127.0.0.1", served.address.port)
