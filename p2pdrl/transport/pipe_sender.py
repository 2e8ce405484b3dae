"""The sending half of a pipe's end: a thread of its own, fed by callers who don't wait."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from queue import SimpleQueue

from p2pdrl.errors import PeerTimeoutError
from p2pdrl.transport.auth import SerialMac
from p2pdrl.transport.pieces import Buffer, Views, batches, body_nbytes, unsent, views_of
from p2pdrl.transport.pipe_frames import HEAD_BYTES, pack_head
from p2pdrl.transport.pipe_link import PipeLink

__all__ = ["PipeSender"]

_AT_ONCE_BYTES = 272 << 10
"""A message up to this length is given to the kernel by its caller, if it takes it without waiting: to wake
the thread would take about as long."""

_Frame = Iterator[list[Buffer]]


class PipeSender:
    """Sends messages in the order in which they are given.

    Args:
        link: the connection.
        mac: makes MACs; None without a swarm key.
        queued_bytes: how much may wait; see `PipeBounds`.

    Attributes:
        nbytes: bytes that the kernel took, heads and MACs included.
        sent_number: number of the last message that the kernel took whole.
    """

    def __init__(self, link: PipeLink, mac: SerialMac | None, queued_bytes: int) -> None:
        self.nbytes = 0
        self.sent_number = 0
        self._link = link
        self._mac = mac
        self._most_nbytes = queued_bytes
        self._lock = threading.Lock()
        self._room = threading.Condition(self._lock)
        self._queue: SimpleQueue[tuple[_Frame, int] | None] = SimpleQueue()
        self._queued_nbytes = 0
        self._number = 0

    def send(self, kind: int, meta: bytes, vector: Views, deadline_s: float) -> int:
        """Queue a message; see `PipeEnd.send`."""
        views = views_of(vector)
        vector_nbytes = sum(view.nbytes for view in views)
        nbytes = HEAD_BYTES + body_nbytes(len(meta), vector_nbytes, self._mac is not None)
        with self._lock:
            self._link.check()
            if self._queued_nbytes and self._queued_nbytes + nbytes > self._most_nbytes:
                self._wait(
                    lambda: not self._queued_nbytes or self._queued_nbytes + nbytes <= self._most_nbytes,
                    deadline_s,
                )
            head = pack_head(kind, self._number + 1, len(meta), vector_nbytes)
            self._number += 1
            frame: _Frame = batches(head + meta, views, self._mac)
            short = nbytes <= _AT_ONCE_BYTES and not self._queued_nbytes
            rest = self._at_once(frame) if short else frame
            if rest is None:
                self.sent_number = self._number
            else:
                self._queued_nbytes += nbytes
                self._queue.put((rest, nbytes))
            return self._number

    def flush(self, number: int | None, deadline_s: float) -> None:
        """Wait until the kernel has a message and all before it; see `PipeEnd.flush`."""
        with self._lock:
            wanted = self._number if number is None else number
            if self.sent_number < wanted:
                self._wait(lambda: self.sent_number >= wanted, deadline_s)

    def close(self) -> None:
        """Wait for callers, once the link has failed."""
        with self._lock:
            pass

    def run(self) -> None:
        """What the thread does."""
        try:
            while (item := self._queue.get()) is not None and self._link.fault is None:
                rest, nbytes = item
                for batch in rest:
                    while batch:
                        sent_nbytes = self._link.sock.sendmsg(batch)
                        self.nbytes += sent_nbytes
                        batch = unsent(batch, sent_nbytes)
                del item, rest, batch  # their memory may be needed
                with self._lock:
                    self._queued_nbytes -= nbytes
                    self.sent_number += 1
                    self._room.notify_all()
        except Exception as error:  # noqa: BLE001 - kept for the callers
            self._link.fail(error)
        while not self._queue.empty():
            self._queue.get()

    def wake(self) -> None:
        """The link failed."""
        with self._lock:
            self._room.notify_all()
        self._queue.put(None)

    def _wait(self, ready: Callable[[], bool], deadline_s: float) -> None:
        """Wait for ``ready``, with the lock held."""
        good = self._room.wait_for(lambda: self._link.fault is not None or ready(), deadline_s)
        self._link.check()
        if not good:
            raise PeerTimeoutError(
                f"the peer took too little of {self._queued_nbytes} waiting bytes in {deadline_s:g} s"
            )

    def _at_once(self, frame: _Frame) -> _Frame | None:
        """Give the kernel what it takes without waiting; return what is left."""
        for batch in frame:
            try:
                sent_nbytes = self._link.sock.sendmsg(batch, (), socket.MSG_DONTWAIT)
            except OSError:
                sent_nbytes = 0  # when there's more to it than a full buffer, the thread meets it too
            self.nbytes += sent_nbytes
            rest = unsent(batch, sent_nbytes)
            if rest:
                return chain([rest], frame)
        return None
