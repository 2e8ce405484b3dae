"""Shared memory of the daemon and its children: regions, the sequence lock, shared vectors, doorbells."""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from p2pdrl.errors import LayoutMismatchError, TensorError
from p2pdrl.tensors.layout import Float32Array
from p2pdrl.tensors.sidecar import AnyArray, SidecarLayout

__all__ = ["Doorbell", "GradientRing", "SeqLock", "SharedRegion", "SharedVector", "fence"]

_fence_lock = threading.Lock()


class SharedRegion:
    """A mapping of ``nbytes`` shared bytes, zero when created.

    The memory has no name: it is a memfd (Linux) or a temporary file that is already unlinked, and lives as
    long as a process holds its descriptor or mapping. So nothing is left when every process is killed with
    -9. The daemon creates it and passes the descriptor to the child.

    Use `create` or `attach`, and pass ``fd`` on. The memory is unmapped once `close` has been called and
    the last array that views it is gone.

    Args:
        fd: descriptor of the memory; owned by the region from now on.
        writable: False maps them for reading only.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self._map = mmap.mmap(fd, nbytes, access=mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ)
        self._buf = memoryview(self._map)

    @classmethod
    def create(cls, nbytes: int, label: str) -> SharedRegion:
        """Make new memory, filled with zeros.

        Args:
            nbytes: at least 1. Pages take real memory only once they are touched.
            label: shown in ``/proc/<pid>/maps``; no name that could be opened.

        Raises:
            TensorError: the system gives no such memory.
        """
        if nbytes < 1:
            raise TensorError(f"shared memory {label!r}: {nbytes} bytes asked for")
        try:
            fd = _anonymous_file(nbytes, label)
        except OSError as error:
            raise TensorError(f"shared memory {label!r} of {nbytes} bytes can't be made: {error}") from error
        return cls._mapped(fd, nbytes)

    @classmethod
    def attach(cls, fd: int, nbytes: int, *, writable: bool = True) -> SharedRegion:
        """Map memory that another process made; ``fd`` belongs to the region from now on.

        Raises:
            TensorError: ``fd`` is no such memory, or smaller than ``nbytes`` (touching what lies beyond
                would end the process with SIGBUS).
        """
        try:
            have = os.fstat(fd).st_size
        except OSError as error:
            raise TensorError(f"descriptor {fd} isn't open: {error}") from error
        if nbytes < 1 or have < nbytes:
            raise TensorError(f"descriptor {fd} holds {have} bytes of shared memory, not {nbytes}")
        return cls._mapped(fd, nbytes, writable=writable)

    @classmethod
    def _mapped(cls, fd: int, nbytes: int, *, writable: bool = True) -> SharedRegion:
        try:
            return cls(fd, nbytes, writable=writable)
        except (OSError, ValueError) as error:
            os.close(fd)
            raise TensorError(f"{nbytes} bytes of shared memory can't be mapped: {error}") from error

    @property
    def buf(self) -> memoryview:
        """The bytes; writable, unless it was mapped for reading only."""
        return self._buf

    def close(self) -> None:
        """Close the descriptor and let go of the mapping; closing twice is fine."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        try:
            self._buf.release()
            self._map.close()
        except BufferError:
            # An array still views the memory; its end unmaps it.
            return


def fence() -> None:
    """Keep loads and stores before this call before those after it, as other processes see them.

    Python has no atomics, but taking and releasing a lock orders memory (POSIX 4.12). One pair lets
    neighbours slide into the critical section; with two, what comes before is ordered before the first
    release, what comes after is ordered after the second acquire, and that release before that acquire.
    """
    with _fence_lock:
        pass
    with _fence_lock:
        pass


