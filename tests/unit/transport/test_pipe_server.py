"""Pipes that peers ask for: whom they are given to, how many, and what becomes of their connections."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError, PeerUnreachableError
from p2pdrl.transport.auth import format_time, new_nonce
from p2pdrl.transport.headers import RequestHead
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.listener import Listener
from p2pdrl.transport.pipe import MAX_PIPE_META_BYTES, Pipe, PipeReply
from p2pdrl.transport.pipe_end import PipeEnd
from p2pdrl.transport.protocol import Incoming, Refusal

from .conftest import CLIENT_ID, KEY, SERVER_ID
from .pipes import LONG_S, end_of
from .stream_callers import until

Served = Any
Change = Callable[[RequestHead], RequestHead]


class Stage:
    """A handler that takes pipes as long as it isn't told otherwise."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.pipes: list[Pipe] = []
        self.lost = 0
        self.refusal: Refusal | None = None
        self.wait: asyncio.Event | None = None

    async def __call__(self, incoming: Incoming) -> PipeReply:
        self.asked.append((incoming.sender, incoming.meta))
        if self.wait is not None:
            await self.wait.wait()
        if self.refusal is not None:
            raise self.refusal
        return PipeReply(b"welcome", self.take)

    def take(self, pipe: Pipe | None) -> None:
        if pipe is None:
            self.lost += 1
        else:
            self.pipes.append(pipe)

    def close(self) -> None:
        while self.pipes:
            self.pipes.pop().close()


@asynccontextmanager
async def staged(served: Served) -> AsyncIterator[tuple[Stage, HttpTransport]]:
    """A handler at ``served``, and a caller."""
    stage = Stage()
    served.transport.serve_pipes("stage", stage, max_meta_bytes=100)
    caller = HttpTransport(CLIENT_ID, "default", KEY, clock=SystemClock(), limits=served.transport.limits)
    await caller.start()
    try:
        yield stage, caller
    finally:
        stage.close()
        await caller.close()


async def opened(served: Served, caller: HttpTransport, meta: bytes = b"hello") -> Pipe:
    return await caller.open_pipe(served.address, SERVER_ID, "stage", meta, deadline_s=LONG_S)


def in_use(served: Served) -> int:
    return len(served.transport._server.pipes)


async def carries(one: PipeEnd, other: PipeEnd) -> None:
    """Make sure that messages pass both ways."""
    for end, peer in ((one, other), (other, one)):
        end.send(3, b"meta", memoryview(b"vector"), deadline_s=LONG_S)
        message = await asyncio.to_thread(peer.receive, deadline_s=LONG_S)
        assert (message.kind, message.meta, message.vector) == (3, b"meta", b"vector")


def asking(served: Served, meta: bytes = b"hello", path: str = "/p2p-pipe/stage", **more: Any) -> bytes:
    """A request for a pipe, right in all that isn't overridden."""
    change: Change = more.pop("change", lambda head: head)
    headers = {"Connection": "Upgrade", "Upgrade": "p2pdrl-pipe", **more.pop("headers", {})}
    raw: bytes = served.request(
        meta, change=lambda head: change(replace(head, path=path)), headers=headers, **more
    )
    return raw


async def test_a_pipe_is_given_to_its_handler(patient: Served) -> None:
    async with staged(patient) as (stage, caller):
        pipe = await opened(patient, caller)
        assert (pipe.peer, pipe.meta) == (SERVER_ID, b"welcome")
        assert stage.asked == [(CLIENT_ID, b"hello")]
        (theirs,) = stage.pipes
        assert (theirs.peer, theirs.meta) == (CLIENT_ID, b"")
        assert pipe.ticket.keys is not None
        assert theirs.ticket.keys == pipe.ticket.keys[::-1]
        assert "\\x" not in repr(pipe.ticket)
        with end_of(pipe) as one, end_of(theirs) as other:
            assert pipe.fd == theirs.fd == -1
            await carries(one, other)
        pipe.close()


async def test_a_pipe_is_nobodys_connection_any_more(served: Served) -> None:
    """It is neither counted, nor watched for silence, nor closed with the listener."""
    async with staged(served) as (stage, caller):
        pipe = await opened(served, caller)
        await until(lambda: served.listener.connections == 0)
        with end_of(pipe) as one, end_of(stage.pipes[0]) as other:
            await asyncio.sleep(2 * served.transport.limits.header_deadline_s)
            assert served.transport.counters.dropped_connections == 0
            await carries(one, other)
            await served.transport.close()
            await asyncio.wait_for(served.listener.close(), 3)
            await caller.close()
            await carries(one, other)


async def test_both_ends_may_speak_first(patient: Served) -> None:
    async with staged(patient) as (stage, caller):
        for first in (0, 1):
            pipe = await opened(patient, caller)
            with end_of(stage.pipes[-1]) as other:
                if first:
                    other.send(1, b"early", deadline_s=LONG_S)
                    other.flush(deadline_s=LONG_S)
                with end_of(pipe) as one:
                    if not first:
                        one.send(1, b"early", deadline_s=LONG_S)
                    listener = one if first else other
                    assert (await asyncio.to_thread(listener.receive, deadline_s=LONG_S)).meta == b"early"


