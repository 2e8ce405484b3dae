"""Looks in a thread for the daemon's next order, while the learner waits in a library that hears nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from p2pdrl.errors import WorkerError
from p2pdrl.workers.protocol import Stop, ToLearner, Work
from p2pdrl.workers.stage_protocol import Measure, Stage

__all__ = ["OrderWatch"]

EVERY_S = 0.05
CLOSE_S = 2.0
"""To end waits takes milliseconds, but it asks the same library that may hang."""
_ENDS = (Stage, Work, Stop)
"""What ends a stage."""


class OrderWatch:
    """Ends waits once the daemon has said something by which they end.

    Args:
        ahead: what the daemon has said and wasn't heard yet: `mailbox.Mailbox.ahead`.
        end: ends the waits; called again until `close`, for another wait may have begun meanwhile.
        every_s: seconds between two looks.

    Both are called in the thread, and not any more after `close`.

    Attributes:
        meeting: whether the wait is for others to come. The daemon asks what blocks cost only when it has
            given that up, and wants an answer.
    """

    def __init__(
        self,
        ahead: Callable[[], Sequence[ToLearner]],
        end: Callable[[], None],
        *,
        every_s: float = EVERY_S,
    ) -> None:
        self.meeting = True
        self._ahead, self._end, self._every_s = ahead, end, every_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._look, name="order-watch", daemon=True)
        self._thread.start()

    def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Look no more; calling it again does nothing.

        Args:
            timeout_s: the longest that is waited for ``end`` to return.

        Returns:
            Whether it has.
        """
        self._closed.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _look(self) -> None:
        while not self._closed.wait(self._every_s):
            if self.wanted:
                self._end()

    @property
    def wanted(self) -> bool:
        """Whether it has. From any thread."""
        try:
            ahead = self._ahead()
        except WorkerError:  # whoever listens will be told
            return True
        ends = (*_ENDS, Measure) if self.meeting else _ENDS
        return any(isinstance(message, ends) for message in ahead)
