from __future__ import annotations

import asyncio
import threading

import pytest

from p2pdrl.strategies.offload import Arithmetic
from p2pdrl.transport.protocol import Refusal


async def test_closing_waits_for_threads_and_refuses_what_comes_later():
    work, began, go_on, ended = Arithmetic(1 << 24), threading.Event(), threading.Event(), []

    def slow() -> None:
        began.set()
        go_on.wait(5)
        ended.append(True)

    task = asyncio.create_task(work.run(slow))
    await asyncio.to_thread(began.wait, 5)
    task.cancel()
    closing = asyncio.create_task(work.close())
    await asyncio.sleep(0.01)
    assert not closing.done()
    go_on.set()
    await asyncio.wait_for(closing, 5)
    assert ended == [True]
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(Refusal, match="503"):
        await work.run(lambda: None)


async def test_short_work_is_done_at_once():
    assert await Arithmetic(8).run(threading.current_thread) is threading.main_thread()
