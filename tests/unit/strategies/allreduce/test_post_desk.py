"""The learner's open post, and what happens when there is none."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.strategies.allreduce.averager import RequestQueue
from p2pdrl.strategies.protocol import LearnerRequest

pytestmark = pytest.mark.looptime


class Learner:
    def __init__(self):
        self.posts, self.answers = asyncio.Queue(), []

    async def next_post(self):
        return await self.posts.get()

    def answer(self, post, kind, learning_rate=None, *, end_update=False):
        self.answers.append((post.number, kind))
        self.ended = end_update

    def post(self, number):
        self.posts.put_nowait(LearnerRequest(number, "gradients", 1, 1, np.zeros(2, np.float32)))


@pytest.fixture
async def requests():
    learner = Learner()
    requests = RequestQueue(learner, LoopClock(), 3.0)
    requests.learner = learner
    pump = asyncio.create_task(requests.pump())
    yield requests
    requests.close()
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)


async def test_a_post_waits_until_it_is_answered(requests):
    requests.learner.post(1)
    post = await requests.next()
    assert (await requests.next()) is post
    requests.answer(post, "replace")
    requests.answer(post, "replace")
    assert requests.learner.answers == [(1, "replace")]
    assert not requests.learner.ended
    assert requests.post is None
    requests.learner.post(2)
    requests.answer(await requests.next(), "replace", 0.5, end_update=True)
    assert requests.learner.ended


async def test_smaller_numbers_mean_a_new_learner(requests):
    for number in (1, 2):
        requests.learner.post(number)
        requests.answer(await requests.next(), "none")
    assert not requests.restarted
    requests.learner.post(3)
    old = await requests.next()
    requests.learner.post(1)
    await asyncio.sleep(0.1)
    assert requests.restarted
    requests.answer(old, "none")
    assert len(requests.learner.answers) == 2
    assert (await requests.next()).number == 1


async def test_who_is_awaited_for_long_is_excused_until_the_next_post(requests):
    began_s = LoopClock().monotonic()
    requests.awaited()
    await asyncio.sleep(1)
    requests.awaited()
    assert await requests.next() is None
    assert LoopClock().monotonic() - began_s == pytest.approx(3.0)
    assert await requests.next() is None
    requests.learner.post(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await requests.next()).number == 1


async def test_a_post_in_time_needs_no_excuse(requests):
    requests.awaited()
    await asyncio.sleep(2)
    requests.learner.post(1)
    post = await requests.next()
    await asyncio.sleep(5)
    requests.answer(post, "none")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await requests.next()
