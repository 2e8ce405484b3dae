"""The learner's open requests, and what happens when there is none."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from p2pdrl.clock import LoopClock
from p2pdrl.strategies.learner_requests import RequestQueue
from p2pdrl.strategies.protocol import LearnerRequest

pytestmark = pytest.mark.looptime


class Learner:
    def __init__(self):
        self.posts, self.answers = asyncio.Queue(), []

    async def next_request(self):
        return await self.posts.get()

    def answer(self, post, kind, learning_rate=None, *, end_update=False):
        self.answers.append((post.number, kind))
        self.ended = end_update

    def make_request(self, number):
        self.posts.put_nowait(LearnerRequest(number, "gradients", 1, 1, np.zeros(2, np.float32)))


@pytest.fixture
async def requests():
    learner = Learner()
    requests = RequestQueue(learner, LoopClock(), grace_s=3.0)
    requests.learner = learner
    following = asyncio.create_task(requests.follow())
    yield requests
    requests.close()
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_a_request_waits_until_it_is_answered(requests):
    requests.learner.make_request(1)
    post = await requests.next()
    assert (await requests.next()) is post
    requests.answer(post, "replace")
    requests.answer(post, "replace")
    assert requests.learner.answers == [(1, "replace")]
    assert not requests.learner.ended
    assert requests.open is None
    requests.learner.make_request(2)
    requests.answer(await requests.next(), "replace", 0.5, end_update=True)
    assert requests.learner.ended


async def test_smaller_numbers_mean_a_new_learner(requests):
    for number in (1, 2):
        requests.learner.make_request(number)
        requests.answer(await requests.next(), "none")
    assert not requests.restarted
    requests.learner.make_request(3)
    old = await requests.next()
    requests.learner.make_request(1)
    await asyncio.sleep(0.1)
    assert requests.restarted
    requests.answer(old, "none")
    assert len(requests.learner.answers) == 2
    assert (await requests.next()).number == 1


async def test_who_is_awaited_for_long_is_excused_until_the_next_request(requests):
    began_s = LoopClock().monotonic()
    requests.expected()
    await asyncio.sleep(1)
    requests.expected()
    assert await requests.next() is None
    assert LoopClock().monotonic() - began_s == pytest.approx(3.0)
    assert await requests.next() is None
    requests.learner.make_request(1)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert (await requests.next()).number == 1


async def test_a_request_in_time_needs_no_excuse(requests):
    requests.expected()
    await asyncio.sleep(2)
    requests.learner.make_request(1)
    post = await requests.next()
    await asyncio.sleep(5)
    requests.answer(post, "none")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(100):
            await requests.next()


async def test_who_waits_with_a_limit_or_is_cancelled_loses_no_request(requests):
    assert await requests.next(1.0) is None
    assert await requests.take(1.0) is None
    waiting = asyncio.create_task(requests.take())
    await asyncio.sleep(0)
    requests.learner.make_request(1)
    for _ in range(3):  # until the request is here, and the waiter is about to go on
        await asyncio.sleep(0)
        if requests.open is not None:
            break
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert (await requests.next(0.0)).number == 1


async def test_several_takers_share_the_requests_of_a_learner_that_runs_ahead():
    learner = Learner()
    requests = RequestQueue(learner, LoopClock(), most_open=2)
    following = asyncio.create_task(requests.follow())
    takers = [asyncio.create_task(requests.take()) for _ in range(2)]
    learner.make_request(1)
    learner.make_request(2)
    assert sorted(post.number for post in await asyncio.gather(*takers)) == [1, 2]
    for number in (3, 4, 5):
        learner.make_request(number)
    await asyncio.sleep(0.1)
    assert [(await requests.take()).number for _ in range(2)] == [4, 5]  # 3 was another learner's
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_closing_lets_everybody_go_and_answers_nothing(requests):
    waiting = asyncio.create_task(requests.next())
    await asyncio.sleep(0.1)
    requests.close()
    assert await waiting is None
    requests.learner.make_request(1)
    await asyncio.sleep(0.1)
    assert await requests.next() is None
    assert requests.learner.answers == []
