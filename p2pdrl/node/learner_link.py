"""One learner process and the socket pair to it: start, talk, notice its end.

Called by `supervisor` and `crew`, which decide when to start another one. News (pace, progress, …) wait in
line, where a later one of the same kind replaces an earlier; answers, which a learner stands still for, go
out at once whenever the socket takes them, and none is ever replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Sequence

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.protocol import (
    Answer,
    Attach,
    Failed,
    FrameBuffer,
    FromLearner,
    Hello,
    Join,
    Posted,
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
        self._news: dict[type[ToLearner], tuple[ToLearner, Sequence[SharedRegion]]] = {}
        self._answers: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._sending = True
        """Whether something else may be half sent; so it is until `converse`."""

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
        await self._send_now(Attach(nbytes=nbytes, restore=restore), [region])

    async def join(self, region: SharedRegion) -> None:
        """Let the learner help another one, whose parameters lie in ``region``.

        Raises:
            WorkerError: the learner is gone.
        """
        await self._send_now(Join(nbytes=region.nbytes), [region])

    def tell(self, message: ToLearner, regions: Sequence[SharedRegion] = ()) -> None:
        """Queue news; a later message of the same type replaces one that wasn't sent yet.

        Args:
            message: any but an answer.
            regions: their descriptors go along; they stay open until this is sent or replaced.
        """
        self._news[type(message)] = (message, regions)
        self._filled.set()

    def answer(self, message: Answer) -> None:
        """Send an answer, at once if the socket takes it."""
        data = frame(message)
        if not self._sending and not self._answers:
            try:
                data = data[self._sock.send(data) :]
            except BlockingIOError:
                pass
            except OSError:
                return  # it is gone, as `converse` is about to notice
        if data:
            self._answers.append(data)
            self._filled.set()

    async def converse(
        self, on_report: Callable[[Report], None], on_posted: Callable[[Posted], None] | None = None
    ) -> None:
        """Pass reports and posts on and send what is queued, until the learner's end of the socket closes.

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
                    if isinstance(message, Posted):
                        if on_posted is not None:
                            on_posted(message)
                    elif isinstance(message, Report):
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

    async def _send_now(self, message: ToLearner, regions: Sequence[SharedRegion] = ()) -> None:
        await self._send(frame(message), regions)

    async def _send(self, data: bytes, regions: Sequence[SharedRegion] = ()) -> None:
        try:
            if regions:
                data = await self._send_with_fds(data, regions)
            await asyncio.get_running_loop().sock_sendall(self._sock, data)
        except OSError as error:
            raise WorkerError(f"the learner is gone: {error}") from error

    async def _send_with_fds(self, data: bytes, regions: Sequence[SharedRegion]) -> bytes:
        """Send descriptors with as much of ``data`` as fits; return the rest of it."""
        while all(region.fd >= 0 for region in regions):
            try:
                return data[socket.send_fds(self._sock, [data], [region.fd for region in regions]) :]
            except BlockingIOError:
                await _writable(self._sock)
        return b""  # the memory was given up while the socket was full: other news of it waits in line

    async def _send_queued(self) -> None:
        while True:
            self._sending = False
            await self._filled.wait()
            self._filled.clear()
            self._sending = True
            while self._answers or self._news:
                if self._answers:
                    sending = self._send(self._answers.popleft())
                else:
                    sending = self._send_now(*self._news.pop(next(iter(self._news))))
                try:
                    await sending
                except WorkerError:
                    return


async def _writable(sock: socket.socket) -> None:
    """Wait until ``sock`` takes more."""
    loop = asyncio.get_running_loop()
    room = asyncio.Event()
    loop.add_writer(sock, room.set)
    try:
        await room.wait()
    finally:
        loop.remove_writer(sock)
