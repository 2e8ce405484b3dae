"""What every child process does: print without blocking, end when its daemon does, report its crash."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from p2pdrl.errors import P2PDRLError, UsageError, WorkerError
from p2pdrl.workers.protocol import ChildFailed, Crashed, frame

__all__ = [
    "NonBlockingFile",
    "PollPause",
    "child_main",
    "crash_of",
    "die_with_parent",
    "keep_freed_memory",
    "made_for_good",
    "print_without_blocking",
    "report_of",
]

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


WRITE_TIMEOUT_S = 1.0


class NonBlockingFile(io.FileIO):
    """A pipe whose writes never fail and take a bounded time.

    Args:
        fd: stays open.
        timeout_s: longest wait for a reader. After that none is waited for until it has read again.
    """

    def __init__(self, fd: int, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        super().__init__(fd, "w", closefd=False)
        self._timeout_s = timeout_s
        self._waits = True
        self._lost = 0

    def write(self, data: ReadableBuffer, /) -> int:
        """Write what is taken in time; return the length of all of it, in bytes."""
        given = bytes(data)
        if self._lost:
            note = f"\n[{self._lost} bytes left out]\n".encode()
            if self._put(note) < len(note):  # so short that a pipe takes all of it or nothing
                self._lost += len(given)
                return len(given)
        self._lost = len(given) - self._put(given)
        return len(given)

    def _put(self, data: bytes) -> int:
        """Write what is taken in time; return how many bytes that was."""
        done = 0
        while done < len(data):
            try:
                taken = super().write(data[done:])
            except OSError:
                break  # the daemon is gone, and this process about to follow
            if taken is None:
                self._waits = self._waits and bool(select.select([], [self], [], self._timeout_s)[1])
                if not self._waits:
                    break
            else:
                done += taken
                self._waits = True
        return done


def print_without_blocking() -> None:
    """Let all that Python prints in this process go through a `NonBlockingFile`, line by line."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(NonBlockingFile(fd))
        text = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)


_PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Ask the kernel (Linux) to kill this process when its parent dies.

    Elsewhere the closed socket pair is what ends the child. The parent may have died before
    the call; ``parent_pid`` tells.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_NBYTES = 1 << 30
_OLD_MMAP_THRESHOLD = 32 << 20
"""The largest that glibc before 2.35 takes."""


def keep_freed_memory() -> bool:
    """Let this process's heap keep freed blocks of up to a GiB for the next ones; for before threads start.

    glibc hands large blocks back to the system as soon as they are free, so each gradient faults the pages of
    all its activations in anew: half of the processor time of a gradient over 1,024 Atari frames.

    Returns:
        False, with nothing changed, where there is no ``mallopt`` (macOS, musl) or where ``MALLOC_…`` or
        ``GLIBC_TUNABLES`` in the environment say how memory is to be had.
    """
    if any(name.startswith("MALLOC_") or name == "GLIBC_TUNABLES" for name in os.environ):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: Windows
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    if not (mallopt(_M_MMAP_THRESHOLD, _KEPT_NBYTES) or mallopt(_M_MMAP_THRESHOLD, _OLD_MMAP_THRESHOLD)):
        return False
    return bool(mallopt(_M_TRIM_THRESHOLD, _KEPT_NBYTES))


def child_main(
    name: str, live: Callable[[socket.socket, argparse.Namespace], None], options: Sequence[str]
) -> int:
    """Be a process that serves its daemon over a socket pair until that is closed; return the exit code.

    Args:
        name: as its lines begin.
        live: does the work; what it raises is reported to the daemon, unless that is what is gone.
        options: integers that the daemon gives beside ``--fd`` and ``--parent``, descriptors for instance.
    """
    parser = argparse.ArgumentParser(prog=name)
    for option in ("--fd", "--parent", *options):
        parser.add_argument(option, type=int, required=True)
    arguments = parser.parse_args()
    die_with_parent(arguments.parent)
    keep_freed_memory()
    print_without_blocking()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=arguments.fd) as sock:
        try:
            live(sock, arguments)
        except (WorkerError, ConnectionError) as error:
            print(f"{name}: ended: {error}", file=sys.stderr)
            return 1
        except Exception as error:  # noqa: BLE001 - an environment's, say: the daemon tells of it and decides
            report, code = report_of(error)
            sock.sendall(frame(report))
            return code
    return 0


@contextlib.contextmanager
def made_for_good() -> Iterator[None]:
    """Look for no cycles while torch is imported and a process builds what it keeps, nor ever in all that.

    It is hundreds of thousands of objects: to look through them takes a fifth of the time to make them.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def report_of(error: Exception) -> tuple[ChildFailed | Crashed, int]:
    """Return what a process tells its daemon of the error that it ends by, and its exit code."""
    if isinstance(error, P2PDRLError):
        return ChildFailed(message=str(error), usage=isinstance(error, UsageError)), error.exit_code
    return crash_of(error), 1


LONGEST_MESSAGE = 1000
"""Characters."""
LONGEST_TRACE = 6000
"""Characters; what came first is left out."""


def crash_of(error: BaseException) -> Crashed:
    """Describe ``error``, whatever it is: its own ``str`` may fail, and its text be as long as it likes."""
    seen = traceback.TracebackException.from_exception(error)
    last = seen.stack[-1] if seen.stack else None
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    trace = "".join(seen.format()).rstrip("\n")
    if len(trace) > LONGEST_TRACE:
        tail = trace[-LONGEST_TRACE:]
        trace = tail.partition("\n")[2] or tail
    return Crashed(
        kind=_plain(name, LONGEST_MESSAGE),
        message=_plain(str(seen), LONGEST_MESSAGE),
        where="nowhere" if last is None else _plain(f"{last.filename}:{last.lineno} in {last.name}", 500),
        trace=_plain(trace, LONGEST_TRACE),
    )


def _plain(text: str, longest: int) -> str:
    """Return text that can be encoded, and no more than so much of it."""
    return text[:longest].encode("utf-8", "backslashreplace").decode()


class PollPause:
    """Exponentially growing sleeps for polling shared memory, which can't be waited on."""

    def __init__(self, shortest_s: float = 1e-4, longest_s: float = 0.01, growth: float = 1.25) -> None:
        self._shortest_s = shortest_s
        self._longest_s = longest_s
        self._growth = growth
        self._s = shortest_s

    def next_s(self) -> float:
        """Return how long to sleep before the next poll, in seconds."""
        pause_s, self._s = self._s, min(self._s * self._growth, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin with the shortest again."""
        self._s = self._shortest_s