def _anonymous_file(nbytes: int, label: str) -> int:
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(label, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    else:
        with tempfile.TemporaryFile(prefix="p2pdrl-") as file:
            fd = os.dup(file.fileno())
    try:
        os.ftruncate(fd, nbytes)
        if hasattr(os, "memfd_create"):
            # Nobody who holds the descriptor can shrink it under a reader's feet (SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError:
        os.close(fd)
        raise
    return fd


_BELL_BYTES = 4096


class Doorbell:
    """Wakes a process that waits for shared memory to change; any number may ring, one waits.

    It is an eventfd (Linux) or a pipe. The daemon makes it, and holds both ends as long as anybody may use
    it: so it stays what it is when a process is killed with -9, and neither end is ever told that the other
    is gone. A ring that nobody waited for isn't lost: the next wait ends at once.

    Args:
        waiter: descriptor that is readable once somebody has rung; owned by the bell from now on.
        ringer: descriptor to ring by; the same one where the system has an eventfd.

    Example:
        >>> bell = Doorbell.create()
        >>> bell.ring(); bell.ring()
        >>> bell.hush(), bell.hush()
        (True, False)
        >>> bell.close()
    """

    def __init__(self, waiter: int, ringer: int) -> None:
        self.waiter, self.ringer = waiter, ringer

    @classmethod
    def create(cls) -> Doorbell:
        """Make one.

        Raises:
            TensorError: the system gives no descriptors.
        """
        try:
            if hasattr(os, "eventfd"):
                fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
                return cls(fd, fd)
            waiter, ringer = os.pipe()
        except OSError as error:
            raise TensorError(f"no doorbell can be made: {error}") from error
        os.set_blocking(waiter, False)
        os.set_blocking(ringer, False)
        return cls(waiter, ringer)

    @classmethod
    def attach(cls, waiter: int, ringer: int) -> Doorbell:
        """Take over what another process made and passed on; who only rings may say -1 for ``waiter``.

        The descriptors are exchanged for the lowest that are free: ``select`` takes no great ones.

        Raises:
            TensorError: one isn't open.
        """
        try:
            found = {fd: os.dup(fd) for fd in {waiter, ringer} if fd >= 0}
            for fd in found:
                os.close(fd)
        except OSError as error:
            raise TensorError(f"descriptors {waiter} and {ringer} are no doorbell: {error}") from error
        return cls(found.get(waiter, -1), found.get(ringer, -1))

    def ring(self) -> None:
        """Wake who waits, or will."""
        with suppress(BlockingIOError):  # it rings already
            os.write(self.ringer, _ONE)

    def hush(self) -> bool:
        """Stop the ringing; tell whether there was any."""
        try:
            return bool(os.read(self.waiter, _BELL_BYTES))
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Close the descriptors; closing twice is fine."""
        for fd in {self.waiter, self.ringer}:
            if fd >= 0:
                os.close(fd)
        self.waiter = self.ringer = -1


_ONE = (1).to_bytes(8, sys.byteorder)
"""As an eventfd counts; a pipe takes it likewise."""


T = TypeVar("T")

_BEGUN, _DONE = 0, 1


class SeqLock:
    """A sequence lock over two copies of what one writer writes and many read.

    It counts the writes begun and done; write ``n`` goes to copy ``n % 2``, to which no reader is sent, and
    one 8-byte store then turns the readers over to it. A writer that dies half-way leaves the copy before
    whole and readable; a reader starts again only when the writer has come round to the copy that it was
    reading. This is the latch form of Linux's sequence counters (Documentation/locking/seqlock.rst,
    ``seqcount_latch_t``).

    Args:
        words: two aligned uint64 in shared memory, zero at first; aligned 8-byte stores are atomic.

    Example:
        >>> import numpy as np
        >>> lock, copies = SeqLock(np.zeros(2, np.uint64)), np.zeros((2, 3))
        >>> with lock.write() as copy:
        ...     copies[copy] = 7
        >>> lock.read(lambda copy: copies[copy].sum())
        np.float64(21.0)
    """

    def __init__(self, words: npt.NDArray[np.uint64]) -> None:
        self._words = words

    @property
    def writes(self) -> int:
        """How many writes are done; 0 means that there is nothing to read."""
        return int(self._words[_DONE])

    @contextmanager
    def write(self) -> Iterator[int]:
        """Give the copy (0 or 1) to fill; readers see it once the block ends without an exception."""
        number = self.writes + 1
        self._words[_BEGUN] = number
        fence()
        yield number % 2
        fence()
        self._words[_DONE] = number

    def read(self, take: Callable[[int], T], attempts: int = 1000) -> T | None:
        """Call ``take(copy)`` until the copy stood still meanwhile; return what it gave, or raise its error.

        ``take`` may see a copy in mid-write, in an attempt whose result or error is then thrown away.

        Returns:
            None when nothing has been written, or when no attempt went undisturbed.
        """
        for _ in range(attempts):
            number = self.writes
            if number == 0:
                return None
            fence()
            try:
                result = take(number % 2)
            except Exception:
                if self._still(number):
                    raise
                continue
            if self._still(number):
                return result
        return None

    def _still(self, number: int) -> bool:
        """Whether the copy of write ``number`` has stood still since."""
        fence()
        return int(self._words[_BEGUN]) <= number + 1


_HEADER_BYTES = 64
_NO_STATISTICS = SidecarLayout()


class SharedVector:
    """One vector of D float32 for several learners, and a word that says whether it is filled (Hogwild).

    Nobody locks: where two processes move the same entry at once, one of the moves may be lost.

    Args:
        region: of `nbytes_of` bytes.
        size: D.
        statistics: what else they share behind the vector: the state of their optimizers, or nothing.

    Attributes:
        statistics: views of that, by name.

    Example:
        >>> region = SharedRegion.create(SharedVector.nbytes_of(2), "vector")
        >>> first, other = SharedVector(region, 2), SharedVector(region, 2)
        >>> first.vector[:] = (1, 2)
        >>> first.fill()
        >>> other.filled, other.vector.tolist()
        (True, [1.0, 2.0])
    """

    def __init__(self, region: SharedRegion, size: int, statistics: SidecarLayout = _NO_STATISTICS) -> None:
        nbytes = self.nbytes_of(size, statistics)
        if size < 1 or region.nbytes < nbytes:
            raise LayoutMismatchError(f"{size} shared floats don't fit into {region.nbytes} bytes")
        self._words = np.frombuffer(region.buf, np.uint64, 1)
        self.vector: Float32Array = np.frombuffer(region.buf, np.float32, size, _HEADER_BYTES)
        self.statistics: dict[str, AnyArray] = statistics.views(
            region.buf[nbytes - statistics.nbytes : nbytes]
        )

    @staticmethod
    def nbytes_of(size: int, statistics: SidecarLayout = _NO_STATISTICS) -> int:
        """Bytes of shared memory that a vector of ``size`` float32 and the statistics take."""
        return _HEADER_BYTES + (_section(4 * size) + statistics.nbytes if statistics.items else 4 * size)

    @property
    def filled(self) -> bool:
        """Whether the vector holds parameters."""
        return bool(self._words[0])

    def fill(self) -> None:
        """Say that the vector holds parameters, after they were written."""
        fence()
        self._words[0] = 1


_SECTION_BYTES = 64


class GradientRing:
    """Vectors of D float32 through which a learner and its daemon hand gradients to each other.

    Who owns a slot is said by the messages of `workers.protocol`. A slot belongs to the daemon from the
    request that names it until the answer to it, and to the learner otherwise. Behind the slots is a word
    that the daemon writes and the learner reads between two steps of its environments.

    Args:
        region: shared memory, of at least `nbytes_of` bytes.

    Example:
        >>> region = SharedRegion.create(GradientRing.nbytes_of(slots=2, size=3), "ring")
        >>> learner, daemon = GradientRing(region, 2, 3), GradientRing(region, 2, 3)
        >>> learner.slot(1)[:] = 0.5
        >>> daemon.slot(1).tolist()
        [0.5, 0.5, 0.5]
    """

    def __init__(self, region: SharedRegion, slots: int, size: int) -> None:
        needed = self.nbytes_of(slots, size)
        if region.nbytes < needed:
            raise LayoutMismatchError(
                f"{slots} gradients of {size} floats take {needed} bytes, the region has {region.nbytes}"
            )
        stride = _section(4 * size)
        self._word = np.frombuffer(region.buf, np.uint64, 1, slots * stride)
        self._slots = tuple(np.frombuffer(region.buf, np.float32, size, n * stride) for n in range(slots))

    @staticmethod
    def nbytes_of(slots: int, size: int) -> int:
        """Bytes of shared memory that ``slots`` vectors of ``size`` float32 take."""
        if slots < 1 or size < 1:
            raise TensorError(f"a ring of {slots} vectors of {size} floats can't be made")
        return slots * _section(4 * size) + _SECTION_BYTES

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def preempted(self) -> int:
        """Number of the request that others wait for: what is collected for it is to end early. 0 is none."""
        return int(self._word[0])

    @preempted.setter
    def preempted(self, number: int) -> None:
        self._word[0] = number

    def slot(self, number: int) -> Float32Array:
        """A slot's vector: D float32, writable."""
        if not 0 <= number < len(self._slots):
            raise TensorError(f"the ring has slots 0 to {len(self._slots) - 1}, no {number}")
        return self._slots[number]


def _section(nbytes: int) -> int:
    return -(-nbytes // _SECTION_BYTES) * _SECTION_BYTES
