"""Vectors that arrive are read into a few buffers; who comes while all are in use is refused."""

from __future__ import annotations

import asyncio

from p2pdrl.strategies.door import BUSY
from p2pdrl.strategies.push.buffers import BufferPool
from p2pdrl.transport.protocol import Incoming, Refusal

__all__ = ["Arrivals"]


class Arrivals:
    """Reads what peers send.

    Args:
        nbytes: the longest message.
        most: how many may arrive at once.
    """

    def __init__(self, nbytes: int, most: int) -> None:
        self._pool = BufferPool(nbytes, most)

    async def read(self, incoming: Incoming, deadline_s: float) -> memoryview:
        """Return a buffer that begins with the whole vector; `give` it back when it is used.

        Args:
            incoming: whose vector isn't longer than the buffers.
            deadline_s: the longest that it may take.

        Raises:
            Refusal: other vectors are arriving (423); this one is late (408).
        """
        buffer = self._pool.take()
        if buffer is None:
            raise Refusal(BUSY, "other vectors are arriving")
        try:
            async with asyncio.timeout(deadline_s):
                await incoming.read_vector_into(buffer[: incoming.vector_nbytes])
        except TimeoutError as error:
            self.give(buffer)
            raise Refusal(408, "the vector didn't arrive in time") from error
        except BaseException:
            self.give(buffer)
            raise
        return buffer

    def give(self, buffer: memoryview) -> None:
        """Give a buffer back."""
        self._pool.give(buffer)
