"""One further learner process of this node, that steps the vector of the first one (Hogwild).

`crew` keeps as many of them as the regime wants. A helper that dies is started again after a while; what it
had reported stays counted. It has no board, so nothing else of it is lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError, WorkerError
from p2pdrl.node.children.deaths import Death, Deaths
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.node.events import EventLog
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.protocol import Others, Pace, Progress, Report, Start, Stop

__all__ = ["Helper"]

News = Pace | Progress | Others


class Helper:
    """A helper, through all its restarts.

    Args:
        start: what it is told first; its seed is its own.
        region: the `SharedVector` that it steps.
        spec: the first learner's layout.
        config: restart options.
        clock: time.
        events: where its deaths are told.
        on_report: called with each report and the one before it of the same process.
        on_end: called with the last report of a process that has ended, if there was one.
    """

    def __init__(
        self,
        *,
        start: Start,
        region: SharedRegion,
        spec: BoardSpec,
        config: LearnerConfig,
        clock: Clock,
        events: EventLog,
        on_report: Callable[[Report, Report | None], None],
        on_end: Callable[[Report], None],
    ) -> None:
        self._start = start
        self._region = region
        self._spec = spec
        self._config = config
        self._clock = clock
        self._events = events
        self._on_report = on_report
        self._on_end = on_end
        self._link: LearnerLink | None = None
        self.told: dict[type[News], News] = {}
        """What each process is told, by the kind of message."""
        self._conversing = False
        self._began_s = float("inf")
        self._stopping = False
        self.last: Report | None = None
        """The present process' last report."""
        self.restarts = -1

    @property
    def pid(self) -> int | None:
        """Process id; None while there is none."""
        return None if self._link is None else self._link.pid

    def tell(self, message: News) -> None:
        """Send a message to the helper, and to each that replaces it."""
        self.told[type(message)] = message
        if self._conversing and self._link is not None:
            self._link.tell(message)

    def stop(self) -> bool:
        """Ask it to end; False when nobody is there who could hear that: cancel `run` then."""
        self._stopping = True
        if self._conversing and self._link is not None:
            self._link.tell(Stop())
        return self._conversing

    async def run(self) -> None:
        """Keep it running until it is stopped.

        Raises:
            WorkerError: it died of the same so often that another try is in vain.
        """
        deaths = Deaths(self._config)
        while True:
            self._began_s = float("inf")
            error = None
            try:
                death = await self._live()
            except (WorkerError, ConfigError, LayoutMismatchError) as problem:
                deaths.failed()
                how = f"can't work: {problem}"
            else:
                deaths.add(death, max(0.0, self._clock.monotonic() - self._began_s))
                how, error = death.how, death.document
            if self._stopping:
                return
            in_vain = deaths.in_vain
            then = f"; next try in {deaths.rest_s:g} s" if in_vain is None else ""
            self._events.emit(
                "helper-died", f"helper of the learner {how}{then}", level="warning", error=error
            )
            if in_vain is not None:
                raise WorkerError(f"a helper: {in_vain}")
            await asyncio.sleep(deaths.rest_s)

    async def _live(self) -> Death:
        """Live one life; return how it ended.

        Raises:
            WorkerError: it can't be started.
            ConfigError: it can't run as configured.
            LayoutMismatchError: it has another layout than the first learner.
        """
        link = self._link = await LearnerLink.spawn(self._start, self._config)
        try:
            hello = await link.hello()
            if BoardSpec.from_wire(msgspec.msgpack.decode(hello.spec)) != self._spec:
                raise LayoutMismatchError("it has another layout than the first learner")
            await link.join(self._region)
            for message in self.told.values():
                link.tell(message)
            self._conversing = True
            self._began_s = self._clock.monotonic()
            self.restarts += 1
            await link.converse(self._report)
            if self._stopping:
                await link.kill()
            return await link.ended()
        except WorkerError:
            return await link.ended()
        finally:
            self._conversing = False
            self._link = None
            await link.kill()
            if self.last is not None:
                self._on_end(self.last)
                self.last = None

    def _report(self, report: Report) -> None:
        before, self.last = self.last, report
        self._on_report(report, before)
