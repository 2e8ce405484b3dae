"""The learning rate that all members of a round step at."""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest

from p2pdrl.strategies.allreduce import reduce_scatter
from p2pdrl.strategies.allreduce.averager import ROUTE, Average, ReduceRequest

from .bowls import Bowls, shared

X = np.zeros(1, np.float32)


@pytest.mark.parametrize(
    ("rates", "weights", "expected"),
    [
        ((0.3, 0.1, 0.2), (1.0, 1.0, 1.0), 0.2),
        ((0.1, 1e6), (1.0, 1.0), 0.1),
        ((1e6, 0.1, 0.2), (1.0, 5.0, 1.0), 0.2),
        ((0.0, 0.1, 0.0), (0.0, 2.0, 0.0), 0.1),
        ((0.2, 0.1, 0.3), (0.0, 0.0, 0.0), 0.2),
    ],
    ids=["median", "lower of two", "outlier", "who gave nothing", "nobody gave"],
)
def test_it_is_the_lower_median_of_those_who_gave(rates, weights, expected):
    average = Average(X, weights, (1,) * len(rates), 0.0, 0.0, learning_rates=rates)
    assert average.learning_rate == expected


@pytest.mark.looptime
@pytest.mark.parametrize("nodes", [2, 3])
async def test_paused_learners_slow_no_others_steps(nodes):
    async with Bowls(nodes=nodes, learning_rate=0.1) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        going, *paused = bowls.nodes
        for node in paused:
            node.learner.period_s = 1000.0
        await asyncio.sleep(12)
        assert going.swarm.rounds[-1].missing == tuple(node.id for node in paused)
        assert going.learner.told_learning_rate == 0.1


@pytest.mark.looptime
async def test_who_tells_each_owner_another_figure_drives_nobody_apart(monkeypatch):
    monkeypatch.setattr(reduce_scatter, "LEAST_PIECE", 1)
    async with Bowls(nodes=3) as bowls:
        await bowls.start()
        await asyncio.sleep(3)
        one, other, liar = bowls.nodes
        one.learner.learning_rate, other.learner.learning_rate = 0.08, 0.12
        call = liar.transport.call

        async def two_faced(to, target, route, meta, **options):
            if route == ROUTE:
                ask = msgspec.msgpack.decode(meta, type=ReduceRequest)
                rate = 0.05 if target == one.id else 0.2
                meta = msgspec.msgpack.encode(msgspec.structs.replace(ask, learning_rate=rate))
            return await call(to, target, route, meta, **options)

        liar.transport.call = two_faced
        await asyncio.sleep(3)
        assert one.learner.told_learning_rate in (0.08, 0.12)
        assert shared([one, other]) >= 9
