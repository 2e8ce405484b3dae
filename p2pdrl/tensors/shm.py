"""Anonymous shared memory between the daemon and its children, and the memory fence its users need.

The region has no name anywhere: it is a memfd (Linux) or a temporary file that is already unlinked (other
POSIX systems), and lives as long as a process holds its descriptor or mapping. So nothing is left behind
when every process is killed with -9. The daemon creates it and hands the descriptor to the child, by
``pass_fds`` or ``socket.send_fds``.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
import threading

from p2pdrl.errors import TensorError

__all__ = ["SharedRegion", "fence"]

_fence_lock = threading.Lock()


class SharedRegion:
    """A mapping of ``nbytes`` shared bytes, zero when created.

    Use `create` or `attach`, and pass ``fd`` on. The memory is unmapped once `close` has been called and
    the last array that views it is gone.

    Args:
        fd: descriptor of the memory; owned by the region from now on.
        nbytes: bytes to map.
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
