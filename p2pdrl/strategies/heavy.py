"""Arithmetic that would hold the event loop up goes to a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

__all__ = ["INLINE_BYTES", "heavy", "through"]

INLINE_BYTES = 1 << 20
"""Work on less than this costs less than handing it over."""

T = TypeVar("T")


async def heavy(nbytes: int, work: Callable[[], T]) -> T:
    """Run ``work`` and return its result; in a thread when it is about more than `INLINE_BYTES`.

    Cancelling waits for the thread first: until it ends, its buffers aren't for others.

    Args:
        nbytes: of the vectors that it reads and writes.
        work: touches nothing that the event loop changes meanwhile.
    """
    if nbytes <= INLINE_BYTES:
        return work()
    thread = asyncio.create_task(asyncio.to_thread(work), name="arithmetic")
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        await asyncio.gather(thread, return_exceptions=True)
        raise


async def through(work: Coroutine[Any, Any, T]) -> T:
    """Do ``work`` to its end even when we are cancelled meanwhile."""
    task = asyncio.create_task(work, name="to its end")
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
