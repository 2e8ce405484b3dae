"""What a child process prints goes to its daemon by a pipe; a daemon that reads no more must not hold it up.

The daemon makes the pipe non-blocking (`node.children.output`): what C++ prints while it is full is lost, and
holds nobody up. Python's own streams would raise then. Those made here wait a little, since a daemon that is
only busy reads on soon; then they leave out what doesn't fit, and say so once there is room.
"""

from __future__ import annotations

import io
import select
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

__all__ = ["PatientFile", "print_patiently"]

PATIENCE_S = 1.0


class PatientFile(io.FileIO):
    """A pipe whose writes never fail and take a bounded time.

    Args:
        fd: stays open.
        patience_s: longest wait for a reader. After that none is waited for until it has read again.
    """

    def __init__(self, fd: int, patience_s: float = PATIENCE_S) -> None:
        super().__init__(fd, "w", closefd=False)
        self._patience_s = patience_s
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
                self._waits = self._waits and bool(select.select([], [self], [], self._patience_s)[1])
                if not self._waits:
                    break
            else:
                done += taken
                self._waits = True
        return done


def print_patiently() -> None:
    """Let all that Python prints in this process go through a `PatientFile`, line by line."""
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.BufferedWriter(PatientFile(fd))
        text = io.TextIOWrapper(raw, "utf-8", errors="backslashreplace", line_buffering=True)
        setattr(sys, name, text)
