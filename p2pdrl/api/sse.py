"""Events as a stream (server-sent events, WHATWG HTML §9.2) or as a JSON list.

A subscriber's queue serves as the alarm clock only: what is sent is always ``events.since(last
sent)``. So a reader that lags behind the queue loses nothing that the log still remembers.
"""

from __future__ import annotations

import asyncio

import msgspec
from aiohttp import web

from p2pdrl.api.answers import ApiRefusal, json_answer
from p2pdrl.api.protocol import Event, EventSource

__all__ = ["KEEP_ALIVE_S", "EventStreams"]

KEEP_ALIVE_S = 15.0
"""A comment is sent after this much silence, so that proxies and readers know the stream lives."""

_MAX_STREAMS = 64
_WRITE_DEADLINE_S = 10.0
_LONGEST_NUMBER = 18


class EventStreams:
    """Serves ``/v1/events`` and ends all open streams when the application shuts down.

    Args:
        events: the log.
        keep_alive_s: seconds of silence between comments.
        write_deadline_s: a reader that takes none of an event's bytes for this long is dropped.
    """

    def __init__(
        self,
        events: EventSource,
        *,
        keep_alive_s: float = KEEP_ALIVE_S,
        write_deadline_s: float = _WRITE_DEADLINE_S,
    ) -> None:
        self._events = events
        self._keep_alive_s = keep_alive_s
        self._write_deadline_s = write_deadline_s
        self._open: set[asyncio.Task[None]] = set()

    @property
    def open_streams(self) -> int:
        """How many readers follow."""
        return len(self._open)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request.

        Raises:
            ApiRefusal: a malformed number (400), or too many streams are open (503).
        """
        since = self._known(_read_number(request))
        follow = request.query.get("follow", "1")
        if follow not in {"0", "1"}:
            raise ApiRefusal(400, "follow must be 0 or 1")
        if follow == "0":
            return json_answer(self._events.since(since))
        if len(self._open) >= _MAX_STREAMS:
            raise ApiRefusal(503, f"{_MAX_STREAMS} event streams are open: close one", {"Retry-After": "15"})
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream; charset=utf-8",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        await response.prepare(request)
        task = asyncio.create_task(self._pump(response, since), name="api event stream")
        self._open.add(task)
        try:
            await asyncio.wait({task})
        finally:
            self._open.discard(task)
            task.cancel()
        if not task.cancelled():
            task.result()
        return response

    async def close(self, _app: web.Application | None = None) -> None:
        """End every open stream."""
        for task in self._open:
            task.cancel()
        await asyncio.gather(*self._open, return_exceptions=True)

    def _known(self, since: int) -> int:
        """Zero for a number from the node's previous life, which this log hasn't reached."""
        return since if since <= 0 or self._events.since(since - 1) else 0

    async def _pump(self, response: web.StreamResponse, since: int) -> None:
        try:
            await response.write(b": p2pdrl events\n\n")
            while True:
                news = await self._next(since)
                for event in news:
                    since = event["seq"]
                await self._write(response, b"".join(map(_frame, news)) or b": keep-alive\n\n")
        except (ConnectionError, TimeoutError):
            return

    async def _next(self, since: int) -> list[Event]:
        """What the log has after ``since``, waiting for it if need be; nothing after a silence.

        Each wait has a subscription of its own, made before the log is read: no event falls between.
        """
        async with self._events.subscribe() as queue:
            if news := self._events.since(since):
                return news
            try:
                async with asyncio.timeout(self._keep_alive_s):
                    await queue.get()
            except TimeoutError:
                pass
            return self._events.since(since)

    async def _write(self, response: web.StreamResponse, data: bytes) -> None:
        async with asyncio.timeout(self._write_deadline_s):
            await response.write(data)


def _frame(event: Event) -> bytes:
    return b"id: %d\ndata: %b\n\n" % (event["seq"], msgspec.json.encode(event))


def _read_number(request: web.Request) -> int:
    text = request.query.get("since") or request.headers.get("Last-Event-ID") or "0"
    if not (text.isascii() and text.isdigit() and len(text) <= _LONGEST_NUMBER):
        raise ApiRefusal(400, "since (or Last-Event-ID) must be the number of an event, 0 or more")
    return int(text)
