"""One exchange at a time: who is engaged refuses others, and whoever ends waits until it is free."""

from __future__ import annotations

import asyncio

__all__ = ["Engagement"]


class Engagement:
    """True while an exchange has the node's buffers."""

    def __init__(self) -> None:
        self._free = asyncio.Event()
        self._free.set()

    def __bool__(self) -> bool:
        return not self._free.is_set()

    def begin(self) -> None:
        """An exchange takes the buffers; only when it is false."""
        self._free.clear()

    def end(self) -> None:
        """The exchange gives them back."""
        self._free.set()

    async def until_free(self, timeout_s: float) -> None:
        """Wait for the end of the exchange, at most so long."""
        if self and timeout_s > 0:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._free.wait()
            except TimeoutError:
                return
