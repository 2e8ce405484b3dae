"""What stages say to each other, over the pipes that the daemon opened: a `rl.pipeline.links.Carrier`.

    rank before ══ "previous" pipe ══ this rank ══ "next" pipe ══ rank behind
                    down ─►                         down ─►
                    ◄─ up                           ◄─ up

One pipe between two neighbours carries both ways. In a circle of ranks the first one's previous is the last;
where two ranks make a circle there are two pipes between them.

A wait for a neighbour is made of short ones. Between them the learner hears its daemon, and whatever it hears
may end the wait. What moves over the pipes meanwhile makes it longer, so that long messages get through slow
networks, and no longer than a very slow one would take.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import PeerTimeoutError, PeerUnreachableError, TransportError, WireError
from p2pdrl.pipeline.plan import StageSide
from p2pdrl.transport.limits import PipeBounds
from p2pdrl.transport.pipe.end import PipeEnd, PipeMessage
from p2pdrl.transport.pipe.ticket import PipeTicket

if TYPE_CHECKING:
    from p2pdrl.rl.pipeline.links import Way

__all__ = ["PipeCarrier"]

SLICE_S = 0.05
_SLOWEST_BYTES_S = 256 * 1024
"""Bytes that move more slowly than this, in both ways together, are no reason to wait any longer."""
_KEPT_BUFFERS = 32
_UNBOUNDED_BYTES = 1 << 62
"""What waits to be sent is kept in memory by the schedule anyway, which says how much there can be."""

Memory = npt.NDArray[np.uint8]
Allocate = Callable[[int], Memory]

_KINDS: dict[Way, int] = {"down": 1, "up": 2}
_TO: dict[Way, StageSide] = {"down": "next", "up": "previous"}
_FROM: dict[Way, StageSide] = {"down": "previous", "up": "next"}


class PipeCarrier:
    """Implements ``Carrier`` on at most two pipes. One thread uses it; any may close it.

    Args:
        pipes: descriptors, which are owned from now on, and what goes with them.
        longest_nbytes: of the tensors of one message.
        kept_nbytes: of memory that each pipe keeps for further messages. A few times the longest activation
            is enough for what comes at each minibatch; slices of the model, much longer, come seldom.
        listen: hears the daemon, without waiting; called at least every 50 ms while a neighbour is waited
            for, and about as often while messages come all the time.
        interrupted: whether the pipeline is to end because the daemon said so; asked after each ``listen``.
        allocate: gives memory for what comes, such as pinned one for a GPU; used again and again.

    Attributes:
        side: of the neighbour that caused the last error; None where none did.

    Raises:
        OSError: a descriptor isn't a socket's.
    """

    def __init__(
        self,
        pipes: Mapping[StageSide, tuple[int, PipeTicket]],
        longest_nbytes: int,
        *,
        kept_nbytes: int = _UNBOUNDED_BYTES,
        listen: Callable[[], None] = lambda: None,
        interrupted: Callable[[], bool] = lambda: False,
        allocate: Allocate = lambda nbytes: np.empty(nbytes, np.uint8),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.side: StageSide | None = None
        self._listen = listen
        self._interrupted = interrupted
        self._clock = clock
        self._listened_s = -math.inf
        self._read: tuple[_BufferPool, memoryview] | None = None
        self._early: dict[Way, PipeMessage] = {}
        self._ends: dict[StageSide, PipeEnd] = {}
        self._pools: dict[StageSide, _BufferPool] = {
            side: _BufferPool(allocate, kept_nbytes) for side in pipes
        }
        bounds = PipeBounds(queued_bytes=_UNBOUNDED_BYTES, vector_bytes=max(longest_nbytes, 1))
        waiting = {side: fd for side, (fd, _) in pipes.items()}
        try:
            for side, (fd, ticket) in pipes.items():
                sock = socket.socket(fileno=fd)
                del waiting[side]
                self._ends[side] = self._made(sock, ticket, self._pools[side], bounds)
        except BaseException:
            for fd in waiting.values():
                os.close(fd)
            self.close()
            raise

    def send(self, way: Way, message: bytes, tensors: Sequence[memoryview]) -> None:
        """See ``Carrier.send``."""
        side = _TO[way]
        try:
            self._end(side).send(_KINDS[way], message, tensors, deadline_s=0.0)
        except TransportError:
            self.side = side
            raise

    def receive(self, way: Way, timeout_s: float) -> tuple[bytes, memoryview]:
        """See ``Carrier.receive``; what the daemon said may end the wait, too."""
        self._give_back()
        side = _FROM[way]
        message = self._early.pop(way, None) or self._await(side, timeout_s)
        if message is None:
            self.side = side
            raise PeerTimeoutError(f"the {side} rank didn't say a whole message within {timeout_s:g} s")
        # Until the next message this neighbour is to blame: the reader may find more wrong than we can.
        self.side = side
        if message.kind != _KINDS[way]:
            raise WireError(f"the {side} rank sent a message of kind {message.kind}")
        if message.vector is None:
            return message.meta, memoryview(b"")
        self._read = self._pools[side], message.vector
        return message.meta, message.vector

    def waiting(self, way: Way, timeout_s: float) -> bool:
        """Tell whether a message that goes this way is there, or comes in time; `receive` returns it then.

        One that is on its way is waited for longer.

        Raises:
            PeerUnreachableError: a pipe broke, of either neighbour; or the daemon's words ended the wait.
        """
        self._give_back()
        if way not in self._early:
            message = self._await(_FROM[way], timeout_s)
            if message is None:
                self.check()
                return False
            self._early[way] = message
        return True

    def check(self) -> None:
        """Find out whether both neighbours are there, as far as is known.

        Raises:
            PeerUnreachableError: one isn't.
        """
        for side, end in self._ends.items():
            if not end.open:
                self.side = side
                raise PeerUnreachableError(f"the pipe to the {side} rank broke")

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was sent has left.

        Raises:
            TransportError: a pipe broke, or that took too long; or the daemon's words ended the wait.
        """
        for side in self._ends:
            self._flush(side, timeout_s)

    def close(self) -> None:
        """See ``Carrier.close``; calling it again does nothing."""
        for end in self._ends.values():
            end.close()

    @staticmethod
    def _made(sock: socket.socket, ticket: PipeTicket, pool: _BufferPool, bounds: PipeBounds) -> PipeEnd:
        try:
            return PipeEnd(
                sock,
                ticket.keys,
                ticket.leftover,
                hides=ticket.hides,
                into=pool.take,
                bounds=bounds,
                rates=ticket.rates,
            )
        except BaseException:
            sock.close()
            raise

    def _end(self, side: StageSide) -> PipeEnd:
        end = self._ends.get(side)
        if end is None:
            raise PeerUnreachableError(f"there is no pipe to the {side} rank")
        return end

    def _await(self, side: StageSide, timeout_s: float) -> PipeMessage | None:
        """Return the next message, or None when it is too late."""
        end = self._end(side)
        until_s = self._clock() + timeout_s - self._moved_s()
        while True:
            self._hear()
            left_s = until_s + self._moved_s() - self._clock()
            try:
                return end.receive(deadline_s=max(min(left_s, SLICE_S), 0.0))
            except PeerTimeoutError:
                if left_s <= 0.0:
                    return None
            except TransportError:
                self.side = side
                raise

    def _flush(self, side: StageSide, timeout_s: float) -> None:
        end = self._end(side)
        until_s = self._clock() + timeout_s - self._moved_s()
        while True:
            left_s = until_s + self._moved_s() - self._clock()
            try:
                end.flush(deadline_s=max(min(left_s, SLICE_S), 0.0))
            except PeerTimeoutError:
                if left_s <= 0.0:
                    self.side = side
                    raise
                self._hear()
            except TransportError:
                self.side = side
                raise
            else:
                return

    def _moved_s(self) -> float:
        """Return how long all that moved so far may have taken."""
        return sum(end.bytes_in + end.bytes_out for end in self._ends.values()) / _SLOWEST_BYTES_S

    def _hear(self) -> None:
        """Hear the daemon, when that is due.

        Raises:
            PeerUnreachableError: it wants something else than this pipeline.
        """
        if self._clock() < self._listened_s + SLICE_S / 2:
            return
        self._listen()
        self._listened_s = self._clock()
        if self._interrupted():
            self.side = None
            raise PeerUnreachableError("another order ended the wait")

    def _give_back(self) -> None:
        if self._read is not None:
            pool, view = self._read
            self._read = None
            pool.give(view)


