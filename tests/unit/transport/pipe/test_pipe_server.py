"""Pipes that a server gives to its handlers."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import pytest
from aiohttp import web

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError, PeerUnreachableError
from p2pdrl.transport.http.listener import Listener
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.pipe.end import PipeEnd
from p2pdrl.transport.pipe.ticket import MAX_PIPE_META_BYTES, Pipe, PipeReply
from p2pdrl.transport.protocol import Incoming

from ..conftest import CLIENT_ID, SERVER_ID, until
from ..pipes import LONG_S, end_of
from ..stages import Served, asking, calling, in_use, opened, staged


async def carries(one: PipeEnd, other: PipeEnd) -> None:
    """Make sure that messages pass both ways."""
    for end, peer in ((one, other), (other, one)):
        end.send(3, b"meta", memoryview(b"vector"), deadline_s=LONG_S)
        message = await asyncio.to_thread(peer.receive, deadline_s=LONG_S)
        assert (message.kind, message.meta, message.vector) == (3, b"meta", b"vector")


async def test_a_pipe_is_given_to_its_handler(served: Served) -> None:
    async with staged(served) as (stage, caller):
        pipe = await opened(served, caller)
        await until(lambda: len(stage.pipes) == 1)
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


async def test_a_pipe_is_nobodys_connection_any_more(impatient: Served) -> None:
    """It is neither counted, nor watched for silence, nor closed with the listener."""
    async with staged(impatient) as (stage, caller):
        pipe = await opened(impatient, caller)
        await until(lambda: len(stage.pipes) == 1)
        assert impatient.listener.connections == 1, "that by which it was asked for"
        with end_of(pipe) as one, end_of(stage.pipes[0]) as other:
            await asyncio.sleep(2 * impatient.transport.limits.header_deadline_s)
            assert impatient.transport.counters.dropped_connections == 0
            await carries(one, other)
            await impatient.transport.close()
            await asyncio.wait_for(impatient.listener.close(), 3)
            await caller.close()
            await carries(one, other)


async def test_both_ends_may_speak_first(served: Served) -> None:
    async with staged(served) as (stage, caller):
        for first in (0, 1):
            pipe = await opened(served, caller)
            await until(lambda: len(stage.pipes) == first + 1)  # noqa: B023
            with end_of(stage.pipes[-1]) as other:
                if first:
                    other.send(1, b"early", deadline_s=LONG_S)
                    other.flush(deadline_s=LONG_S)
                with end_of(pipe) as one:
                    if not first:
                        one.send(1, b"early", deadline_s=LONG_S)
                    listener = one if first else other
                    assert (await asyncio.to_thread(listener.receive, deadline_s=LONG_S)).meta == b"early"


async def test_a_pipe_that_nobody_took_over_ends_when_it_is_closed(served: Served) -> None:
    async with staged(served) as (stage, caller):
        pipe = await opened(served, caller)
        await until(lambda: len(stage.pipes) == 1)
        with end_of(pipe) as one:
            stage.close()
            assert in_use(served) == 0
            with pytest.raises(PeerUnreachableError):
                await asyncio.to_thread(one.receive, deadline_s=LONG_S)


async def test_a_caller_that_went_away_leaves_no_pipe(served: Served) -> None:
    async with staged(served) as (stage, _):
        stage.wait = asyncio.Event()
        _, writer = await served.connect()
        writer.write(asking(served))
        await until(lambda: len(stage.asked) == 1)
        writer.transport.abort()
        await until(lambda: served.listener.connections == 0)
        stage.wait.set()
        await until(lambda: stage.lost == 1)
        await until(lambda: in_use(served) == 0)
        assert not stage.pipes


async def test_a_promise_that_nobody_takes_up_is_lost_when_the_node_closes(served: Served) -> None:
    async with staged(served) as (stage, _):
        assert (await served.exchange(asking(served)))[0] == 200
        assert in_use(served) == 1
        await served.transport.close()
        assert stage.lost == 1
        assert in_use(served) == 0


@pytest.mark.parametrize("where", ["handler", "take", "too long an answer"])
async def test_a_bug_of_the_handler_is_told_to_the_loop(served: Served, where: str) -> None:
    told: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context))

    def take(pipe: Pipe | None) -> None:
        if pipe is not None:
            raise KeyError("take")

    async def handler(_: Incoming) -> PipeReply:
        if where == "handler":
            raise KeyError("handler")
        return PipeReply(bytes(MAX_PIPE_META_BYTES + 1 if where.startswith("too") else 1), take)

    served.transport.serve_pipes("broken", handler)
    async with calling(served) as caller:
        opening = caller.open_pipe(served.address, SERVER_ID, "broken", b"", deadline_s=LONG_S)
        if where == "take":
            with end_of(await opening) as end, pytest.raises(PeerUnreachableError):
                await asyncio.to_thread(end.receive, deadline_s=LONG_S)
        else:
            with pytest.raises(PeerRefusedError, match="500"):
                await opening
    await until(lambda: in_use(served) == 0)
    expected = ValueError if where.startswith("too") else KeyError
    assert [type(context["exception"]) for context in told] == [expected]


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
        await until(lambda: len(pipes) == 1)
        theirs = pipes.pop()
        assert theirs is not None
        with end_of(pipe) as one, end_of(theirs) as other:
            await carries(one, other)
        theirs.close()
    for node in nodes:
        await node.close()
    await listener.close()


async def test_another_process_gets_the_descriptor(served: Served) -> None:
    """What the daemon hands to its learner is all that the learner needs."""
    async with staged(served) as (stage, caller):
        pipe = await opened(served, caller)
        await until(lambda: len(stage.pipes) == 1)
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
