"""Pipes that a server refuses, and what it bounds."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.errors import PeerRefusedError
from p2pdrl.transport.opening import HELLO, OPENED
from p2pdrl.transport.pipe.server import PipeAnswer
from p2pdrl.transport.protocol import Refusal

from .conftest import OTHER, OTHER_ID, until
from .stages import Served, asking, calling, in_use, opened, staged


async def test_a_refusal_is_told_in_the_handlers_words(served: Served) -> None:
    async with staged(served) as (stage, caller):
        stage.refusal = Refusal(409, "another generation: 7")
        with pytest.raises(PeerRefusedError) as info:
            await opened(served, caller)
        assert (info.value.status, info.value.reason) == (409, "another generation: 7")
        assert served.transport.counters.refused[409] == 1
        assert in_use(served) == 0
        stage.refusal = None
        (await opened(served, caller)).close()


REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "foreign host": (403, {"headers": {"Host": "evil.example"}}),
    "foreign origin": (403, {"headers": {"Origin": "http://evil.example"}}),
    "no content type": (415, {"headers": {"Content-Type": None}}),
    "a vector": (413, {"vector": b"vector"}),
    "too much metadata": (413, {"meta": bytes(101)}),
    "more than announced": (413, {"body": lambda body: body + b"x"}),
    "unknown route": (404, {"path": "/p2p-pipe/other"}),
    "a call's route": (404, {"path": "/p2p-pipe/take"}),
    "another method": (405, {"method": "GET"}),
    "other protocol": (403, {"change": lambda h: replace(h, protocol=99)}),
    "wrong swarm": (403, {"change": lambda h: replace(h, swarm="0123456789abcdef")}),
    "wrong target": (403, {"change": lambda h: replace(h, target="c" * 32)}),
    "another's name": (403, {"change": lambda h: replace(h, sender=OTHER_ID)}),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_what_is_refused_before_the_handler(served: Served, name: str) -> None:
    status, changes = REFUSED[name]
    async with staged(served) as (stage, _):
        assert (await served.send(asking(served, **changes)))[0] == status
        assert not stage.asked
        assert in_use(served) == 0
        assert served.transport.counters.refused[status] == 1
    await until(lambda: served.listener.connections == 0)


async def test_a_pipes_route_takes_no_calls(served: Served) -> None:
    async with staged(served) as (stage, _):
        assert (await served.send(served.request(route="stage")))[0] == 404
        assert not stage.asked


async def test_a_request_opens_one_pipe(served: Served) -> None:
    async with staged(served) as (stage, _):
        status, body = await served.exchange(asking(served))
        assert status == 200
        answer = PipeAnswer.decode(body)
        assert (answer.meta, stage.pipes) == (b"welcome", [])
        hello = HELLO + answer.opening.token
        reader, writer = await served.connect(None)
        writer.write(hello)
        assert await asyncio.wait_for(reader.readexactly(1), 5) == OPENED
        assert await served.closes_within(hello, 3.0, None) == b""
        assert len(stage.asked) == len(stage.pipes) == 1
        assert served.transport.counters.refused_connections == 1
        writer.transport.abort()


async def test_a_caller_that_breaks_off_as_it_is_welcomed_is_told_to_the_handler(served: Served) -> None:
    """Its pipe counts until the handler closes it."""
    async with staged(served) as (stage, _):
        for count in range(1, 10):
            _, body = await served.exchange(asking(served))
            _, writer = await served.connect(None)
            writer.write(HELLO + PipeAnswer.decode(body).opening.token)
            writer.transport.abort()
            await until(lambda: len(stage.pipes) == 1)
            assert (len(stage.asked), in_use(served)) == (count, 1)
            stage.close()
            assert in_use(served) == 0


async def test_another_key_is_refused(served: Served) -> None:
    async with staged(served) as (stage, _), calling(served, key=b"another") as stranger:
        with pytest.raises(PeerRefusedError, match=r"403: .*--swarm-key-file"):
            await opened(served, stranger)
        assert not stage.asked


async def test_who_wants_to_hide_is_obeyed(trusting: Served) -> None:
    async with staged(trusting) as (stage, caller), calling(trusting, OTHER, hides=False) as other:
        for node, hides in ((caller, True), (other, False)):
            (await opened(trusting, node)).close()
            await until(lambda: len(stage.pipes) == 1)
            assert stage.pipes[0].ticket.hides is hides
            stage.close()


async def test_one_peer_has_a_few_pipes_only(serve_with: Any, quick: Any) -> None:
    limits = replace(quick, header_deadline_s=5.0, stall_deadline_s=5.0, max_pipes_per_peer=2, max_pipes=3)
    async for served in serve_with(limits):
        async with staged(served) as (stage, caller), calling(served, OTHER) as other:
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
