from __future__ import annotations

import asyncio
import functools
import threading

import pytest

from p2pdrl.testing.virtual_time import VirtualTimeLoop, run_in_virtual_time


def run(work):
    with asyncio.Runner(loop_factory=functools.partial(VirtualTimeLoop, waits=True)) as runner:
        return runner.run(work)


async def sleeps(*delays_s):
    for delay_s in delays_s:
        await asyncio.sleep(delay_s)
    return asyncio.get_running_loop().time()


@pytest.mark.parametrize("runs", [run_in_virtual_time, run])
def test_hours_pass_at_once_and_times_add_up_as_on_paper(runs):
    assert runs(sleeps(*[0.1] * 10, 3600.0)) == 3601.0


def test_timers_come_in_their_order():
    async def main():
        seen = []
        loop = asyncio.get_running_loop()
        for delay_s in (0.3, 0.1, 0.2, 1e-7):
            loop.call_later(delay_s, seen.append, delay_s)
        await asyncio.sleep(1.0)
        return seen

    assert run(main()) == run_in_virtual_time(main()) == [1e-7, 0.1, 0.2, 0.3]


@pytest.mark.parametrize("runs", [run_in_virtual_time, run])
def test_who_waits_until_less_than_a_nanosecond_from_now_gets_there(runs):
    async def main():
        loop = asyncio.get_running_loop()
        until_s, looks = loop.time() + 1.8e-15, 0
        while loop.time() < until_s and looks < 10:
            looks += 1
            await asyncio.sleep(until_s - loop.time())
        return looks

    assert runs(main()) == 1


def test_where_nobody_else_is_waited_for_a_wait_for_each_other_is_an_error():
    async def main():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(RuntimeError, match="no timer is set"):
        run_in_virtual_time(main())


def test_a_thread_wakes_whoever_waits_for_it():
    async def main():
        loop = asyncio.get_running_loop()
        woken = loop.create_future()
        thread = threading.Timer(0.01, loop.call_soon_threadsafe, (woken.set_result, "yes"))
        thread.start()
        told = await woken
        thread.join()
        return told, loop.time()

    assert run(main()) == ("yes", 0.0)


def test_no_time_passes_while_work_in_an_executor_ends_before_the_next_timer():
    async def main():
        async with asyncio.timeout(60.0):
            told = await asyncio.to_thread(lambda: "done")
        return told, asyncio.get_running_loop().time()

    assert run(main()) == ("done", 0.0)


def test_timers_run_out_while_an_executor_is_held_up():
    async def main():
        release = threading.Event()
        held = asyncio.get_running_loop().run_in_executor(None, release.wait)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await asyncio.shield(held)
        release.set()
        await held
        return asyncio.get_running_loop().time()

    assert run(main()) == 0.01
