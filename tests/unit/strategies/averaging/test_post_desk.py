"""The learner's open post, and what happens when there is none."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.strategies.averaging.post_desk import PostDesk
from p2pdrl.strategies.protocol import Post

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
        self.posts.put_nowait(Post(number, "gradients", 1, 1, np.zeros(2, np.float32)))


@pytest.fixture
async def desk():
    learner = Learner()
    desk = PostDesk(learner, LoopClock(), 3.0)
    desk.learner = learner
    pump = asyncio.create_task(desk.pump())
    yield desk
    desk.close()
    pump.cancel()
    await asyncio.gather(pump, return_exceptions=True)


async def test_a_post_waits_until_it_is_answered(desk):
    desk.learner.post(1)
    post = await desk.next()
    assert (await desk.next()) is post
    desk.answer(post, "replace")
    desk.answer(post, "replace")
    assert desk.learner.answers == [(1, "replace")]
    assert not desk.learner.ended
    assert desk.post is None
    desk.learner.post(2)
    desk.answer(await desk.next(), "replace", 0.5, end_update=True)
    assert desk.learner.ended


async def test_smaller_numbers_mean_a_new_learner(desk):
    for number in (1, 2):
        desk.learner.post(number)
        desk.answer(await desk.next(), "none")
    assert not desk.restarted
    desk.learner.post(3)
    old = await desk.next()
    desk.learner.post(1)
    await asyncio.sleep(0.1)
    assert desk.restarted
    desk.answer(old, "none")
    assert len(desk.learner.answers) == 2
    assert (await desk.next()).number == 1


async def test_who_is_awaited_for_long_is_excused_until_the_next_post(desk):
    began_s = LoopClock().monotonic()
    desk.awaited()
    await asyncio.sleep(1)
    desk.awaited()
    assert await desk.next() is None
    assert LoopClock().monotonic() - began_s == pytest.approx(3.0)
    assert await desk.next() is None
    desk.learner.post(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await desk.next()).number == 1


async def test_a_post_in_time_needs_no_excuse(desk):
    desk.awaited()
    await asyncio.sleep(2)
    desk.learner.post(1)
    post = await desk.next()
    await asyncio.sleep(5)
    desk.answer(post, "none")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await desk.next()
