"""Work in each view of a group: begun with it, cancelled with it, never two at a time."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from .worlds import WAIT_S, world

pytestmark = pytest.mark.looptime


class Work:
    """Notes when it begins and ends in a view; `act` stays until it is cancelled."""

    def __init__(self) -> None:
        self.begun, self.ended = [], []
        self.news = asyncio.Event()

    async def act(self, active):
        assert len(self.begun) == len(self.ended)
        self.begun.append(active.view)
        self.news.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.2)  # cleaning up takes a while
            self.ended.append(active.view)

    async def until(self, count):
        async with asyncio.timeout(WAIT_S):
            while len(self.begun) < count:
                self.news.clear()
                await self.news.wait()


@contextlib.asynccontextmanager
async def running(coroutine):
    task = asyncio.create_task(coroutine)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _replace_view(swarm, node):
    await swarm.others(node)[0].die()
    swarm.introduce()
    await swarm.agree()


async def test_each_view_is_acted_in_once_and_cleaned_up_before_the_next():
    async with world(4) as swarm:
        await swarm.agree()
        node, work = swarm.nodes[0], Work()
        async with running(node.group.run(work.act)):
            await work.until(1)
            for count in (2, 3):
                await _replace_view(swarm, node)
                await work.until(count)
                assert work.ended == work.begun[:-1]
            assert work.begun[-1] == node.group.view
            keys = [view.key for view in work.begun]
            assert keys == sorted(set(keys))
        assert work.ended == work.begun


async def test_stopping_the_group_ends_the_work_and_returns():
    async with world(2) as swarm:
        await swarm.agree()
        node, work = swarm.nodes[0], Work()
        async with running(node.group.run(work.act)) as task:
            await work.until(1)
            await node.group.stop()
            async with asyncio.timeout(WAIT_S):
                await task
            assert work.ended == work.begun


async def test_cancelling_waits_for_the_work_to_clean_up_and_leaves_the_group_alone():
    async with world(2) as swarm:
        await swarm.agree()
        node, work = swarm.nodes[0], Work()
        async with running(node.group.run(work.act)):
            await work.until(1)
        assert work.ended == work.begun
        assert node.group.view is not None


async def test_work_that_is_done_in_a_view_is_called_again_in_the_next():
    async with world(3) as swarm:
        await swarm.agree()
        node, seen = swarm.nodes[0], []

        async def act(active):
            seen.append(active.view.key)

        async with running(node.group.run(act)):
            await asyncio.sleep(2.0)
            assert len(seen) == 1
            await _replace_view(swarm, node)
            await asyncio.sleep(0.1)
            assert seen[-1] == node.group.view.key > seen[0]


async def test_it_returns_once_done_and_asks_for_no_further_view():
    async with world(2) as swarm:
        await swarm.agree()
        seen = []

        async def act(active):
            seen.append(active)

        async with asyncio.timeout(WAIT_S):
            await swarm.nodes[0].group.run(act, done=lambda: bool(seen))
        assert len(seen) == 1
        await swarm.nodes[0].group.run(act, done=lambda: True)
        assert len(seen) == 1


@pytest.mark.parametrize("cleaning", [False, True])
async def test_an_error_of_the_work_comes_out_also_when_it_happens_while_cleaning_up(cleaning):
    async with world(3) as swarm:
        await swarm.agree()
        node = swarm.nodes[0]

        async def act(active):
            if not cleaning:
                raise ZeroDivisionError("a bug")
            try:
                await asyncio.Event().wait()
            finally:
                raise ZeroDivisionError("a bug")

        async with running(node.group.run(act)) as task:
            await asyncio.sleep(0.1)
            if cleaning:
                await _replace_view(swarm, node)
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(ZeroDivisionError):
                    await task


async def test_what_ends_the_group_comes_out_and_not_what_the_work_makes_of_it():
    async with world(2) as swarm:
        await swarm.agree()
        node, work = swarm.proposer, Work()

        def broken():
            raise ZeroDivisionError("a bug")

        async with running(node.group.run(work.act)) as task:
            await work.until(1)
            node.say = broken
            await swarm.others(node)[0].die()
            swarm.introduce()
            async with asyncio.timeout(WAIT_S):
                with pytest.raises(ZeroDivisionError):
                    await task
        assert work.ended == work.begun
