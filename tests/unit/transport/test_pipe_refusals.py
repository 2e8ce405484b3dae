"""Pipes that a server refuses, and what it bounds."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest

from p2pdrl.clock import SystemClock
from p2pdrl.errors import PeerRefusedError
from p2pdrl.transport.auth import format_time, new_nonce
from p2pdrl.transport.http_transport import HttpTransport
from p2pdrl.transport.protocol import Refusal

from .conftest import CLIENT_ID, KEY
from .stages import Served, asking, in_use, opened, staged
from .stream_callers import until


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
