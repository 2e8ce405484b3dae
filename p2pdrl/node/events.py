"""What happened on this node, as a bounded log that people and programs can follow.

Every part of the daemon emits here: members come and go, learners die, checkpoints fail. The API
serves it (``/v1/events``); each event is also logged. Belongs to the daemon's loop: not thread-safe.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from p2pdrl.api.protocol import Event
from p2pdrl.clock import Clock
from p2pdrl.telemetry.logging import Level, get_logger

__all__ = ["EventLog"]

REPEAT_S = 30.0
"""At least between two reminders of the same."""
LOST = "events-lost"
"""Kind of the last event in the queue of a reader that was dropped; it never is in the log."""
_RESERVED = frozenset({"seq", "time", "kind", "text", "level", "event"})


class EventLog:
    """The newest ``capacity`` events, numbered; a subscriber may lag ``queue_size`` behind."""

    def __init__(self, capacity: int, clock: Clock, *, queue_size: int = 256) -> None:
        self._clock = clock
        self._queue_size = queue_size
        self._events: deque[Event] = deque(maxlen=capacity)
        self._seq = 0
        self._queues: set[asyncio.Queue[Event]] = set()
        self._reminded_s: dict[tuple[str, str], float] = {}
        self._logger = get_logger("p2pdrl.events")

    def emit(self, kind: str, text: str, *, level: Level = "info", **fields: object) -> Event:
        """Add an event, tell subscribers, and log it.

        Args:
            kind: a few lower-case words joined by ``-``.
            text: what happened, for people.

        Raises:
            ValueError: if a field is named as one of the event's own.
        """
        if taken := _RESERVED & fields.keys():
            raise ValueError(f"an event's {sorted(taken)} are its own")
        self._seq += 1
        event: Event = {
            "seq": self._seq,
            "time": self._clock.wall(),
            "kind": kind,
            "text": text,
            "level": level,
            **fields,
        }
        self._events.append(event)
        for queue in list(self._queues):
            self._tell(queue, event)
        getattr(self._logger, level)(text, kind=kind, **fields)
        return event

    def remind(self, kind: str, text: str) -> None:
        """Emit a warning of what lasts, however often it is noticed: each text every `REPEAT_S` at most."""
        now_s = self._clock.monotonic()
        recent = {what: at_s for what, at_s in self._reminded_s.items() if now_s - at_s <= REPEAT_S}
        if (kind, text) not in recent:
            recent[kind, text] = now_s
            self.emit(kind, text, level="warning")
        self._reminded_s = recent

    def since(self, seq: int) -> list[Event]:
        """Events numbered above ``seq`` that are still remembered, oldest first."""
        return [event for event in self._events if event["seq"] > seq]

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[asyncio.Queue[Event]]:
        """A bounded queue that gets each new event.

        A reader that lets it run full is dropped: the last event in its queue is then of the kind
        ``events-lost``, and no more come. It may ask `since` again and subscribe anew.
        """
        queue: asyncio.Queue[Event] = asyncio.Queue(self._queue_size)
        self._queues.add(queue)
        try:
            yield queue
        finally:
            self._queues.discard(queue)

    def _tell(self, queue: asyncio.Queue[Event], event: Event) -> None:
        if not queue.full():
            queue.put_nowait(event)
            return
        self._queues.discard(queue)
        lost = queue.get_nowait()
        while not queue.empty():
            lost = queue.get_nowait()
        queue.put_nowait(
            {
                "seq": self._seq,
                "time": self._clock.wall(),
                "kind": LOST,
                "text": "this reader was too slow and was dropped; ask again from the last event it has",
                "level": "warning",
                "last_lost": lost["seq"],
            }
        )
