"""One learner process: its start, messages both ways, its end. `supervisor` and `learner_pool` restart it.

News (pace, progress, …) are queued, and a later one of the same type replaces an earlier; answers, which the
learner waits for, go out at once whenever the socket takes them, and none is ever replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import NamedTuple

from p2pdrl.clock import LoopClock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import WorkerError
from p2pdrl.node.background import beside
from p2pdrl.node.children.child_process import REAP_S, ChildOutput, HasDescriptor, ProcessLink
from p2pdrl.node.children.hang_watchdog import Standstill, activity_of
from p2pdrl.node.children.restarts import Death
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.workers.pipeline.protocol import Blocks, News, Traced
from p2pdrl.workers.protocol import (
    Alive,
    Attach,
    ChildFailed,
    DataShare,
    DrawnRows,
    DrawRows,
    FromLearner,
    Hello,
    JoinHogwild,
    PostedRequest,
    Prioritize,
    Report,
    RequestAnswer,
    Start,
    ToLearner,
    decode_from_learner,
    frame,
)

__all__ = ["LearnerLink"]

DEFAULT = LearnerConfig()

FromStage = Blocks | Traced | News


def _ignore(_message: object) -> None:
    """Do nothing."""


class _Queued(NamedTuple):
    message: ToLearner
    regions: Sequence[HasDescriptor]
    sent: Callable[[], None]


class LearnerLink(ProcessLink):
    """A running learner process."""

    NAME = "learner"

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        sock: socket.socket,
        output: ChildOutput,
        config: LearnerConfig = DEFAULT,
        stopped: Callable[[int], None] = _ignore,
    ) -> None:
        super().__init__(process, sock, output)
        self._config = config
        self._stopped = stopped
        self._standstill: Standstill | None = None
        self._stood_still: str | None = None
        self._news: dict[type[ToLearner], _Queued] = {}
        self._answers: deque[bytes] = deque()
        self._filled = asyncio.Event()
        self._sending = True
        """Whether another message may be half sent; so it is until `converse`."""

    @classmethod
    async def spawn(
        cls, start: Start, config: LearnerConfig = DEFAULT, stopped: Callable[[int], None] = _ignore
    ) -> LearnerLink:
        """Start a learner process and tell it what to train.

        Raises:
            WorkerError: the process can't be started.
        """
        environment = os.environ | {"OMP_NUM_THREADS": str(start.threads)}
        link = cls(*await cls.launch("p2pdrl.workers.learner", {}, environment), config, stopped)
        try:
            with contextlib.suppress(WorkerError):  # it is gone, as `hello` is about to notice
                await link.send(frame(start))
        except BaseException:
            await link.kill()
            raise
        return link

    @property
    def stopped_s(self) -> float:
        """For how long the process is known to have been stopped."""
        return 0.0 if self._standstill is None else self._standstill.stopped_s

    async def hello(self) -> Hello:
        """Wait until the model is built, however long that takes; a process that stands still is killed.

        Raises:
            ConfigError: the task can't be run as configured.
            WorkerError: the learner died; `ended` tells how.
        """
        async with self._watched():
            while True:
                for message in await self._messages():
                    if isinstance(message, Hello):
                        return message
                    self._fail(message)

    async def ended(self, stood_still: str | None = None, *, timeout_s: float = REAP_S) -> Death:
        """Likewise; a learner that stood still was killed by us."""
        return await super().ended(stood_still or self._stood_still, timeout_s=timeout_s)

    async def attach(self, region: SharedRegion, nbytes: int, *, restore: bool) -> None:
        """Give the learner the board; with ``restore`` it begins from what is there.

        Raises:
            WorkerError: the learner is gone.
        """
        await self.send(frame(Attach(nbytes=nbytes, restore=restore)), [region])

    async def join(self, region: SharedRegion, *, shared_statistics: bool) -> None:
        """Have the learner step the shared vector in ``region`` beside others (Hogwild)."""
        await self.send(frame(JoinHogwild(region.nbytes, shared_statistics)), [region])

    def tell(
        self,
        message: ToLearner,
        regions: Sequence[HasDescriptor] = (),
        sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue news; a later message of the same type replaces one that wasn't sent yet, at the end.

        Descriptors of ``regions`` go along; they stay open until the message is sent or replaced. ``sent`` is
        called once it is with the learner; never, if it is replaced.
        """
        self._news.pop(type(message), None)
        self._news[type(message)] = _Queued(message, regions, sent)
        self._filled.set()

    def withdraw(self, kind: type[ToLearner]) -> None:
        """Drop news of this type that weren't sent yet."""
        self._news.pop(kind, None)

    def answer(self, message: RequestAnswer | DataShare | DrawRows | Prioritize) -> None:
        """Send what the learner waits for, or is to know before, at once if the socket takes it."""
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
        on_posted: Callable[[PostedRequest], None] = _ignore,
        on_stage: Callable[[FromStage], None] = _ignore,
        on_drawn: Callable[[DrawnRows], None] = _ignore,
    ) -> None:
        """Pass on what it says, and send what is queued, until its socket closes.

        Raises:
            ConfigError: the learner says that it can't run as configured.
            WorkerError: the learner says that it failed for good.
        """
        async with self._watched(), beside(self._send_queued(), "learner-sender"):
            while True:
                try:
                    messages = await self._messages()
                except WorkerError:
                    return
                for message in messages:
                    match message:
                        case PostedRequest():
                            on_posted(message)
                        case Report():
                            on_report(message)
                        case DrawnRows():
                            on_drawn(message)
                        case Blocks() | Traced() | News():
                            on_stage(message)
                        case _:
                            self._fail(message)

    def _fail(self, message: FromLearner) -> None:
        """Note the error that the learner dies of; raise one that its successors would die of as well."""
        self.says_its_end(message)
        if isinstance(message, ChildFailed):
            raise WorkerError(message.message)

    def _watched(self) -> AbstractAsyncContextManager[None]:
        """Kill the process when it stands still; its messages must be read meanwhile."""
        return beside(self._kill_if_it_stands_still(), "learner-standstill")

    async def _kill_if_it_stands_still(self) -> None:
        clock = LoopClock()
        watch = self._standstill = Standstill(self._config, clock.monotonic())
        told = False
        while self._stood_still is None:
            await asyncio.sleep(watch.look_s)
            self._stood_still = watch.look(clock.monotonic(), lambda: activity_of(self.pid))
            if watch.stopped_s > 0 and not told:
                self._stopped(self.pid)
            told = watch.stopped_s > 0
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGKILL)

    async def _messages(self) -> list[FromLearner]:
        messages = [decode_from_learner(body) for body in await self.receive()]
        if self._standstill is not None:
            self._standstill.beat()  # any word is a sign of life
        return [message for message in messages if not isinstance(message, Alive)]

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

    async def _tell(self, news: _Queued) -> None:
        await self.send(frame(news.message), news.regions)
        news.sent()
