"""Peers' requests that wait for the core's answers, which come as effects, at once or later."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from p2pdrl.membership.messages import Message
from p2pdrl.transport.protocol import Refusal

__all__ = ["PendingRequests"]


class PendingRequests:
    """Requests in hand, by token.

    Args:
        within_s: an answer that takes longer is a refusal.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._token = 0
        self._waiting: dict[int, asyncio.Future[Message]] = {}

    async def ask(self, feed: Callable[[int], None]) -> Message:
        """Put a request to the core and wait until it is answered.

        Args:
            feed: is given the request's token; `settle` may be called before it returns.

        Raises:
            Refusal: the core refuses, or no answer came in time (503).
        """
        self._token += 1
        token = self._token
        future: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[token] = future
        try:
            feed(token)
            async with asyncio.timeout(self._within_s):
                return await future
        except TimeoutError:
            raise Refusal(503, "no answer came together in time") from None
        finally:
            del self._waiting[token]

    def settle(self, token: int, result: Message | Refusal) -> None:
        """Give the answer to a request; one that nobody waits for any more is passed over."""
        future = self._waiting.get(token)
        if future is None or future.done():
            return
        if isinstance(result, Refusal):
            future.set_exception(result)
        else:
            future.set_result(result)

    def close(self) -> None:
        """Answer none of them any more."""
        for future in self._waiting.values():
            future.cancel()
