"""One group process: start, ask, end. Called by `group_process`."""

from __future__ import annotations

import asyncio
import os
import socket
from typing import TypeVar

from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import WireError, WorkerError
from p2pdrl.node.children.output import ChildOutput
from p2pdrl.node.children.process_link import ProcessLink
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.group_protocol import (
    Broken,
    FromGroup,
    ToGroup,
    decode_from_group,
    frame,
)

__all__ = ["GroupLink"]

READY_S = 60.0
"""torch is imported by then, even on a busy machine."""

Answer = TypeVar("Answer", bound=FromGroup)


class GroupLink(ProcessLink):
    """A running group process.

    Args:
        process: the child.
        sock: our end of the socket pair, non-blocking.
        output: what it prints.
    """

    NAME = "group process"

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, output: ChildOutput) -> None:
        super().__init__(process, sock, output)
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
        options = {
            "--memory": region.fd,
            "--size": size,
            "--device": config.device,
            "--threads": config.threads,
        }
        quiet = {"OMP_NUM_THREADS": str(config.threads), "TORCH_NCCL_BLOCKING_WAIT": "1"}
        environment = {"TORCH_CPP_LOG_LEVEL": "ERROR"} | os.environ | quiet
        link = cls(*await cls.launch("p2pdrl.workers.group", options, environment, [region.fd]))
        try:
            await link._ready()
        except BaseException:
            await link.kill()
            raise
        return link

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
                await self.send(frame(order))
                answer = await self._message()
        except TimeoutError:
            raise WorkerError(f"the group process didn't answer within {deadline_s:.0f} s") from None
        self._busy = False
        if isinstance(answer, Broken):
            raise WorkerError(answer.message)
        if not isinstance(answer, kind):
            raise WireError(f"the group process answered {type(answer).__name__} instead of {kind.__name__}")
        return answer

    async def _ready(self) -> None:
        try:
            async with asyncio.timeout(READY_S):
                await self._message()
        except TimeoutError:
            raise WorkerError(f"the group process wasn't ready after {READY_S:.0f} s") from None

    async def _message(self) -> FromGroup:
        while True:
            for body in await self.receive():
                return decode_from_group(body)
