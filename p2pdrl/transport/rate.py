"""How many bytes a second a node moves: a rate for each direction, shared by all processes of the node.

The generic cell rate algorithm (ITU-T I.371) needs one number for a rate, the theoretical arrival time (TAT)
of the next byte: bytes may pass once it is less than `BURST_S` ahead, and each moves it on by what it takes
at that rate. Both numbers lie in a small file, which every process maps; `flock` is held for the microseconds
that a change takes. Times are those of ``time.monotonic``, which all processes of a machine share.

    NodeRates ── upload, download: Rate ── an Allowance for each connection: ask, move some, used

Whoever wants to move bytes reserves a chunk, a sixteenth of a second's worth, and waits for its time: who
came first is served first, whichever process it is in, so connections share a rate equally. Short messages
are charged, and don't wait. Nothing here reads or writes connections.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from p2pdrl.transport.framing import Buffer
from p2pdrl.transport.limits import PIECE_BYTES

__all__ = ["BURST_S", "RETRY_S", "Allowance", "Gcra", "NodeRates", "Rate", "RateLimits", "first_of"]

BURST_S = 0.25
"""Seconds' worth of bytes that may pass at once after a time of silence."""

MOST_CHARGED_S = 4.0
"""Bytes that were charged hold others up by no more than this, which is less than peers' patience with a
connection on which nothing comes (`TransportLimits.stall_deadline_s`)."""

RETRY_S = 0.001
"""After which to ask again where another process was just changing the numbers."""

_LEAST_WAIT_S = 1e-4
"""Less isn't worth a timer; it is counted all the same."""

_CHUNKS_PER_S = 16
_LEAST_CHUNK_BYTES = 1024
_LARGEST_BUFFER_BYTES = 4 << 20
_LEAST_BUFFER_BYTES = 4096


class Gcra:
    """The algorithm for one rate: what becomes of the TAT (seconds, monotonic).

    Args:
        bytes_s: the rate.
    """

    def __init__(self, bytes_s: float) -> None:
        self.bytes_s = bytes_s

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that are reserved at once, at most; small enough that many connections take turns."""
        return min(max(int(self.bytes_s / _CHUNKS_PER_S), _LEAST_CHUNK_BYTES), PIECE_BYTES)

    def reserve(self, tat_s: float, nbytes: int, now_s: float) -> tuple[float, float]:
        """Return the TAT behind ``nbytes``, and from when on they may pass."""
        begin_s = max(tat_s, now_s)
        return begin_s + nbytes / self.bytes_s, begin_s - BURST_S

    def charge(self, tat_s: float, nbytes: int, now_s: float) -> float:
        """Return the TAT behind ``nbytes`` that passed unasked; a negative number gives some back."""
        begin_s = max(tat_s, now_s)
        after_s = begin_s + nbytes / self.bytes_s
        return min(after_s, max(begin_s, now_s + MOST_CHARGED_S))


class RateLimits(msgspec.Struct, frozen=True):
    """What a process has to know to keep to its node's rates.

    Attributes:
        path: of the file with the TATs.
        upload_bytes_s: bytes sent each second; 0 is no bound.
        download_bytes_s: bytes received each second; 0 is no bound.
    """

    path: str
    upload_bytes_s: int = 0
    download_bytes_s: int = 0


_TAT = struct.Struct("d")


class _TatFile:
    """The TATs of both directions, shared by processes.

    Args:
        path: of the file.
        anew: make it, or forget what an earlier run of the node left in it.

    Raises:
        OSError: it can't be opened.
    """

    def __init__(self, path: str, *, anew: bool) -> None:
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if anew else 0)
        self._fd = os.open(path, flags, 0o600)
        try:
            if anew:
                os.pwrite(self._fd, bytes(2 * _TAT.size), 0)
            self._numbers = mmap.mmap(self._fd, 2 * _TAT.size)
        except BaseException:
            os.close(self._fd)
            raise
        self._one_thread = threading.Lock()

    def change(self, place: int, change: Callable[[float], float]) -> bool:
        """Replace a TAT by what ``change`` makes of it; return False, at once, where others are at it."""
        if not self._one_thread.acquire(blocking=False):
            return False
        try:
            if self._fd < 0:
                return True
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                (tat_s,) = _TAT.unpack_from(self._numbers, place * _TAT.size)
                _TAT.pack_into(self._numbers, place * _TAT.size, change(tat_s))
            finally:
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        except BlockingIOError:
            return False
        finally:
            self._one_thread.release()
        return True

    def close(self) -> None:
        """Let go of the file; nothing is bounded any more."""
        with self._one_thread:
            if self._fd >= 0:
                self._numbers.close()
                os.close(self._fd)
                self._fd = -1


class Rate:
    """One direction's rate as one process sees it; its methods never block.

    Args:
        bytes_s: the rate.
        file: holds the TAT.
        place: of the TAT in it.
        clock: monotonic seconds, of the same clock in all processes.
    """

    def __init__(self, bytes_s: float, file: _TatFile, place: int, clock: Callable[[], float]) -> None:
        self.now_s = clock
        self._gcra = Gcra(bytes_s)
        self._file = file
        self._place = place
        self._uncharged_nbytes = 0

    @property
    def chunk_nbytes(self) -> int:
        """Bytes that can be reserved at once."""
        return self._gcra.chunk_nbytes

    def reserve(self, nbytes: int) -> float | None:
        """Return from when on ``nbytes`` may pass; None to ask again after `RETRY_S`."""
        now_s = due_s = self.now_s()

        def reserve(tat_s: float) -> float:
            nonlocal due_s
            tat_s = self._gcra.charge(tat_s, self._uncharged_nbytes, now_s)
            tat_s, due_s = self._gcra.reserve(tat_s, nbytes, now_s)
            return tat_s

        if not self._file.change(self._place, reserve):
            return None
        self._uncharged_nbytes = 0
        return due_s

    def charge(self, nbytes: int) -> None:
        """Count bytes that passed unasked, or give back (negative) such as were reserved in vain."""
        self._uncharged_nbytes += nbytes
        now_s, owed_nbytes = self.now_s(), self._uncharged_nbytes
        if self._file.change(self._place, lambda tat_s: self._gcra.charge(tat_s, owed_nbytes, now_s)):
            self._uncharged_nbytes -= owed_nbytes


class Allowance:
    """What one connection may move in one direction; used by one thread at a time.

        while (wait_s := allowance.ask(wanted_nbytes)) > 0:
            …  # wait, however suits
        allowance.used(moved)  # of no more than allowance.nbytes

    Attributes:
        nbytes: reserved bytes, which may pass once `ask` has returned 0.
    """

    def __init__(self, rate: Rate) -> None:
        self.nbytes = 0
        self._rate = rate
        self._due_s = 0.0

    def ask(self, wanted_nbytes: int) -> float:
        """Return how many seconds to wait before `nbytes` may pass; reserve some first if there are none.

        Args:
            wanted_nbytes: what is to be moved; a chunk at most is reserved.
        """
        if self.nbytes <= 0:
            nbytes = max(min(wanted_nbytes, self._rate.chunk_nbytes), 1)
            due_s = self._rate.reserve(nbytes)
            if due_s is None:
                return RETRY_S
            self.nbytes, self._due_s = nbytes, due_s
        wait_s = self._due_s - self._rate.now_s()
        return wait_s if wait_s > _LEAST_WAIT_S else 0.0

    def used(self, nbytes: int) -> None:
        """Note what was moved; what goes beyond the reserved bytes is charged."""
        beyond_nbytes = nbytes - self.nbytes
        self.nbytes = max(0, -beyond_nbytes)
        if beyond_nbytes > 0:
            self._rate.charge(beyond_nbytes)

    def give_back(self) -> None:
        """Leave to others what was reserved and isn't needed."""
        if self.nbytes > 0:
            self._rate.charge(-self.nbytes)
            self.nbytes = 0

    async def take(self, wanted_nbytes: int) -> int:
        """Wait for some bytes, at most ``wanted_nbytes``, and use them; return how many."""
        try:
            while (wait_s := self.ask(wanted_nbytes)) > 0.0:  # noqa: ASYNC110 - no process tells another
                await asyncio.sleep(wait_s)
        except BaseException:
            self.give_back()
            raise
        nbytes, self.nbytes = self.nbytes, 0
        return nbytes

    def block(self, wanted_nbytes: int, most_s: float) -> bool:
        """Sleep until some bytes may pass, ``most_s`` at most; return whether they may. For threads."""
        wait_s = self.ask(wanted_nbytes)
        if wait_s > 0.0 and most_s > 0.0:
            time.sleep(min(wait_s, most_s))
            wait_s = self.ask(wanted_nbytes)
        return wait_s <= 0.0


