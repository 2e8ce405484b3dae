"""What a rank has done lately, and when: a few thousand spans, of which the oldest go first."""

from __future__ import annotations

import threading
from collections import deque

from p2pdrl.pipeline.trace import MOST_SPANS, Span

__all__ = ["Recorder"]


class Recorder:
    """Keeps the last spans. One thread adds; any may read.

    Args:
        most: spans that it keeps.

    Attributes:
        activation_bytes: most that was kept for backwards at once, since it was set to 0.
    """

    def __init__(self, most: int = MOST_SPANS) -> None:
        self._spans: deque[Span] = deque(maxlen=most)
        self._lock = threading.Lock()
        self.activation_bytes = 0

    def add(self, span: Span) -> None:
        """Note what was done."""
        with self._lock:
            self._spans.append(span)

    def kept(self, nbytes: int) -> None:
        """Note how many bytes are kept now."""
        self.activation_bytes = max(self.activation_bytes, nbytes)

    def spans(self, since_s: float = float("-inf")) -> list[Span]:
        """Return the spans that ended after a time, in the order in which they ended."""
        with self._lock:
            return [span for span in self._spans if span.end_s > since_s]
