"""One end of a pipe in the process that uses it: messages both ways, by two threads and no event loop.

    end = PipeEnd(socket.socket(fileno=fd), keys, leftover, into=buffer_for)
    end.send(KIND, meta, vector, deadline_s=10)
    message = end.receive(deadline_s=10)
    end.close()

`HttpTransport.open_pipe` and `serve_pipes` make the connection; a `Pipe` is what is handed over.
"""

from __future__ import annotations

import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Literal, Self

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError
from p2pdrl.transport.cipher import Cipher
from p2pdrl.transport.framing import Buffer, Views, batches, body_nbytes, unsent, views_of
from p2pdrl.transport.limits import PipeBounds
from p2pdrl.transport.pipe.frames import HEAD_BYTES, PipeBuffer, PipeMessage, PipeParser, pack_head
from p2pdrl.transport.rate import Allowance, NodeRates, RateLimits, first_of
from p2pdrl.transport.stream.socket import notice_silence, set_options

__all__ = ["PipeBuffer", "PipeEnd", "PipeLink", "PipeMessage", "PipeReceiver", "PipeSender"]


class PipeLink:
    """A connected socket in blocking mode, and its first fault.

    Attributes:
        fault: why the pipe ended; None while it goes on.
        closed: whether it was our end that was closed.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.fault: Exception | None = None
        self.closed = False
        self._lock = threading.Lock()
        self._wakers: list[Callable[[], None]] = []

    def on_end(self, wake: Callable[[], None]) -> None:
        """Have ``wake`` called when the pipe ends, by whichever thread noticed."""
        self._wakers.append(wake)

    def fail(self, error: Exception) -> None:
        """End the pipe, unless it has ended: every call that blocks on the socket returns.

        What the peer sent before can still be received.
        """
        with self._lock:
            if self.fault is not None:
                return
            if isinstance(error, OSError):
                error = PeerUnreachableError(f"the pipe broke: {error}")
            self.fault = error
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster
        for wake in self._wakers:
            wake()

    def shut(self) -> None:
        """End the pipe because our end is closed."""
        self.closed = True
        self.fail(PeerUnreachableError("our end of the pipe was closed"))
        for wake in self._wakers:
            wake()

    def check(self) -> None:
        """Raise a copy of the fault, if there is one, for each caller its own.

        Raises:
            TransportError: the peer's or the network's fault, or our end was closed.
            RuntimeError: a bug of ours ended the pipe.
        """
        fault = self.fault
        if fault is None:
            return
        if isinstance(fault, TransportError):
            raise type(fault)(*fault.args) from fault
        raise RuntimeError("our end of the pipe failed") from fault


_AT_ONCE_BYTES = 272 << 10
"""A message up to this length is given to the kernel by its caller, if it takes it without waiting: to wake
the thread would take about as long."""

_Frame = Iterator[list[Buffer]]


class PipeSender:
    """Sends messages in the order in which they are given; ``queued_bytes`` of them may wait.

    Attributes:
        nbytes: bytes that the kernel took, heads and tags included.
        sent_number: number of the last message that the kernel took whole.
    """

    def __init__(
        self, link: PipeLink, cipher: Cipher, queued_bytes: int, allowance: Allowance | None = None
    ) -> None:
        self.nbytes = 0
        self.sent_number = 0
        self._allowance = allowance
        self._link = link
        self._cipher = cipher
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
        nbytes = HEAD_BYTES + body_nbytes(len(meta), vector_nbytes, self._cipher.nbytes)
        with self._lock:
            self._link.check()
            if self._queued_nbytes and self._queued_nbytes + nbytes > self._most_nbytes:
                self._wait(
                    lambda: not self._queued_nbytes or self._queued_nbytes + nbytes <= self._most_nbytes,
                    deadline_s,
                )
            head = pack_head(kind, self._number + 1, len(meta), vector_nbytes)
            self._number += 1
            frame: _Frame = batches(head, meta, views, self._cipher)
            short = nbytes <= _AT_ONCE_BYTES and not self._queued_nbytes and self._allowance is None
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
        """Send what is queued, in a thread, until the pipe ends."""
        try:
            while (item := self._queue.get()) is not None and self._link.fault is None:
                rest, nbytes = item
                for batch in rest:
                    while batch:
                        sent_nbytes = self._link.sock.sendmsg(self._allowed(batch))
                        if self._allowance is not None:
                            self._allowance.used(sent_nbytes)
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

    def _allowed(self, batch: list[Buffer]) -> list[Buffer]:
        """Return as much from the front of ``batch`` as the node's rate allows, when it allows some."""
        allowance = self._allowance
        if allowance is None:
            return batch
        wanted_nbytes = sum(map(len, batch))
        while not allowance.block(wanted_nbytes, _HELD_S):
            if self._link.fault is not None:
                return batch  # the kernel won't take it
        return first_of(batch, allowance.nbytes)

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


