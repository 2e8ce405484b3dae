"""The learner's end of the socket pair: never blocks on a daemon that is slow or stopped."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
from collections import deque

from p2pdrl.errors import WorkerError
from p2pdrl.workers.protocol import (
    Alive,
    Attach,
    FrameBuffer,
    FromLearner,
    JoinHogwild,
    ToLearner,
    decode_to_learner,
    frame,
)

__all__ = ["Mailbox"]

READ_BYTES = 1 << 16
PEEK_BYTES = 1 << 20
"""More than a socket holds."""


class Mailbox:
    """Messages to and from the daemon; every call raises ``WorkerError`` once the daemon is gone.

    Args:
        sock: this process' end of the socket pair.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._frames = FrameBuffer()
        self._reading = threading.Lock()
        self._unsent = bytearray()
        self._sending = threading.RLock()
        self._fds: deque[int] = deque()
        self._early: list[ToLearner] = []

    def receive(self, timeout_s: float | None) -> list[ToLearner]:
        """Return what has arrived, waiting up to ``timeout_s`` (None: for ever) for something."""
        if self._early:
            early, self._early = self._early, []
            return early
        readable, _, _ = select.select([self._sock], [], [], timeout_s)
        if not readable:
            return []
        with self._reading:
            try:
                data, fds, _, _ = socket.recv_fds(self._sock, READ_BYTES, 4)
            except BlockingIOError:
                return []
            except OSError as error:
                raise WorkerError(f"the daemon's socket broke: {error}") from error
            if not data:
                raise WorkerError("the daemon is gone")
            self._fds += fds
            bodies = self._frames.feed(data)
        return [decode_to_learner(body) for body in bodies]

    def ahead(self) -> list[ToLearner]:
        """Return what has arrived without receiving it; callable from any thread."""
        with self._reading:
            try:
                data = self._sock.recv(PEEK_BYTES, socket.MSG_PEEK)
            except BlockingIOError:
                return []
            except OSError as error:
                raise WorkerError(f"the daemon's socket broke: {error}") from error
            bodies = self._frames.with_more(data)
        if not data:
            raise WorkerError("the daemon is gone")
        return [decode_to_learner(body) for body in bodies]

    def attach(self) -> tuple[Attach | JoinHogwild, int]:
        """Wait for the memory to work on; return its message and its file descriptor.

        Raises:
            WorkerError: if the daemon sends something else.
        """
        messages = self.receive(None)
        while not messages:
            messages = self.receive(None)
        first = messages[0]
        if not isinstance(first, Attach | JoinHogwild) or not self._fds:
            raise WorkerError("the daemon didn't send the board")
        self._early = messages[1:]
        return first, self._fds.popleft()

    def take_fd(self) -> int:
        """Return the descriptor that belongs to the message in hand; the caller owns it from now on.

        Raises:
            WorkerError: if none came with it.
        """
        if not self._fds:
            raise WorkerError("the daemon didn't send the memory that it spoke of")
        return self._fds.popleft()

    @property
    def backlog(self) -> bool:
        """Whether an earlier message still waits for room in the socket."""
        return bool(self._unsent)

    def send(self, message: FromLearner) -> None:
        """Queue a message and write what the socket takes without blocking."""
        with self._sending:
            self._unsent += frame(message)
            self.flush()

    def beat(self) -> None:
        """Send a heartbeat, unless something still waits for room; callable from any thread."""
        with self._sending:
            if not self._unsent:
                self._unsent += frame(Alive())
            self.flush()

    def flush(self) -> None:
        """Write what is queued, as far as the socket takes it."""
        with self._sending, contextlib.suppress(BlockingIOError):
            while self._unsent:
                try:
                    sent = self._sock.send(self._unsent)
                except (BrokenPipeError, ConnectionResetError) as error:
                    raise WorkerError("the daemon is gone") from error
                del self._unsent[:sent]

    def drain(self, timeout_s: float) -> None:
        """Write what is queued, waiting up to ``timeout_s`` for room."""
        while self._unsent:
            _, writable, _ = select.select([], [self._sock], [], timeout_s)
            if not writable:
                return
            self.flush()

    def close(self) -> None:
        """Close the socket and any descriptor that nobody took; calling it again does nothing."""
        while self._fds:
            os.close(self._fds.pop())
        self._sock.close()
