"""What a learner posts to its strategy under one regime, and its waits for the answers.

While it waits it reads and obeys everything that the daemon says. A new regime, or the order to stop, ends
the wait at once; what was posted is given up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from p2pdrl.config.regime import Regime
from p2pdrl.workers.protocol import Answer, Posted, PostKind, Work
from p2pdrl.workers.replica import Replica

__all__ = ["Posts"]

POLL_S = 0.05
FLUSH_POLL_S = 0.002
FLUSH_LIMIT_S = 5.0
BACKSTOP_S = 60.0
"""The longest wait for an answer, not counting pauses. Strategies have deadlines of their own, far below; a
learner that comes here goes on alone until what it posted is answered, and says so with its next post."""


class Posts:
    """The posts of one regime.

    Args:
        work: the regime and its epoch.
        first: number of the first post.
        say: sends a message to the daemon.
        listen: reads messages, up to so many seconds long, obeys them, and reports when that is due.
        paused: whether the learner is held.
        clock: seconds, monotonic.
    """

    def __init__(
        self,
        work: Work,
        *,
        first: int,
        say: Callable[[Posted], None],
        listen: Callable[[float], None],
        paused: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._work = work
        self._say = say
        self._listen = listen
        self._paused = paused
        self._clock = clock
        self._open: dict[int, int] = {}
        self._answers: dict[int, tuple[Answer, int]] = {}
        self._free = set(range(work.regime.slots))
        self._alone = False
        self.next_number = first
        self.over = False
        """Whether another regime is in force, or none any more."""
        self.heir: Regime | None = None
        """The regime that follows; None when the learner is to stop."""

    @property
    def crowded(self) -> bool:
        """Whether more posts are unanswered than may be while the learner goes on."""
        return len(self._open) > self._work.regime.ahead

    def end(self, heir: Regime | None) -> None:
        """Give up everything: ``heir`` is in force from now on."""
        self.over, self.heir = True, heir

    def slot(self) -> int:
        """A slot that the learner may write; -1 when the regime has none, or the daemon holds all."""
        return min(self._free, default=-1)

    def post(self, kind: PostKind, slot: int, policy_version: int, samples: int, *, left: int = 0) -> int:
        """Hand ``slot`` over to the daemon (-1: none); return the post's number. `Posted` has the rest."""
        number = self.next_number
        self.next_number += 1
        self._open[number] = slot
        self._free.discard(slot)
        epoch, alone = self._work.epoch, self._alone
        self._say(Posted(number, epoch, kind, slot, policy_version, samples, alone=alone, left=left))
        self._alone = False
        return number

    def hear(self, answer: Answer) -> None:
        """Note an answer; one to something else is passed over."""
        if not self.over and answer.epoch == self._work.epoch and answer.number in self._open:
            self._answers[answer.number] = (answer, self._open.pop(answer.number))

    def collect(self, use: Callable[[Answer, int], None]) -> None:
        """Let ``use`` have each answer that came, and its slot, in order; then the slots are free again."""
        while self._answers:
            answer, slot = self._answers.pop(next(iter(self._answers)))
            use(answer, slot)
            if slot >= 0:
                self._free.add(slot)

    def hold(self) -> bool:
        """Stand still while the learner is held; False once the regime is over."""
        return self._wait_until(lambda: not self._paused(), BACKSTOP_S, POLL_S)

    def wait(self) -> bool:
        """Wait until no more posts are unanswered than the regime lets be.

        Returns:
            False when that didn't happen: the regime is over, or answers took longer than `BACKSTOP_S`.
        """
        if not self.crowded:
            self._listen(0.0)
        in_time = self._wait_until(lambda: not self.crowded, BACKSTOP_S, POLL_S)
        if not in_time and not self.over:
            self._alone = self._work.regime.ahead == 0
            print(f"learner: no answer for {BACKSTOP_S:g} s; it goes on alone meanwhile", file=sys.stderr)
        return in_time

    def take_set(self, replica: Replica, content: int) -> None:
        """Take from the board what an answer spoke of, and publish.

        Where the board's slot was in use as the strategy posted it, it lies there a little later: after
        our publication and our next report.
        """

        def caught_up() -> bool:
            replica.take()
            replica.publish()
            return replica.taken_id >= content

        self._wait_until(caught_up, FLUSH_LIMIT_S, FLUSH_POLL_S)

    def _wait_until(self, done: Callable[[], bool], limit_s: float, poll_s: float) -> bool:
        while not done():
            if self.over or limit_s <= 0:
                return False
            began_s = self._clock()
            self._listen(min(poll_s, limit_s))
            if not self._paused():
                limit_s -= self._clock() - began_s
        return not self.over