_HELD_S = 0.05
"""How long to sleep at a time, when the node's rate allows nothing, before looking whether the pipe ended."""

_AWAY_S = 0.001
"""How long callers may be away before the thread reads ahead. Longer delays what comes meanwhile; shorter
wakes the thread whenever a caller has something short to do."""

_MESSAGE_BYTES = 1024
"""What a message costs beside its vector, so that a flood of empty ones is bounded too."""

_WAIT_S = 1.0
"""How long to wait for bytes at a time, so that the kernel needn't be told another bound each time."""

_TIMEVAL = struct.Struct("ll")


def _cost_nbytes(message: PipeMessage) -> int:
    return _MESSAGE_BYTES + len(message.meta) + (message.vector.nbytes if message.vector is not None else 0)


class PipeReceiver:
    """Receives messages in the order in which they were sent, by the caller's thread or ahead by its own.

    Whoever has the turn reads from the socket: a caller that waits for a message, for to wake another thread
    takes longer than to read a short message; and the thread once no caller came for a moment, up to
    ``prefetched_bytes``. The parser keeps what it has of a message when the turn passes on.

        nobody's turn ── a caller comes ────────────► caller's turn ── it leaves ──► nobody's
                      ── nobody came for a moment ──► thread's turn ── a caller waits for the next message,
                                                                       or enough lies here ──► nobody's

    Attributes:
        nbytes: bytes that came from the socket, heads and tags included.
    """

    def __init__(
        self,
        link: PipeLink,
        parser: PipeParser,
        prefetched_bytes: int,
        allowance: Allowance | None = None,
    ) -> None:
        self.nbytes = 0
        self._allowance = allowance
        self._link = link
        self._parser = parser
        self._most_nbytes = prefetched_bytes
        self._ahead: SimpleQueue[PipeMessage | None] = SimpleQueue()
        """Messages that the thread took; None for those who wait: the turn is free."""
        self._kept_nbytes = 0
        self._one_caller = threading.RLock()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._turn: Literal["nobody", "caller", "thread"] = "nobody"
        self._left_s = time.monotonic()
        self._parked = False
        self._wanted = False
        self._ended = False
        self._bound_s = 0.0
        self._woken, self._waker = os.pipe()
        self._anything = select.poll()
        self._anything.register(link.sock, select.POLLIN)
        self._anything.register(self._woken, select.POLLIN)

    def receive(self, deadline_s: float) -> PipeMessage:
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
            if self._woken >= 0:
                os.close(self._woken)
                os.close(self._waker)
                self._woken = self._waker = -1

    def run(self) -> None:
        """Read ahead, in a thread, until the pipe ends."""
        while self._await_turn():
            try:
                self._read_ahead()
            except Exception as error:  # noqa: BLE001 - kept for the callers
                self._end(error)
            with self._lock:
                self._turn, self._wanted, self._left_s = "nobody", False, time.monotonic()
            self._ahead.put(None)

    def wake(self) -> None:
        """The link failed."""
        with self._lock:
            self._changed.notify_all()

    # The caller's side

    def _receive(self, until_s: float) -> PipeMessage | None:
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
            if not self._wanted:
                self._wanted = True
                os.write(self._waker, b"!")
            return False

    def _took(self, message: PipeMessage) -> None:
        with self._lock:
            self._wanted = False
            self._kept_nbytes -= _cost_nbytes(message)
            self._left_s = time.monotonic()
            if self._parked:
                self._changed.notify()

    def _read(self, until_s: float) -> PipeMessage | None:
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
        while not self._wanted:
            found = {fd for fd, _ in self._anything.poll()}
            if self._woken not in found:
                return True
            os.read(self._woken, 4096)
        return False

    # Both

    def _came(self, left_s: float) -> bool:
        """Receive what the parser has room for.

        Args:
            left_s: seconds to wait; `_WAIT_S` are enough for one turn.

        Returns:
            Whether anything came in time, and the node's rate let it come.

        Raises:
            OSError: the connection broke.
            TransportError: the peer closed it, or what came isn't authentic.
        """
        sock, room, allowance = self._link.sock, self._parser.room(), self._allowance
        if allowance is not None:
            if not allowance.block(sum(map(len, room)), min(left_s, _HELD_S)):
                return False
            room = first_of(room, allowance.nbytes)
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
        if allowance is not None:
            allowance.used(got)
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


