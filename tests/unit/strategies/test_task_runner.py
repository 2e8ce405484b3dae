from __future__ import annotations

import asyncio

import pytest

from p2pdrl.strategies.task_runner import TaskRunner

pytestmark = pytest.mark.looptime


async def rests(runner: TaskRunner) -> None:
    while not runner.stopping:
        await runner.rest(1.0)


async def test_it_ends_what_it_began():
    runner, ended = TaskRunner(), []
    runner.start(rests(runner), asyncio.Event().wait())

    async def brief() -> None:
        await asyncio.sleep(3)
        ended.append("brief")

    runner.briefly(brief())
    watch = asyncio.create_task(runner.watch())
    await asyncio.sleep(0.5)
    assert not watch.done()
    await runner.stop(5.0)
    assert ended == ["brief"]
    await asyncio.wait_for(watch, 1.0)
    assert len(asyncio.all_tasks()) == 1


@pytest.mark.parametrize("steps", range(10))
async def test_whatever_ends_while_it_is_stopped_it_goes_on(steps):
    async def ends_after() -> None:
        for _ in range(steps):
            await asyncio.sleep(0)

    runner = TaskRunner()
    runner.start(asyncio.sleep(0))
    task = runner.briefly(ends_after())
    await asyncio.wait_for(runner.stop(1.0), 1.0)
    assert task.done()


@pytest.mark.parametrize("where", ["main", "other", "brief"])
async def test_a_bug_is_told(where):
    runner = TaskRunner()

    async def broken() -> None:
        await asyncio.sleep(0.1)
        raise ZeroDivisionError("a bug")

    runner.start(broken() if where == "main" else rests(runner), *([broken()] if where == "other" else []))
    if where == "brief":
        runner.briefly(broken())
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(runner.watch(), 5.0)
    await runner.stop(0.0)
