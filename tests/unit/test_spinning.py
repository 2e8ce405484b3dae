from __future__ import annotations

import asyncio
import time

import pytest

from ..spinning import SpinGuard


class Still(asyncio.SelectorEventLoop):
    """Virtual time that never goes on."""

    def time(self) -> float:
        return 7.0


async def at_once() -> None:
    """As an event's `wait` when it is set."""


async def spins() -> None:
    while True:
        await at_once()


async def keeps_all_to_itself() -> None:
    while True:
        try:
            await spins()
        except Exception:  # noqa: BLE001 - as one who serves others may do
            continue


@pytest.mark.parametrize("work", [spins, keeps_all_to_itself])
def test_a_task_that_lets_nobody_run_is_found_though_nobody_waits_for_it(work):
    spinning = []

    async def main() -> None:
        spinning.append(asyncio.create_task(work()))
        await asyncio.sleep(30.0)
        assert not spinning

    with SpinGuard(0.1, 10_000), pytest.raises(pytest.fail.Exception, match="held the event loop up"):
        asyncio.run(main())
    if spinning[0].done() and not spinning[0].cancelled():
        assert spinning[0].exception()  # else it is told into the log of whichever test runs later


def test_tasks_that_keep_time_from_going_on_are_found():
    async def main() -> None:
        while True:  # noqa: ASYNC110 - so it is
            await asyncio.sleep(0)

    with (
        SpinGuard(30.0, 10_000),
        pytest.raises(pytest.fail.Exception, match="it is 7 s still"),
        asyncio.Runner(loop_factory=Still) as runner,
    ):
        runner.run(main())


def test_who_lets_others_run_may_take_long_and_so_may_a_thread():
    def work() -> None:
        until_s = time.thread_time() + 0.5
        while time.thread_time() < until_s:
            pass

    async def main() -> None:
        await asyncio.to_thread(work)
        until_s = time.thread_time() + 0.5
        while time.thread_time() < until_s:  # noqa: ASYNC110 - so it is
            await asyncio.sleep(0)

    with SpinGuard(0.1, 10_000):
        asyncio.run(main())
