"""The learner's next post, of which none is lost when whoever waits for it is cancelled with its view."""

from __future__ import annotations

import asyncio

from p2pdrl.strategies.protocol import Learner, Post

__all__ = ["Posts"]


class Posts:
    """Waits for posts, from view to view.

    Args:
        learner: the node's.
        stopped: set when the strategy is to end; then nobody waits any longer.
    """

    def __init__(self, learner: Learner, stopped: asyncio.Event) -> None:
        self._learner = learner
        self._stopped = stopped
        self._next: asyncio.Task[Post] | None = None
        self._end: asyncio.Task[bool] | None = None

    async def next(self, timeout_s: float | None = None) -> Post | None:
        """Return the next post; None when none came in time, or we are stopped."""
        task = self._next
        if task is None:
            task = self._next = asyncio.create_task(self._learner.next_post(), name="post")
        if self._end is None:
            self._end = asyncio.create_task(self._stopped.wait(), name="stop")
        await asyncio.wait([task, self._end], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        # From here on nothing waits, so nobody can be cancelled with a post in his hands.
        if self._stopped.is_set() or self._next is not task or not task.done():
            return None
        self._next = None
        return task.result()

    async def close(self) -> None:
        """Wait for no more posts; what came and wasn't taken is left to the learner."""
        tasks = [task for task in (self._next, self._end) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._next = self._end = None
