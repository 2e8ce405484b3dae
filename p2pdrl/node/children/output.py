"""What a child process prints, as lines of this node's log.

The child's standard output and error are one pipe. A child that dies loses nothing: what it wrote lies in
the pipe, and is read before that is closed. A daemon that is frozen holds no child up: the pipe doesn't
block, see `workers.output`. Lines that a child writes on purpose begin with its name; any other is a
warning, from a library or of the child's end.
"""

from __future__ import annotations

import asyncio
import fcntl
import os

from p2pdrl.telemetry.logging import get_logger

__all__ = ["ChildOutput"]

READ_BYTES = 1 << 14
"""At a time: a child that prints without end gets its turn and no more."""
LONGEST_LINE_BYTES = 4096
"""Longer ones are logged in pieces."""
MOST_READS = 256
"""At the end, where something that the child left behind may go on writing."""


class ChildOutput:
    """The pipe of one child.

    Args:
        source: whose it is; ``source`` of the log lines.

    Attributes:
        writer: descriptor of the child's end, until `follow`.

    Raises:
        OSError: no descriptors are left.
    """

    def __init__(self, source: str) -> None:
        self._source = source
        self._pid = 0
        self._rest = b""
        self._log = get_logger("p2pdrl.child")
        self._reader, self.writer = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else _pipe()
        )

    def follow(self, pid: int) -> None:
        """Give the child's end up, and log what comes from now on.

        Args:
            pid: of the child, which has started with our ``writer`` as its output.
        """
        self._pid = pid
        self._close_writer()
        asyncio.get_running_loop().add_reader(self._reader, self._readable)

    def close(self) -> None:
        """Log what is left, and close; the child must be gone. Calling it again does nothing."""
        self._close_writer()
        if self._reader < 0:
            return
        if self._pid:
            asyncio.get_running_loop().remove_reader(self._reader)
            for _ in range(MOST_READS):
                if not (data := self._read()):
                    break
                self._take(data)
            if self._rest:
                self._line(self._rest)
        os.close(self._reader)
        self._reader, self._rest = -1, b""

    def _close_writer(self) -> None:
        if self.writer >= 0:
            os.close(self.writer)
            self.writer = -1

    def _readable(self) -> None:
        data = self._read()
        if data:
            self._take(data)
        elif data is not None:
            asyncio.get_running_loop().remove_reader(self._reader)

    def _read(self) -> bytes | None:
        """Return what is there; nothing at the end, None where there may be more later."""
        try:
            return os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return None

    def _take(self, data: bytes) -> None:
        """Log the lines that are complete now."""
        *lines, rest = (self._rest + data).split(b"\n")
        while len(rest) > LONGEST_LINE_BYTES:
            lines.append(rest[:LONGEST_LINE_BYTES])
            rest = rest[LONGEST_LINE_BYTES:]
        self._rest = rest
        for line in lines:
            for start in range(0, len(line), LONGEST_LINE_BYTES):
                self._line(line[start : start + LONGEST_LINE_BYTES])

    def _line(self, line: bytes) -> None:
        text = line.decode("utf-8", "backslashreplace").rstrip()
        if not text:
            return
        own = text.removeprefix(f"{self._source}: ")
        log = self._log.warning if own == text else self._log.info
        log(own, source=self._source, pid=self._pid)


def _pipe() -> tuple[int, int]:
    """Where the system has no ``pipe2``."""
    reader, writer = os.pipe()
    for fd in (reader, writer):
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) | os.O_NONBLOCK)
    return reader, writer