class NodeRates:
    """The rates of a node, in one of its processes.

    Args:
        limits: rates, and where their numbers are.
        anew: for the daemon, which begins; its child processes join.
        clock: monotonic seconds.

    Attributes:
        limits: as given; another process makes its own of it.
        upload: None where there is no bound.
        download: likewise.

    Raises:
        OSError: the file can't be opened.
    """

    def __init__(
        self, limits: RateLimits, *, anew: bool = False, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits
        self._file = _TatFile(limits.path, anew=anew)
        self.upload, self.download = (
            Rate(bytes_s, self._file, place, clock) if bytes_s else None
            for place, bytes_s in enumerate((limits.upload_bytes_s, limits.download_bytes_s))
        )

    def bound_buffer(self, sock: socket.socket) -> None:
        """Have the kernel keep half a second's worth of what comes, at most.

        It opens a window that was closed only once a sixteenth of the buffer is free: with megabytes of it
        and a low rate that would take longer than the peer's patience.
        """
        nbytes = self.limits.download_bytes_s // 2
        if 0 < nbytes < _LARGEST_BUFFER_BYTES:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, max(nbytes, _LEAST_BUFFER_BYTES))
            except OSError:
                pass  # the peer is gone already, as will be noticed

    def close(self) -> None:
        """Let go of the file; what still moves is no longer bounded."""
        self._file.close()


B = TypeVar("B", bound=Buffer)


def first_of(buffers: Sequence[B], nbytes: int) -> list[B | memoryview]:
    """Return the first ``nbytes`` of a list of buffers, without a copy."""
    found: list[B | memoryview] = []
    for buffer in buffers:
        if nbytes <= 0:
            break
        found.append(buffer if len(buffer) <= nbytes else memoryview(buffer)[:nbytes])
        nbytes -= len(found[-1])
    return found