async def test_a_pipe_that_nobody_took_over_ends_when_it_is_closed(patient: Served) -> None:
    async with staged(patient) as (stage, caller):
        pipe = await opened(patient, caller)
        with end_of(pipe) as one:
            stage.close()
            assert in_use(patient) == 0
            with pytest.raises(PeerUnreachableError):
                await asyncio.to_thread(one.receive, deadline_s=LONG_S)


async def test_a_refusal_is_told_in_the_handlers_words(patient: Served) -> None:
    async with staged(patient) as (stage, caller):
        stage.refusal = Refusal(409, "another generation: 7")
        with pytest.raises(PeerRefusedError) as info:
            await opened(patient, caller)
        assert (info.value.status, info.value.reason) == (409, "another generation: 7")
        assert patient.transport.counters.refused[409] == 1
        assert in_use(patient) == 0
        stage.refusal = None
        (await opened(patient, caller)).close()


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "foreign host": (403, {"headers": {"Host": "evil.example"}}),
    "foreign origin": (403, {"headers": {"Origin": "http://evil.example"}}),
    "no content type": (415, {"headers": {"Content-Type": None}}),
    "no upgrade": (426, {"headers": {"Upgrade": None}}),
    "a stream": (426, {"headers": {"Upgrade": "p2pdrl"}}),
    "a vector": (413, {"vector": b"vector"}),
    "too much metadata": (413, {"meta": bytes(101)}),
    "changed metadata": (400, {"body": lambda body: b"H" + body[1:]}),
    "metadata without a mac": (400, {"body": lambda body: body[:-16] + bytes(16)}),
    "unknown route": (404, {"path": "/p2p-pipe/other"}),
    "a call's route": (404, {"path": "/p2p-pipe/take"}),
    "another method": (405, {"method": "GET"}),
    "other protocol": (403, {"change": lambda h: replace(h, protocol=99)}),
    "wrong swarm": (403, {"change": lambda h: replace(h, swarm="0123456789abcdef")}),
    "wrong target": (403, {"change": lambda h: replace(h, target="c" * 32)}),
    "no mac": (401, {"forge": lambda h: replace(h, mac="")}),
    "bad mac": (401, {"forge": lambda h: replace(h, mac="0" * 64)}),
    "signed for a call": (401, {"forge": lambda h: replace(h, path="/p2p-pipe/stage"), "path": "/p2p/stage"}),
    "forged sender": (401, {"forge": lambda h: replace(h, sender="c" * 32)}),
    "forged nonce": (401, {"forge": lambda h: replace(h, nonce=new_nonce())}),
    "clock behind": (401, {"change": lambda h: replace(h, time=format_time(time.time() - 61))}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_before_the_handler(patient: Served, name: str) -> None:
    status, changes = REFUSED[name]
    async with staged(patient) as (stage, _):
        assert (await patient.send(asking(patient, **changes)))[0] == status
        assert not stage.asked
        assert in_use(patient) == 0
        assert patient.transport.counters.refused[status] == 1
    await until(lambda: patient.listener.connections == 0)


async def test_a_pipes_route_takes_no_calls(patient: Served) -> None:
    async with staged(patient) as (stage, _):
        assert (await patient.send(patient.request(route="stage")))[0] == 404
        assert not stage.asked


async def test_a_request_opens_one_pipe(patient: Served) -> None:
    async with staged(patient) as (stage, _):
        raw = asking(patient)
        reader, writer = await asyncio.open_connection(patient.address.host, patient.address.port)
        writer.write(raw)
        assert (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)).startswith(b"HTTP/1.1 101 ")
        assert (await patient.send(raw))[0] == 409
        assert len(stage.asked) == len(stage.pipes) == 1
        writer.close()


async def test_another_key_is_refused(patient: Served) -> None:
    async with staged(patient) as (stage, _):
        liar = HttpTransport(CLIENT_ID, "default", b"another", clock=SystemClock())
        await liar.start()
        with pytest.raises(PeerRefusedError, match="401"):
            await opened(patient, liar)
        await liar.close()
        assert not stage.asked


async def test_one_peer_has_a_few_pipes_only(serve_with: Any, quick: Any) -> None:
    limits = replace(quick, header_deadline_s=5.0, stall_deadline_s=5.0, max_pipes_per_peer=2, max_pipes=3)
    async for served in serve_with(limits):
        async with staged(served) as (stage, caller):
            other = HttpTransport("d" * 32, "default", KEY, clock=SystemClock(), limits=limits)
            await other.start()
            pipes = [await opened(served, caller) for _ in range(2)]
            with pytest.raises(PeerRefusedError, match="429: 2 pipes of yours"):
                await opened(served, caller)
            pipes.append(await opened(served, other))
            with pytest.raises(PeerRefusedError, match="429: 1 pipes of yours are open here, 3 in all"):
                await opened(served, other)
            stage.pipes[0].detach()
            with pytest.raises(PeerRefusedError, match="429"):
                await opened(served, caller)
            assert len(stage.asked) == 3
            for _ in range(2):
                stage.pipes[0].close()
            pipes.append(await opened(served, caller))
            for pipe in pipes:
                pipe.close()
            await other.close()
        assert in_use(served) == 0


