"""Work beside a block: ended with it, its errors never lost."""

from __future__ import annotations

import asyncio

import pytest

from p2pdrl.node.background import beside


async def test_it_ends_with_the_block():
    going = asyncio.Event()

    async def work() -> None:
        going.set()
        await asyncio.Event().wait()

    async with beside(work(), "work"):
        await going.wait()
    assert not [task for task in asyncio.all_tasks() if task.get_name() == "work"]


async def test_its_error_is_raised_at_the_end_of_the_block():
    async def work() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        async with beside(work(), "work"):
            await asyncio.sleep(0)


async def test_the_blocks_own_error_comes_through():
    with pytest.raises(KeyError):
        async with beside(asyncio.sleep(3600), "work"):
            raise KeyError
