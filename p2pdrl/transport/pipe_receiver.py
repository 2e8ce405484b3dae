"""The receiving half of a pipe's end.

Whoever asks for a message while none is there reads from the socket, since to wake another thread takes
longer than to read a short message. Once nobody has asked for a moment, a thread reads ahead:

    nobody's turn ── a caller comes ────────────► caller's turn ── it leaves ──► nobody's
                  ── nobody came for a moment ──► thread's turn ── a caller waits for the next message,
                                                                   or enough lies here ──► nobody's

The parser keeps what it has of a message when the turn passes on.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from queue import Empty, SimpleQueue
from typing import Literal

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError
from p2pdrl.transport.pipe_link import PipeLink
from p2pdrl.transport.pipe_parser import Message, PipeParser

__all__ = ["PipeReceiver"]

_AWAY_S = 0.001
"""How long callers may be away before the thread reads ahead. Longer delays what comes meanwhile; shorter
wakes the thread whenever a caller has something short to do."""

_MESSAGE_BYTES = 1024
"""What a message costs beside its vector, so that a flood of empty ones is bounded too."""

_WAIT_S = 1.0
"""How long to wait for bytes at a time, so that the kernel needn't be told another bound each time."""

_TIMEVAL = struct.Struct("ll")


def _cost_nbytes(message: Message) -> int:
    return _MESSAGE_BYTES + len(message.meta) + (message.vector.nbytes if message.vector is not None else 0)


