"""One learner process: start, talk, notice its end.

Called by `supervisor` and `crew`, which decide when to start another one. News (pace, progress, …) wait in
line, where a later one of the same kind replaces an earlier; answers, which a learner stands still for, go
out at once whenever the socket takes them, and none is ever replaced.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from p2pdrl.errors import ConfigError, WorkerError
from p2pdrl.node.children.output import ChildOutput
from p2pdrl.node.children.process_link import HasDescriptor, ProcessLink
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.protocol import (
    Answer,
    Attach,
    Failed,
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
from p2pdrl.workers.stage_protocol import Blocks, News, Traced

__all__ = ["LearnerLink"]

BUILD_DEADLINE_S = 120.0


FromStage = Blocks | Traced | News


def _unheard(_message: object) -> None:
    """Nobody wants to know."""


class _InLine(NamedTuple):
    """What waits in line."""

    message: ToLearner
    things: Sequence[HasDescriptor]
    sent: Callable[[], None]


class LearnerLink(ProcessLink):
    """A running learner process.

    Args:
        process: the child.
        sock: our end of the socket pair, non-blocking.
        output: what it prints.
    """

    NAME = "learner"

    def __init__(self, process: asyncio.subprocess.Process, sock: socket.socket, output: ChildOutput) -> None:
        super().__init__(process, sock, output)
        self._news: dict[type[ToLearner], _InLine] = {}
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
        environment = os.environ | {"OMP_NUM_THREADS": str(start.threads)}
        link = cls(*await cls.launch("p2pdrl.workers.learner", {}, environment))
        try:
            await link.send(frame(start))
        except BaseException:
            await link.kill()
            raise
        return link

    async def hello(self) -> Hello:
        """Wait until the model is built.

        Raises:
            ConfigError: the task can't be run as configured.
            WorkerError: the learner died, or took longer than two minutes.
        """
        try:
            async with asyncio.timeout(BUILD_DEADLINE_S):
                while True:
                    for message in await self._messages():
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
        await self.send(frame(Attach(nbytes=nbytes, restore=restore)), [region])

    async def join(self, region: SharedRegion) -> None:
        """Let the learner help another one, whose parameters lie in ``region``.

        Raises:
            WorkerError: the learner is gone.
        """
        await self.send(frame(Join(nbytes=region.nbytes)), [region])

    def tell(
        self,
        message: ToLearner,
        things: Sequence[HasDescriptor] = (),
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue news; a later message of the same type replaces one that wasn't sent yet, at the end.

        Args:
            message: any but an answer.
            things: their descriptors go along; they stay open until this is sent or replaced.
            sent: called once the message and its descriptors are with the learner; never, if it is replaced.
        """
        self._news.pop(type(message), None)
        self._news[type(message)] = _InLine(message, things, sent)
        self._filled.set()

    def withdraw(self, kind: type[ToLearner]) -> None:
        """Leave unsaid what of this type wasn't sent yet."""
        self._news.pop(kind, None)

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
        self,
        on_report: Callable[[Report], None],
        on_posted: Callable[[Posted], None] = _unheard,
        on_stage: Callable[[FromStage], None] = _unheard,
    ) -> None:
        """Pass reports, posts and news of stages on, and send what is queued, until its socket closes.

        Raises:
            ConfigError: the learner says that it can't run as configured.
            WorkerError: the learner says that it failed for good.
        """
        sender = asyncio.create_task(self._send_queued(), name="learner-sender")
        try:
            while True:
                try:
                    messages = await self._messages()
                except WorkerError:
                    return
                for message in messages:
                    match message:
                        case Posted():
                            on_posted(message)
                        case Report():
                            on_report(message)
                        case Blocks() | Traced() | News():
                            on_stage(message)
                        case Failed():
                            raise (ConfigError if message.usage else WorkerError)(message.message)
        finally:
            sender.cancel()
            await asyncio.wait([sender])
            if not sender.cancelled():
                sender.result()

    async def _messages(self) -> list[FromLearner]:
        return [decode_from_learner(body) for body in await self.receive()]

    async def _send_queued(self) -> None:
        while True:
            self._sending = False
            await self._filled.wait()
            self._filled.clear()
            self._sending = True
            while self._answers or self._news:
                if self._answers:
                    sending = self.send(self._answers.popleft())
                else:
                    sending = self._tell(self._news.pop(next(iter(self._news))))
                try:
                    await sending
                except WorkerError:
                    return

    async def _tell(self, news: _InLine) -> None:
        await self.send(frame(news.message), news.things)
        news.sent()
