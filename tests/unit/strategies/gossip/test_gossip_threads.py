"""Large vectors are worked on in threads; time is real."""

from __future__ import annotations

import asyncio
import threading

import msgspec
import numpy as np

from .test_gossip import refusal

LONG = 600_000


async def until(condition) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.002)


async def test_an_exchange_in_threads(swarm):
    a, b = await swarm.grow(2, size=LONG)
    a.strategy.updated(1)
    await until(lambda: b.strategy.outcomes == {"answered": 1} and a.strategy.outcomes.get("ok"))
    assert np.allclose(a.now(), b.now(), atol=1e-6)


async def test_buffers_stay_taken_while_a_thread_works_on_them(swarm):
    config = msgspec.structs.replace(swarm.config, deadline_s=0.05)
    a, b = await swarm.grow(2, config, LONG)
    began, go_on = threading.Event(), threading.Event()

    def slow():
        began.set()
        go_on.wait(5)

    await b.read_through(slow)
    a.strategy.updated(1)
    await until(began.is_set)
    await until(lambda: a.strategy.outcomes.get("timeout"))
    await asyncio.sleep(0.06)  # b's own deadline is over as well
    assert await refusal(a, b, "another") == 423
    go_on.set()
    await until(lambda: a.strategy.outcomes.get("ok"))