class _BufferPool:
    """Memory of one pipe's messages, most of which are as long as others before."""

    def __init__(self, allocate: Allocate, kept_nbytes: int) -> None:
        self._allocate = allocate
        self._kept_nbytes = kept_nbytes
        self._lock = threading.Lock()
        self._free: list[Memory] = []

    def take(self, _kind: int, _meta: bytes, nbytes: int) -> memoryview:
        """Give a buffer: the shortest that is long enough, but none of more than twice the length."""
        with self._lock:
            fitting = [one for one in self._free if nbytes <= one.nbytes <= 2 * nbytes]
            found = min(fitting, key=lambda one: one.nbytes, default=None)
            if found is not None:
                self._free = [one for one in self._free if one is not found]
        memory = found if found is not None else self._allocate(nbytes)
        return memory.data[:nbytes]

    def give(self, view: memoryview) -> None:
        """Take a buffer back, which nobody reads any more.

        The oldest goes when there are too many, and the longest go while they are too long together.
        """
        memory = view.obj
        assert isinstance(memory, np.ndarray)  # noqa: S101 - from `take`
        with self._lock:
            self._free = [*self._free[1 - _KEPT_BUFFERS :], memory]
            while sum(one.nbytes for one in self._free) > self._kept_nbytes:
                longest = max(self._free, key=lambda one: one.nbytes)
                self._free = [one for one in self._free if one is not longest]
