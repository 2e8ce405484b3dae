from __future__ import annotations

import asyncio

import pytest

from p2pdrl.strategies.pairwise.engagement import Engagement
from p2pdrl.strategies.runner import Runner

pytestmark = pytest.mark.looptime


async def rests(runner: Runner) -> None:
    while not runner.stopping:
        await runner.rest(1.0)


async def test_it_ends_what_it_began():
    runner, ended = Runner(), []
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


async def test_whatever_ends_while_it_is_stopped_it_goes_on(monkeypatch):
    """From Python 3.12 on, to gather tasks that are done lets nobody else run: their ends are never noted."""
    gather, calls = asyncio.gather, 0

    def at_once(*tasks: asyncio.Future, return_exceptions: bool = False) -> asyncio.Future:
        nonlocal calls
        calls += 1
        assert calls < 100, "it gathers without end"
        if not all(task.done() for task in tasks):
            return gather(*tasks, return_exceptions=return_exceptions)
        gathered = asyncio.get_running_loop().create_future()
        gathered.set_result([None] * len(tasks))
        return gathered

    async def ends_after(steps: int) -> None:
        for _ in range(steps):
            await asyncio.sleep(0)

    monkeypatch.setattr(asyncio, "gather", at_once)
    for steps in range(10):
        runner = Runner()
        runner.start(ends_after(0))
        runner.briefly(ends_after(steps))
        await asyncio.wait_for(runner.stop(1.0), 1.0)
        calls = 0


@pytest.mark.parametrize("where", ["main", "other", "brief"])
async def test_a_bug_is_told(where):
    runner = Runner()

    async def broken() -> None:
        await asyncio.sleep(0.1)
        raise ZeroDivisionError("a bug")

    runner.start(broken() if where == "main" else rests(runner), *([broken()] if where == "other" else []))
    if where == "brief":
        runner.briefly(broken())
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(runner.watch(), 5.0)
    await runner.stop(0.0)


async def test_who_is_engaged_is_waited_for_but_not_for_ever():
    one, loop = Engagement(), asyncio.get_running_loop()
    assert not one
    await one.until_free(5.0)
    one.begin()
    assert one
    began_s = loop.time()
    await one.until_free(2.0)
    assert loop.time() - began_s == pytest.approx(2.0)
    loop.call_later(1.0, one.end)
    await one.until_free(5.0)
    assert loop.time() - began_s == pytest.approx(3.0)
    assert not one
