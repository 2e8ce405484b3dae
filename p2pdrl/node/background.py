"""Background work that lasts as long as a block of code, and whose error is never lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

__all__ = ["beside"]


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None], name: str) -> AsyncIterator[None]:
    """Do ``work`` while the block runs; it is cancelled at the block's end, where its error is raised.

    Args:
        work: ends by itself, or is cancelled.
        name: of its task.
    """
    task = asyncio.create_task(work, name=name)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.result()