class PipeReceiver:
    """Receives messages in the order in which they were sent.

    Args:
        link: the connection.
        parser: makes messages of what comes.
        prefetched_bytes: see `PipeBounds`.

    Attributes:
        nbytes: bytes that came from the socket, heads and MACs included.
    """

    def __init__(self, link: PipeLink, parser: PipeParser, prefetched_bytes: int) -> None:
        self.nbytes = 0
        self._link = link
        self._parser = parser
        self._most_nbytes = prefetched_bytes
        self._ahead: SimpleQueue[Message | None] = SimpleQueue()
        """Messages that the thread took; None for those who wait: the turn is free."""
        self._kept_nbytes = 0
        self._one_caller = threading.RLock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._turn: Literal["nobody", "caller", "thread"] = "nobody"
        self._left_s = time.monotonic()
        self._parked = False
        self._wished = False
        self._ended = False
        self._bound_s = 0.0
        self._wish, self._wishing = os.pipe()
        self._anything = select.poll()
        self._anything.register(link.sock, select.POLLIN)
        self._anything.register(self._wish, select.POLLIN)

    def receive(self, deadline_s: float) -> Message:
        """Return the next message; see `PipeEnd.receive`."""
        until_s = time.monotonic() + deadline_s
        if not self._one_caller.acquire(timeout=max(0.0, deadline_s)):
            raise PeerTimeoutError(f"no message came within {deadline_s:g} s, for which others wait too")
        try:
            message = self._receive(until_s)
        finally:
            self._one_caller.release()
        if message is None:
            raise PeerTimeoutError(f"no whole message came within {deadline_s:g} s")
        return message

    def close(self) -> None:
        """Free what belongs to it, once the link has failed and the thread has ended."""
        with self._one_caller, self._lock:
            if self._wish >= 0:
                os.close(self._wish)
                os.close(self._wishing)
                self._wish = self._wishing = -1

    def run(self) -> None:
        """What the thread does."""
        while self._await_turn():
            try:
                self._read_ahead()
            except Exception as error:  # noqa: BLE001 - kept for the callers
                self._end(error)
            with self._lock:
                self._turn, self._wished, self._left_s = "nobody", False, time.monotonic()
            self._ahead.put(None)

    def wake(self) -> None:
        """The link failed."""
        with self._lock:
            self._changed.notify_all()

    # The caller's side

    def _receive(self, until_s: float) -> Message | None:
        """Return the next message, or None when it is too late."""
        while not self._take_turn():
            try:
                message = self._ahead.get(timeout=max(0.0, until_s - time.monotonic()))
            except Empty:
                return None
            if message is not None:
                self._took(message)
                return message
        return self._read(until_s)

    def _take_turn(self) -> bool:
        """Take the turn if it is free and no message lies here; let the thread know that we wait."""
        with self._lock:
            if not self._ahead.empty():
                return False
            if self._turn == "nobody":
                self._turn = "caller"
                return True
            if not self._wished:
                self._wished = True
                os.write(self._wishing, b"!")
            return False

    def _took(self, message: Message) -> None:
        with self._lock:
            self._wished = False
            self._kept_nbytes -= _cost_nbytes(message)
            self._left_s = time.monotonic()
            if self._parked:
                self._changed.notify()

    def _read(self, until_s: float) -> Message | None:
        """Read the next message in the caller's thread; None when it is too late."""
        message = None
        try:
            while not self._ended and (message := self._parser.next()) is None:
                left_s = until_s - time.monotonic()
                if not self._came(left_s) and left_s <= 0:
                    return None
        except Exception as error:  # noqa: BLE001 - raised below
            self._end(error)
            message = None
        finally:
            with self._lock:
                self._turn, self._left_s = "nobody", time.monotonic()
                if self._parked:
                    self._changed.notify()
        if message is None:
            self._link.check()
        return message

    # The thread's side

    def _await_turn(self) -> bool:
        """Wait until nobody came for a moment; return False when the pipe ended."""
        with self._lock:
            while not self._ended and not self._link.closed:
                if self._turn == "caller" or self._kept_nbytes >= self._most_nbytes:
                    self._parked = True
                    self._changed.wait()
                    self._parked = False
                    continue
                left_s = self._left_s + _AWAY_S - time.monotonic()
                if left_s <= 0:
                    self._turn = "thread"
                    return True
                self._changed.wait(left_s)
        return False

    def _read_ahead(self) -> None:
        """Take messages until a caller wants to do that itself, or enough of them lie here."""
        while self._kept_nbytes < self._most_nbytes and not self._link.closed:
            message = self._parser.next()
            if message is not None:
                with self._lock:
                    self._kept_nbytes += _cost_nbytes(message)
                self._ahead.put(message)
            elif not self._parser.between or self._anything_came():
                self._came(_WAIT_S)
            else:
                return

    def _anything_came(self) -> bool:
        """Wait for the next message to begin; return False when a caller waits for it."""
        while not self._wished:
            found = {fd for fd, _ in self._anything.poll()}
            if self._wish not in found:
                return True
            os.read(self._wish, 4096)
        return False

    # Both

    def _came(self, left_s: float) -> bool:
        """Receive what the parser has room for.

        Args:
            left_s: seconds to wait; `_WAIT_S` are enough for one turn.

        Returns:
            Whether anything came in time.

        Raises:
            OSError: the connection broke.
            TransportError: the peer closed it, or what came isn't authentic.
        """
        sock, room = self._link.sock, self._parser.room()
        flags = socket.MSG_WAITALL if self._parser.greedy else 0
        if left_s > 0:
            self._bound(left_s)
        else:
            flags = socket.MSG_DONTWAIT
        try:
            got = (
                sock.recv_into(room[0], 0, flags) if len(room) == 1 else sock.recvmsg_into(room, 0, flags)[0]
            )
        except BlockingIOError:
            return False
        if not got:
            raise PeerUnreachableError("the peer closed the pipe")
        self.nbytes += got
        self._parser.came(got)
        return True

    def _bound(self, left_s: float) -> None:
        """Bound how long the kernel waits for bytes; cheaper than to ask it first whether there are any."""
        bound_s = _WAIT_S if left_s >= _WAIT_S else max(left_s, 0.001)
        if bound_s != self._bound_s:
            timeval = _TIMEVAL.pack(int(bound_s), int(bound_s % 1 * 1e6))
            self._link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
            self._bound_s = bound_s

    def _end(self, error: Exception) -> None:
        """Nothing more can be read."""
        self._link.fail(error)
        with self._lock:
            self._ended = True
            self._changed.notify_all()
