"""One child process and the socket pair to it: start, send and receive frames, end.

`learner_link` and `group_link` say what is sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from typing import ClassVar, Protocol

from p2pdrl.errors import WorkerError
from p2pdrl.node.children.output import ChildOutput
from p2pdrl.workers.protocol import FrameBuffer

__all__ = ["HasDescriptor", "ProcessLink"]

READ_BYTES = 1 << 16


class HasDescriptor(Protocol):
    """What can be sent to another process: a shared region, a pipe."""

    @property
    def fd(self) -> int:
        """An open descriptor; -1 once it was given up."""
        ...


class ProcessLink:
    """A running child process.

    Args:
        process: the child.
        sock: our end of the socket pair, non-blocking.
        output: what it prints.
    """

    NAME: ClassVar[str]
    """As errors and log lines call the process."""

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, output: ChildOutput) -> None:
        self._process = process
        self._sock = sock
        self._output = output
        self._frames = FrameBuffer()

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
            options: its further arguments.
            environment: its environment variables.
            fds: file descriptors that it inherits.

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