async def test_a_handler_that_waits_holds_a_place(serve_with: Any, quick: Any) -> None:
    limits = replace(quick, header_deadline_s=5.0, stall_deadline_s=5.0, max_pipes_per_peer=1)
    async for served in serve_with(limits):
        async with staged(served) as (stage, caller):
            stage.wait = asyncio.Event()
            first = asyncio.create_task(opened(served, caller))
            await until(lambda: len(stage.asked) == 1)
            with pytest.raises(PeerRefusedError, match="429"):
                await opened(served, caller)
            stage.wait.set()
            (await first).close()


async def test_a_caller_that_went_away_leaves_no_pipe(patient: Served) -> None:
    async with staged(patient) as (stage, _):
        stage.wait = asyncio.Event()
        _, writer = await asyncio.open_connection(patient.address.host, patient.address.port)
        writer.write(asking(patient))
        await until(lambda: len(stage.asked) == 1)
        writer.transport.abort()
        await until(lambda: patient.listener.connections == 0)
        stage.wait.set()
        await until(lambda: stage.lost == 1)
        await until(lambda: in_use(patient) == 0)
        assert not stage.pipes


@pytest.mark.parametrize("where", ["handler", "take", "too long an answer"])
async def test_a_bug_of_the_handler_is_told_to_the_loop(patient: Served, where: str) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))

    def take(pipe: Pipe | None) -> None:
        if pipe is not None:
            raise KeyError("take")

    async def handler(_: Incoming) -> PipeReply:
        if where == "handler":
            raise KeyError("handler")
        return PipeReply(bytes(MAX_PIPE_META_BYTES + 1 if where.startswith("too") else 1), take)

    patient.transport.serve_pipes("broken", handler)
    caller = HttpTransport(CLIENT_ID, "default", KEY, clock=SystemClock())
    await caller.start()
    opening = caller.open_pipe(patient.address, SERVER_ID, "broken", b"", deadline_s=LONG_S)
    if where == "take":
        with end_of(await opening) as end, pytest.raises(PeerUnreachableError):
            await asyncio.to_thread(end.receive, deadline_s=LONG_S)
    else:
        with pytest.raises(PeerRefusedError, match="500"):
            await opening
    await until(lambda: in_use(patient) == 0)
    expected = ValueError if where.startswith("too") else KeyError
    assert [type(context["exception"]) for context in told] == [expected]
    await caller.close()


async def test_a_swarm_without_a_key_opens_pipes_too() -> None:
    pipes: list[Pipe | None] = []

    async def handler(incoming: Incoming) -> PipeReply:
        return PipeReply(incoming.meta, pipes.append)

    nodes = [HttpTransport(name * 32, "default", None, clock=SystemClock()) for name in "ab"]
    nodes[1].serve_pipes("stage", handler)
    app = web.Application()
    nodes[1].mount(app)
    listener = Listener(nodes[1].limits, SystemClock(), nodes[1].counters)
    address = await listener.listen(app, "127.0.0.1", 0)
    for node in nodes:
        await node.start()
    for meta in (b"", b"meta", bytes(MAX_PIPE_META_BYTES)):
        pipe = await nodes[0].open_pipe(address, "b" * 32, "stage", meta, deadline_s=LONG_S)
        assert pipe.meta == meta
        assert pipe.ticket.keys is None
        theirs = pipes.pop()
        assert theirs is not None
        with end_of(pipe) as one, end_of(theirs) as other:
            await carries(one, other)
        theirs.close()
    for node in nodes:
        await node.close()
    await listener.close()


async def test_another_process_gets_the_descriptor(patient: Served) -> None:
    """What the daemon hands to its learner is all that the learner needs."""
    async with staged(patient) as (stage, caller):
        pipe = await opened(patient, caller)
        ours, learners = socket.socketpair()
        with ours, learners:
            socket.send_fds(ours, [b"x"], [pipe.fd])
            pipe.detach()
            _, (fd,), _, _ = socket.recv_fds(learners, 1, 1)
        sock = socket.socket(fileno=fd)
        ticket = pipe.ticket
        with (
            PipeEnd(sock, ticket.keys, ticket.leftover, into=lambda *_: memoryview(bytearray(6))) as one,
            end_of(stage.pipes[0]) as other,
        ):
            await carries(one, other)
            one.close()
            with pytest.raises(PeerUnreachableError):
                await asyncio.to_thread(other.receive, deadline_s=LONG_S)
