"""One child process and the socket pair to it: start, frames both ways, what it prints, its end."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children.restarts import Death, death_of
from p2pdrl.telemetry.logging import get_logger
from p2pdrl.workers.protocol import ChildFailed, Crashed, FrameBuffer

__all__ = ["REAP_S", "ChildOutput", "HasDescriptor", "ProcessLink"]

OUTPUT_READ_BYTES = 1 << 14
"""At a time: a child that prints without end gets its turn and no more."""
LONGEST_LINE_BYTES = 4096
"""Longer ones are logged in pieces."""
MOST_READS = 256
"""At the end, where something that the child left behind may go on writing."""


class ChildOutput:
    """The pipe that one child prints to; each line is logged with its ``source``.

    A child that dies loses nothing: what it wrote lies in the pipe, and is read before that is closed. A
    daemon that is frozen holds no child up, for the child's end doesn't block. Lines that a child writes on
    purpose begin with its name; any other is a warning, from a library or of the child's end.

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
        """``writer`` is the child's end, until `follow`."""

    def follow(self, pid: int) -> None:
        """Close the child's end, now that it has started with it, and log what comes from now on."""
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
            return os.read(self._reader, OUTPUT_READ_BYTES)
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


READ_BYTES = 1 << 16
REAP_S = 3.0
"""In which a process that hung up ends."""


class HasDescriptor(Protocol):
    """What can be sent to another process: a shared region, a pipe."""

    @property
    def fd(self) -> int:
        """An open descriptor; -1 once it was given up."""


class ProcessLink:
    """A running child process."""

    NAME: ClassVar[str]
    """As errors and log lines call the process."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, output: ChildOutput) -> None:
        self._process = process
        self._sock = sock
        self._output = output
        self._frames = FrameBuffer()
        self._crash: Crashed | None = None
        self._failed: str | None = None

    @classmethod
    async def launch(
        cls,
        module: str,
        options: Mapping[str, object],
        environment: Mapping[str, str],
        fds: Sequence[int] = (),
    ) -> tuple[asyncio.subprocess.Process, socket.socket, ChildOutput]:
        """Start a process; return it, our end of the socket pair and what it prints, for the constructor.

        Args:
            module: run by Python; it is told its end of the socket pair as ``--fd`` and us as ``--parent``.

        Raises:
            WorkerError: it can't be started.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise WorkerError(f"can't start the {cls.NAME}: {error}") from error
        ours.setblocking(False)
        output = None
        arguments = {**options, "--fd": theirs.fileno(), "--parent": os.getpid()}
        # A Ctrl-C is for us alone, also while the child still imports: it inherits what is blocked.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            output = ChildOutput(cls.NAME)
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", module),
                *(str(part) for pair in arguments.items() for part in pair),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output.writer,
                stderr=output.writer,
                pass_fds=[theirs.fileno(), *fds],
                env=environment,
            )
        except BaseException as error:
            ours.close()
            if output is not None:
                output.close()
            if isinstance(error, OSError):
                raise WorkerError(f"can't start the {cls.NAME}: {error}") from error
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            theirs.close()
        output.follow(process.pid)
        return process, ours, output

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    async def reap(self, timeout_s: float) -> int:
        """Wait for a process that is ending; kill it when that takes too long; return its exit code."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return await self.kill()
        return self._close()

    async def ended(self, stood_still: str | None = None, *, timeout_s: float = REAP_S) -> Death:
        """Wait until a process that hung up ends, kill it when that takes long; return how it died.

        Args:
            stood_still: why it is killed at once, if it is.
        """
        late = False
        if stood_still is None:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._process.wait()
            except TimeoutError:
                late = True
        code = await self.kill()
        return death_of(code, crash=self._crash, failed=self._failed, stood_still=stood_still, late=late)

    def says_its_end(self, message: object) -> bool:
        """Note what a process says to die of, for `ended`; tell whether it was that.

        Raises:
            ConfigError: its successors would die of the same.
        """
        if isinstance(message, Crashed):
            self._crash = message
        elif isinstance(message, ChildFailed):
            self._failed = message.message
            if message.usage:
                raise ConfigError(message.message)
        else:
            return False
        return True

    async def kill(self) -> int:
        """End it at once, even where it is frozen; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        return self._close()

    def _close(self) -> int:
        self._sock.close()
        self._output.close()
        return self._process.returncode if self._process.returncode is not None else -1

    async def receive(self) -> list[bytes]:
        """Wait for data; return the bodies of the frames that are complete now.

        Raises:
            WorkerError: the process is gone.
        """
        try:
            data = await asyncio.get_running_loop().sock_recv(self._sock, READ_BYTES)
        except OSError as error:
            raise WorkerError(f"the {self.NAME} is gone: {error}") from error
        if not data:
            raise WorkerError(f"the {self.NAME} is gone")
        return self._frames.feed(data)

    async def send(self, data: bytes, things: Sequence[HasDescriptor] = ()) -> None:
        """Send bytes, and the descriptors of ``things`` with the first of them.

        Raises:
            WorkerError: the process is gone.
        """
        try:
            if things:
                data = await self._send_with_fds(data, things)
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError as error:
            raise WorkerError(f"the {self.NAME} is gone: {error}") from error

    async def _send_with_fds(self, data: bytes, things: Sequence[HasDescriptor]) -> bytes:
        """Send descriptors with as much of ``data`` as fits; return the rest of it."""
        while all(thing.fd >= 0 for thing in things):
            try:
                return data[socket.send_fds(self._sock, [data], [thing.fd for thing in things]) :]
            except BlockingIOError:
                await _writable(self._sock)
        return b""  # they were given up while the socket was full: other news of them waits in line


async def _writable(sock: socket.socket) -> None:
    """Wait until ``sock`` takes more."""
    loop = asyncio.get_running_loop()
    room = asyncio.Event()
    loop.add_writer(sock, room.set)
    try:
        await room.wait()
    finally:
        loop.remove_writer(sock)
