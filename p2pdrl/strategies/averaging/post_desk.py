"""Where the learner's posts lie until their round has ended.

One post at a time is open (`ahead` is 0). A learner that was restarted posts anew, with smaller numbers;
what its predecessor posted is forgotten. When others wait for a learner that doesn't post (it is paused, or
starts again), its daemon is *excused* after a while: it goes on with rounds, giving nothing.
"""

from __future__ import annotations

import asyncio

from p2pdrl.clock import Clock
from p2pdrl.strategies.protocol import AnswerKind, Learner, Post

__all__ = ["PostDesk"]


class PostDesk:
    """The open post of one learner.

    Args:
        learner: who posts.
        clock: monotonic time.
        grace_s: how long others wait before we are excused.
    """

    def __init__(self, learner: Learner, clock: Clock, grace_s: float) -> None:
        self._learner, self._clock, self._grace_s = learner, clock, grace_s
        self.post: Post | None = None
        """The one that waits for its answer."""
        self.since_s = 0.0
        """When it came."""
        self.restarted = False
        """Whether the learner was started anew; whoever heeds it sets it back."""
        self._number = 0
        self._excused = False
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    async def pump(self) -> None:
        """Take posts as they come, for ever."""
        while True:
            post = await self._learner.next_post()
            self.restarted |= post.number <= self._number
            self._number = post.number
            self.post, self.since_s = post, self._clock.monotonic()
            self.excuse(False)
            self._news.set()

    async def next(self) -> Post | None:
        """Wait for the open post; None when we are excused instead."""
        while self.post is None and not self._excused:
            self._news.clear()
            await self._news.wait()
        return self.post

    def awaited(self) -> None:
        """Others wait for our learner's post."""
        if self.post is None and self._timer is None and not self._excused:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self.excuse, True)

    def excuse(self, excused: bool) -> None:
        """Say whether `next` shall wait no longer."""
        self._excused = excused
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._news.set()

    def answer(
        self, post: Post, kind: AnswerKind, learning_rate: float | None = None, *, end_update: bool = False
    ) -> None:
        """Let the learner go on, if ``post`` is still the open one; see `Learner.answer`."""
        if post is self.post:
            self.post = None
            self._learner.answer(post, kind, learning_rate, end_update=end_update)

    def close(self) -> None:
        """Stop the clock."""
        self.excuse(False)