class PipeEnd:
    """Sends and receives messages; every method may be called from any thread.

    Whatever breaks the pipe ends all calls that wait, at once, and all later ones. Only messages that came
    whole before that can still be received.

    Args:
        sock: connected; owned from now on.
        keys: of what we send and of what we receive; None without a swarm key.
        leftover: bytes of the pipe that were read from the socket already.
        hides: encrypt, or with keys prove alone.
        into: asked, in the thread that receives, where a vector goes: what it returns is filled and comes
            back in the message, authentic only then. None refuses the message, which ends the pipe.
        bounds: of queues, vectors and silence.
        rates: what the pipe keeps to, in both ways, together with all else that the node moves.

    Raises:
        OSError: the file of ``rates`` can't be opened.
    """

    def __init__(
        self,
        sock: socket.socket,
        keys: tuple[bytes, bytes] | None,
        leftover: bytes = b"",
        *,
        hides: bool = True,
        into: PipeBuffer,
        bounds: PipeBounds | None = None,
        rates: RateLimits | None = None,
    ) -> None:
        bounds = bounds if bounds is not None else PipeBounds()
        set_options(sock)
        notice_silence(sock, bounds.silence_s)
        sock.settimeout(None)
        ours, theirs = (Cipher(key, hides=hides) for key in keys or (None, None))
        self._rates = NodeRates(rates) if rates is not None else None
        up, down = _allowances(self._rates)
        if self._rates is not None:
            self._rates.bound_buffer(sock)
        self._link = PipeLink(sock)
        self._sender = PipeSender(self._link, ours, bounds.queued_bytes, up)
        parser = PipeParser(theirs, leftover, into, bounds.vector_bytes)
        self._receiver = PipeReceiver(self._link, parser, bounds.prefetched_bytes, down)
        for half in (self._sender, self._receiver):
            self._link.on_end(half.wake)
        self._threads = [
            threading.Thread(target=half.run, name=name, daemon=True)
            for half, name in ((self._sender, "pipe-sender"), (self._receiver, "pipe-receiver"))
        ]
        for thread in self._threads:
            thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def open(self) -> bool:
        """Whether the pipe goes on, as far as is known."""
        return self._link.fault is None

    @property
    def bytes_in(self) -> int:
        """Bytes that came so far, with heads and tags."""
        return self._receiver.nbytes

    @property
    def bytes_out(self) -> int:
        """Bytes that the kernel took so far, with heads and tags."""
        return self._sender.nbytes

    def send(
        self,
        kind: int,
        meta: bytes = b"",
        vector: Sequence[memoryview] | memoryview | None = None,
        *,
        deadline_s: float,
    ) -> int:
        """Queue a message, and return its number: 1 for the first.

        Waits only while more is queued than `PipeBounds.queued_bytes` allows.

        Args:
            kind: what it means, 0-65535.
            meta: at most 64 KiB.
            vector: one view, or several that are sent one after another as one vector. They must stay
                unchanged until `flush` returned for this number.
            deadline_s: seconds to wait for room.

        Raises:
            PeerTimeoutError: there was no room in time; nothing was queued.
            PeerUnreachableError: the pipe broke, or was closed.
            WireError: what came broke the protocol, which ended the pipe.
            ValueError: something is longer than a message can be.
        """
        return self._sender.send(kind, meta, vector, deadline_s)

    def flush(self, number: int | None = None, *, deadline_s: float) -> None:
        """Wait until the kernel has taken a message and all before it.

        Args:
            number: of the message; None for the last one.
            deadline_s: seconds to wait.

        Raises:
            TransportError: as for `send`.
        """
        self._sender.flush(number, deadline_s)

    def receive(self, *, deadline_s: float) -> PipeMessage:
        """Return the next message, waiting for it.

        Raises:
            PeerTimeoutError: no whole message came in time; it may come yet.
            PeerUnreachableError: the pipe broke, or was closed.
            WireError: what came breaks the protocol, which ended the pipe.
        """
        return self._receiver.receive(deadline_s)

    def close(self) -> None:
        """End the pipe at once, whatever is queued; calling it again does nothing.

        Waits for both threads, so that no buffer is written to any more. Called by one of them, from
        ``into``, it ends the pipe only; a later call from elsewhere frees the rest.
        """
        self._link.shut()
        if threading.current_thread() in self._threads:
            return
        for thread in self._threads:
            thread.join()
        self._receiver.close()
        self._sender.close()
        self._link.sock.close()
        if self._rates is not None:
            self._rates.close()


def _allowances(rates: NodeRates | None) -> tuple[Allowance | None, Allowance | None]:
    """What one pipe may send and receive; None without a bound."""
    both = (rates.upload, rates.download) if rates is not None else (None, None)
    up, down = (Allowance(rate) if rate is not None else None for rate in both)
    return up, down
