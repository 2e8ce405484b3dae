"""What a member of a `strom` swarm refuses."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from p2pdrl.config.strategy import StromConfig
from p2pdrl.errors import PeerRefusedError
from p2pdrl.strategies.relay.log import History
from p2pdrl.strategies.relay.strom import RelayPush, RunHead, cut_runs

from ..graphs import Crowd

pytestmark = pytest.mark.looptime


async def pushed(change: dict, vector: bytes = b"", run: RunHead | None = None) -> tuple[int, Crowd]:
    """Send one push to the first of two; return the status of its refusal."""
    async with Crowd(StromConfig(), 2) as crowd:
        await crowd.start()
        await asyncio.sleep(1)
        one, two = crowd.nodes
        runs = () if run is None else (run,)
        push = RelayPush(two.swarm.says, one.strategy.history, one.strategy.facts["tau"], runs)
        push = msgspec.structs.replace(push, **change)
        with pytest.raises(PeerRefusedError) as refused:
            await two.transport.call(
                one.address,
                one.id,
                "relay",
                msgspec.msgpack.encode(push),
                vector=memoryview(vector) if vector else None,
                deadline_s=1.0,
            )
        assert (one.learner.now() == one.learner.x).all()
        return refused.value.status, crowd


async def test_messages_that_cannot_be():
    head = RunHead(f"{1:032x}", "elsewhere", 1, 1, (40,))
    status, crowd = await pushed({}, bytes(range(40)), head)
    assert status == 422
    assert crowd.nodes[0].swarm.strikes == [crowd.nodes[1].id]


@pytest.mark.parametrize(
    ("change", "vector", "run", "status"),
    [
        ({"tau": 0.5}, b"", None, 409),
        ({"history": "none"}, b"", None, 400),
        ({"summary": 3}, b"", None, 400),
        ({}, b"abc", None, 400),
        ({}, b"abc", RunHead("a", "b", 1, 1, (4,)), 400),
        ({}, bytes(1 << 21), RunHead("a", "b", 1, 1, (1 << 21,)), 422),
    ],
)
async def test_calls_that_make_no_sense(change, vector, run, status):
    assert (await pushed(change, vector, run))[0] == status


async def test_another_mode_is_refused():
    async with Crowd(StromConfig(), 2) as crowd:
        await crowd.start()
        await asyncio.sleep(1)
        one, two = crowd.nodes
        says = msgspec.structs.replace(two.swarm.says, mode_epoch=9)
        push = RelayPush(says, History(1, one.id), one.strategy.facts["tau"])
        with pytest.raises(PeerRefusedError) as refused:
            await two.transport.call(
                one.address, one.id, "relay", msgspec.msgpack.encode(push), deadline_s=1.0
            )
        assert refused.value.status == 409
        with pytest.raises(PeerRefusedError) as refused:
            await two.transport.call(one.address, one.id, "neighbour", b"", deadline_s=1.0)
        assert refused.value.status == 409


def test_a_vector_is_cut_where_its_head_says():
    head = RunHead("a", "b", 5, 3, (2, 0, 1))
    (run,) = cut_runs((head,), memoryview(b"xyz")) or []
    assert run.messages == (b"xy", b"", b"z")
    assert (run.first, run.oldest) == (5, 3)
    assert cut_runs((head,), memoryview(b"xyzz")) is None
    assert cut_runs((head,), memoryview(b"xy")) is None
