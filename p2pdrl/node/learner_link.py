"""One learner process and the socket pair to it: start, talk, notice its end.

Called by `supervisor`, which decides when to start another one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.protocol import (
    Attach,
    Failed,
    FrameBuffer,
    FromLearner,
    Hello,
    Report,
    Start,
    ToLearner,
    decode_from_learner,
    frame,
)

__all__ = ["LearnerLink"]

BUILD_DEADLINE_S = 120.0
READ_BYTES = 1 << 16


class LearnerLink:
    """A running learner process.

    Args:
        process: the child.
        sock: our end of the socket pair, non-blocking.
    """

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        self._frames = FrameBuffer()
        self._outbox: dict[type[ToLearner], ToLearner] = {}
        self._outbox_filled = asyncio.Event()

    @classmethod
    async def spawn(cls, start: Start) -> LearnerLink:
        """Start a learner process and tell it what to train.

        Raises:
            WorkerError: the process can't be started.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise WorkerError(f"can't start the learner process: {error}") from error
        ours.setblocking(False)
        environment = os.environ | {"OMP_NUM_THREADS": str(start.threads)}
        command = ("-m", "p2pdrl.workers.learner", "--fd", str(theirs.fileno()), "--parent", str(os.getpid()))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno()],
                env=environment,
            )
        except OSError as error:
            ours.close()
            raise WorkerError(f"can't start the learner process: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link = cls(process, ours)
        try:
            await link._send_now(start)
        except BaseException:
            await link.kill()
            raise
        return link

    @property
    def pid(self) -> int:
        """Process id of the learner."""
        return self._process.pid

    async def hello(self) -> Hello:
        """Wait until the model is built.

        Raises:
            ConfigError: the task can't be run as configured.
            WorkerError: the learner died, or took longer than two minutes.
        """
        try:
            async with asyncio.timeout(BUILD_DEADLINE_S):
                while True:
                    for message in await self._receive():
                        if isinstance(message, Hello):
                            return message
                        if isinstance(message, Failed):
                            raise (ConfigError if message.usage else WorkerError)(message.message)
        except TimeoutError as error:
            raise WorkerError(f"the learner wasn't ready after {BUILD_DEADLINE_S:.0f} s") from error

    async def attach(self, region: SharedRegion, nbytes: int, *, restore: bool) -> None:
        """Hand the board over.

        Raises:
            WorkerError: the learner is gone.
        """
        try:
            socket.send_fds(self._sock, [frame(Attach(nbytes=nbytes, restore=restore))], [region.fd])
        except OSError as error:
            raise WorkerError(f"the learner is gone: {error}") from error

    def tell(self, message: ToLearner) -> None:
        """Queue a message; a later one of the same type replaces one that wasn't sent yet."""
        self._outbox[type(message)] = message
        self._outbox_filled.set()

    async def converse(self, on_report: Callable[[Report], None]) -> None:
        """Pass reports on and send what is queued, until the learner's end of the socket closes.

        Raises:
            ConfigError: the learner says that it can't run as configured.
            WorkerError: the learner says that it failed for good.
        """
        sender = asyncio.create_task(self._send_queued(), name="learner-sender")
        try:
            while True:
                try:
                    messages = await self._receive()
                except WorkerError:
                    return
                for message in messages:
                    if isinstance(message, Report):
                        on_report(message)
                    elif isinstance(message, Failed):
                        raise (ConfigError if message.usage else WorkerError)(message.message)
        finally:
            sender.cancel()
            await asyncio.wait([sender])
            if not sender.cancelled():
                sender.result()

    async def reap(self, timeout_s: float) -> int:
        """Wait for a learner that is ending; kill it when that takes too long; return its exit code."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.wait()
        except TimeoutError:
            return await self.kill()
        return self.close()

    async def kill(self) -> int:
        """Kill the learner at once; return its exit code."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        return self.close()

    def close(self) -> int:
        """Close the socket; return the exit code of a process that has ended."""
        self._sock.close()
        return self._process.returncode if self._process.returncode is not None else -1

    async def _receive(self) -> list[FromLearner]:
        try:
            data = await asyncio.get_running_loop().sock_recv(self._sock, READ_BYTES)
        except OSError as error:
            raise WorkerError(f"the learner is gone: {error}") from error
        if not data:
            raise WorkerError("the learner is gone")
        return [decode_from_learner(body) for body in self._frames.feed(data)]

    async def _send_now(self, message: ToLearner) -> None:
        try:
            await asyncio.get_running_loop().sock_sendall(self._sock, frame(message))
        except OSError as error:
            raise WorkerError(f"the learner is gone: {error}") from error

    async def _send_queued(self) -> None:
        while True:
            await self._outbox_filled.wait()
            self._outbox_filled.clear()
            while self._outbox:
                message = self._outbox.pop(next(iter(self._outbox)))
                try:
                    await self._send_now(message)
                except WorkerError:
                    return
