"""The learner's requests from arrival to answer; none is lost when whoever waits for one is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import deque

from p2pdrl.clock import Clock
from p2pdrl.strategies.protocol import AnswerKind, LearnerHandle, LearnerRequest

__all__ = ["RequestQueue"]


class RequestQueue:
    """The requests that wait for an answer: the newest ``most_open``; a learner has no more at a time.

    Those before belong to a learner that died since. `follow` must run in a task of its own.

    Args:
        grace_s: how long others wait, see `expected`.
        most_open: how many the learner makes before it waits for the first one's answer.

    Attributes:
        since_s: when the newest request came.
        restarted: whether the learner was started anew; whoever heeds it sets it back.
    """

    def __init__(
        self, learner: LearnerHandle, clock: Clock, *, grace_s: float = math.inf, most_open: int = 1
    ) -> None:
        self._learner, self._clock, self._grace_s = learner, clock, grace_s
        self._waiting: deque[LearnerRequest] = deque(maxlen=most_open)
        self.since_s = 0.0
        self.restarted = False
        self._number = 0
        self._excused = self._closed = False
        self._timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    @property
    def open(self) -> LearnerRequest | None:
        """The oldest request that is neither answered nor taken."""
        return self._waiting[0] if self._waiting else None

    async def follow(self) -> None:
        """Receive requests as they come, for ever."""
        while True:
            request = await self._learner.next_request()
            self.restarted |= request.number <= self._number
            self._number = request.number
            self._waiting.append(request)
            self.since_s = self._clock.monotonic()
            self.excuse(False)

    async def next(self, timeout_s: float | None = None) -> LearnerRequest | None:
        """Wait for the open request, and leave it open; None when none came in time, excused or closed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while not (self._waiting or self._excused or self._closed):
                    self._news.clear()
                    await self._news.wait()
        return None if self._closed else self.open

    async def take(self, timeout_s: float | None = None) -> LearnerRequest | None:
        """Like `next`, but the request is the caller's to answer from here on."""
        request = await self.next(timeout_s)
        if request is not None:
            self._waiting.popleft()
        return request

    def answer(
        self,
        request: LearnerRequest,
        kind: AnswerKind,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Let the learner go on, if ``request`` is still the open one; see `LearnerHandle.answer`."""
        if request is self.open:
            self._waiting.popleft()
            self._learner.answer(request, kind, learning_rate, end_update=end_update)

    def expected(self) -> None:
        """Others wait for our learner: after ``grace_s`` without a request `next` returns without one."""
        if not self._waiting and self._timer is None and not self._excused:
            self._timer = asyncio.get_running_loop().call_later(self._grace_s, self.excuse, True)

    def excuse(self, excused: bool) -> None:
        """Say whether `next` returns without a request, until the next one comes."""
        self._excused = excused
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._news.set()

    def close(self) -> None:
        """From now on `next` returns None at once; what is open is left to the learner."""
        self._closed = True
        self.excuse(False)
