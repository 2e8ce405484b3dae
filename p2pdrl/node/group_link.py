"""One group process and the socket pair to it: start, ask, end. Called by `group_process`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import TypeVar

from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import WireError, WorkerError
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.group_protocol import (
    Broken,
    FromGroup,
    ToGroup,
    decode_from_group,
    frame,
)
from p2pdrl.workers.protocol import FrameBuffer

__all__ = ["GroupLink"]

READ_BYTES = 1 << 16
READY_S = 60.0
"""torch is imported by then, even on a busy machine."""

Answer = TypeVar("Answer", bound=FromGroup)


class GroupLink:
    """A running group process.

    Args:
        process: the child.
        sock: our end of the socket pair, non-blocking.
    """

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket) -> None:
        self._process = process
        self._sock = sock
        self._frames = FrameBuffer()
        self._busy = False

    @classmethod
    async def spawn(cls, region: SharedRegion, size: int, config: LearnerConfig) -> GroupLink:
        """Start a process and wait until it has imported torch.

        Args:
            region: memory of both vectors.
            size: D.
            config: device and threads.

        Raises:
            WorkerError: it can't be started, or wasn't ready in time.
        """
        try:
            ours, theirs = socket.socketpair()
        except OSError as error:
            raise WorkerError(f"can't start the group process: {error}") from error
        ours.setblocking(False)
        arguments = {
            "--fd": theirs.fileno(),
            "--memory": region.fd,
            "--size": size,
            "--device": config.device,
            "--threads": config.threads,
            "--parent": os.getpid(),
        }
        quiet = {"OMP_NUM_THREADS": str(config.threads), "TORCH_NCCL_BLOCKING_WAIT": "1"}
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "p2pdrl.workers.group"),
                *(str(part) for pair in arguments.items() for part in pair),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[theirs.fileno(), region.fd],
                env={"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | quiet,
            )
        except OSError as error:
            ours.close()
            raise WorkerError(f"can't start the group process: {error}") from error
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        link = cls(process, ours)
        try:
            await link._ready()
        except BaseException:
            await link.kill()
            raise
        return link

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def usable(self) -> bool:
        """Whether it lives, as far as known, and waits for orders."""
        return not self._busy and self._process.returncode is None

    async def ask(self, order: ToGroup, kind: type[Answer], deadline_s: float) -> Answer:
        """Give an order and wait for what comes of it.

        The process isn't `usable` any more when this is cancelled, or when it doesn't answer.

        Args:
            order: one that is answered by ``kind``.
            kind: of message.
            deadline_s: seconds.

        Raises:
            WorkerError: it failed, is gone, or doesn't answer.
            WireError: it answers something else: a bug.
        """
        if not self.usable:
            raise WorkerError("the group process is gone, or still at work")
        self._busy = True
        try:
            async with asyncio.timeout(deadline_s):
                await asyncio.get_running_loop().sock_sendall(self._sock, frame(order))
                answer = await self._receive()
        except TimeoutError:
            raise WorkerError(f"the group process didn't answer within {deadline_s:.0f} s") from None
        except OSError as error:
            raise WorkerError(f"the group process is gone: {error}") from error
        self._busy = False
        if isinstance(answer, Broken):
            raise WorkerError(answer.message)
        if not isinstance(answer, kind):
            raise WireError(f"the group process answered {type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def kill(self) -> None:
        """End it at once, even where it is frozen."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)
        await self._process.wait()
        self._sock.close()

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await self._receive()
        except TimeoutError:
            raise WorkerError(f"the group process wasn't ready after {READY_S:.0f} s") from None
        except OSError as error:
            raise WorkerError(f"the group process is gone: {error}") from error

    async def _receive(self) -> FromGroup:
        while True:
            data = await asyncio.get_running_loop().sock_recv(self._sock, READ_BYTES)
            if not data:
                raise WorkerError("the group process is gone")
            for body in self._frames.feed(data):
                return decode_from_group(body)
