"""A rank follows one order at a time, and none once its view has ended."""

from __future__ import annotations

import asyncio
import random
from types import SimpleNamespace

import msgspec
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.group.view import ViewKey
from p2pdrl.strategies.pipeline.forming import RankSetup
from p2pdrl.strategies.pipeline.layout import PipelineMembers
from p2pdrl.strategies.protocol import StrategyContext
from p2pdrl.testing.virtual_swarm import FakeSwarm
from p2pdrl.transport.protocol import Refusal

from .forms import make_form
from .swarms import CONFIG

pytestmark = pytest.mark.looptime

KEY = ViewKey(1, 2, "h")
FORM = make_form(key=KEY, members=("h", "a"))


class Slow(RankSetup):
    """It takes a while to do as ordered, and to give that up."""

    began: list[int]

    async def _take(self, generation, form, connections):
        self.began.append(form.generation)
        try:
            await asyncio.sleep(1.0)
        except asyncio.CancelledError:
            await asyncio.sleep(0.2)  # a thread that has to end first
            raise
        self.began.append(-form.generation)
        return generation


def setup() -> Slow:
    context = StrategyContext(FakeSwarm("a"), None, None, LoopClock(), random.Random(0), 1, 4, 1e6)
    side = SimpleNamespace(last=0, layers=[None] * 6, drop=lambda: None)
    parts = SimpleNamespace(context=context, config=CONFIG, side=side, pipes=None)
    made = Slow(parts, None, KEY, PipelineMembers(0, ("h", "a")))
    made.began = []
    return made


async def test_of_two_orders_at_once_one_counts():
    one = setup()
    first = asyncio.create_task(one.follow("h", FORM))
    await asyncio.sleep(0.1)
    newer = msgspec.structs.replace(FORM, generation=10)
    twice = [asyncio.create_task(one.follow("h", newer)) for _ in range(2)]
    generations = await asyncio.gather(*twice)
    assert generations[0] is generations[1]
    with pytest.raises(Refusal):
        await first
    assert one.began == [9, 10, -10]
    await one.close()


async def test_an_order_that_waits_while_the_view_ends_comes_too_late():
    one = setup()
    first = asyncio.create_task(one.follow("h", FORM))
    await asyncio.sleep(0.1)
    late = asyncio.create_task(one.follow("h", msgspec.structs.replace(FORM, generation=10)))
    await asyncio.sleep(0.1)
    await one.close()
    outcomes = await asyncio.gather(first, late, return_exceptions=True)
    assert [(type(one), one.status) for one in outcomes] == [(Refusal, 409)] * 2
    assert one.began == [9]
