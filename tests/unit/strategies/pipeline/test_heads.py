"""Heads' exchanges end with the generation, and on time."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.strategies.pipeline.heads import Heads
from p2pdrl.strategies.protocol import Context
from p2pdrl.strategies.testing.swarm import FakeSwarm

from .swarms import CONFIG

pytestmark = pytest.mark.looptime


async def test_who_is_called_away_while_an_exchange_ends_has_ended_it():
    heads = Heads(CONFIG, Context(FakeSwarm("a"), None, None, LoopClock(), random.Random(0), 1, 4, 1e6))
    stopped = []

    async def stop(timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)
        stopped.append(timeout_s)

    heads._gossip = SimpleNamespace(stop=stop, outcomes={}, consensus_distance=None)
    ending = asyncio.create_task(heads.end(0.5))
    await asyncio.sleep(0.1)
    ending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await ending
    assert stopped == [0.0]
    await heads.end(0.5)
    assert stopped == [0.0], "there is nothing left to end"
