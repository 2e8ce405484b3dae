"""Keeps one learner running: builds the board once, restarts a learner that died from it.

The board lives in the daemon's memory, so a learner killed −9 loses at most the update it was
in: its successor takes parameters, optimizer state and untaken deltas off the board.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.regime import Regime
from p2pdrl.errors import ConfigError, LayoutMismatchError, P2PDRLError, TensorError, WorkerError
from p2pdrl.node.children.hanging import HangWatch, kill_if_it_hangs
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.node.children.stage_port import StagePort
from p2pdrl.node.children.workplace import Workplace
from p2pdrl.node.events import EventLog
from p2pdrl.strategies.protocol import AnswerKind, Post
from p2pdrl.telemetry.rate import RateMeter
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.workers.protocol import Hello, Others, Pace, Progress, Report, Start, Stop

__all__ = ["LearnerSupervisor", "LearnerTotals"]

LONG_LIFE_S = 60.0
END_TIMEOUT_S = 3.0
REAP_TIMEOUT_S = 1.0
INLINE_BYTES = 1 << 20
"""Longer vectors are copied in a thread."""


class LearnerTotals(msgspec.Struct):
    """What all learners of this boot did, together."""

    updates: int = 0
    env_steps: int = 0
    episodes: int = 0


class LearnerSupervisor:
    """The learner process of this node, through all its restarts.

    Args:
        start: what each learner is told first.
        config: restart and pace options.
        window: episodes that the mean return is taken over.
        clock: time.
        events: where starts and deaths are told.
        on_report: called after each report, with the number of new updates.
    """

    def __init__(
        self,
        *,
        start: Start,
        config: LearnerConfig,
        window: int,
        clock: Clock,
        events: EventLog,
        on_report: Callable[[Report, int], None],
    ) -> None:
        self._start = start
        self._config = config
        self._clock = clock
        self._events = events
        self._on_report = on_report
        self._link: LearnerLink | None = None
        self._region: SharedRegion | None = None
        self.workplace = Workplace()
        """How the learner works now."""
        self.stages = StagePort(lambda: self._link if self._down_since_s is None else None)
        """The learner as a rank of a pipeline."""
        self.told: dict[type[Pace | Progress | Others], Pace | Progress | Others] = {}
        """What each learner is told, by the kind of message."""
        self._before = LearnerTotals()
        self._task: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[bool] | None = None
        self._stopping = asyncio.Event()
        self.failures = 0
        """Deaths of the learner without a minute of life between."""
        self._down_since_s: float | None = None
        self.spec: BoardSpec | None = None
        self.board: DaemonBoard | None = None
        self.totals = LearnerTotals()
        self.returns: deque[float] = deque(maxlen=window)
        self.metrics: dict[str, float] = {}
        self.moments: dict[str, bytes] = {}
        self.device = ""
        self.restarts = 0
        self.speed = RateMeter(10.0)
        """Environment steps a second."""
        self.reported_s: float | None = None
        """Monotonic time of the last report."""

    @property
    def pid(self) -> int | None:
        """Process id of the learner; None while there is none."""
        return None if self._link is None else self._link.pid

    @property
    def down_s(self) -> float | None:
        """Seconds since the learner died; None while one runs or is being built for the first time."""
        since_s = self._down_since_s
        return None if since_s is None else self._clock.monotonic() - since_s

    async def build(self) -> DaemonBoard:
        """Start the first learner and wait until its model is built; return the board made for it.

        Raises:
            ConfigError: the task can't be run as configured.
            WorkerError: the learner died while building.
        """
        self._link = await LearnerLink.spawn(self._start)
        self._down_since_s = None
        hello = await self._link.hello()
        spec = _spec(hello)
        self.device = hello.device
        self.spec = spec
        self._region = SharedRegion.create(spec.nbytes, "board")
        self.board = DaemonBoard(self._region, spec)
        return self.board

    async def begin(self, *, restore: bool) -> None:
        """Let the learner go; with ``restore`` it takes what is on the board.

        Raises:
            WorkerError: it died meanwhile.
        """
        await self._attach(restore=restore)
        self._task = asyncio.create_task(self._supervise(), name="learner-supervisor")

    async def watch(self) -> None:
        """Wait until the learner is stopped for good.

        Raises:
            ConfigError: a running one says that it can't go on as configured.
            WorkerError: it says that it failed for good.
        """
        if self._task is not None:
            await asyncio.shield(self._task)

    def tell(self, message: Pace | Progress | Others) -> None:
        """Send a message to the learner, and to each that replaces it."""
        self.told[type(message)] = message
        if self._link is not None:
            self._link.tell(message)

    def work(self, regime: Regime, epoch: int) -> None:
        """Let the learner, and each that replaces it, work by another regime; what it posted is void.

        Raises:
            TensorError: the system gives no shared memory for it.
            WorkerError: the learner isn't built yet.
        """
        if self.spec is None:
            raise WorkerError("the learner isn't built yet")
        self.stages.close()
        order, regions = self.workplace.arrange(regime, epoch, self.spec.layout.size)
        if self._link is not None:
            self._link.tell(order, regions)

    def answer(
        self, post: Post, kind: AnswerKind, learning_rate: float | None = None, *, end_update: bool = False
    ) -> None:
        """Let the learner go on; an answer to a post that is void is passed over."""
        content = 0
        if kind == "set" and self.board is not None:
            self._flush()
            content = self.board.content_id
        message = self.workplace.answered(post, kind, content, learning_rate, end_update=end_update)
        if message is not None and self._link is not None:
            self._link.answer(message)

    def set_window(self, window: int) -> None:
        """Take the mean return over the last ``window`` episodes from now on; the newest known stay."""
        if window != self.returns.maxlen:
            self.returns = deque(self.returns, maxlen=window)

    async def stop(self) -> None:
        """End the learner, once its last report is read; its last state stays on the board.

        Calling it again does nothing. A bug of ours that shows here is raised; what ended the
        supervision before is left to `watch`.
        """
        self._stopping.set()
        task, link = self._task, self._link
        if task is None:
            self._link = None
            if link is not None:
                await link.kill()  # it was never let go, so there is nothing to report
            return
        if task.done():
            await self._flushed()
            return
        if self._down_since_s is not None:
            task.cancel()  # a successor that is still being built has nothing to report
        elif link is not None:
            link.tell(Stop())
        _, late = await asyncio.wait([task], timeout=END_TIMEOUT_S)
        if late:
            task.cancel()
            await asyncio.wait([task])
        await self._flushed()
        error = None if task.cancelled() else task.exception()
        if error is not None and not isinstance(error, P2PDRLError):
            raise error

    def close(self) -> None:
        """Free the board and the regime's memory. Nobody may use them afterwards."""
        self.board = None
        self.workplace.close()
        if self._region is not None:
            self._region.close()
            self._region = None

    def _flush(self) -> None:
        """Move what waits for room on the board there, if there is room by now."""
        board, spec = self.board, self.spec
        if board is None or spec is None or not board.pending:
            return
        if 4 * spec.layout.size <= INLINE_BYTES:
            board.flush()
        elif self._flushing is None or self._flushing.done():
            self._flushing = asyncio.create_task(asyncio.to_thread(board.flush), name="board-flush")

    async def _flushed(self) -> None:
        """Wait for the thread that may be at work on the board."""
        if self._flushing is not None:
            await self._flushing

    async def _attach(self, *, restore: bool) -> None:
        if self._link is None or self._region is None or self.spec is None:
            raise WorkerError("the learner isn't built yet")
        await self._link.attach(self._region, self.spec.nbytes, restore=restore)
        order, regions = self.workplace.renew(self.spec.layout.size)
        self._link.tell(order, regions)
        for message in self.told.values():
            self._link.tell(message)

    async def _supervise(self) -> None:
        try:
            await self._keep_one_running()
        finally:
            link, self._link = self._link, None
            self.stages.died("its learner was stopped")
            if link is not None:
                await link.kill()

    async def _keep_one_running(self) -> None:
        while not self._stopping.is_set():
            link = self._link
            if link is not None:
                began_s = self._clock.monotonic()
                watch = HangWatch(self.stages, self._clock)
                killing = kill_if_it_hangs(link.pid, watch, self._events)
                hangs = asyncio.create_task(killing, name="learner-hangs")
                try:
                    noting = watch.noting
                    await link.converse(
                        noting(self.reported), noting(self.workplace.posted), noting(self.stages.heard)
                    )
                finally:
                    hangs.cancel()
                    await asyncio.wait([hangs])
                code = await link.reap(REAP_TIMEOUT_S)
                self._link = None
                self.stages.died("its learner died")
                if self._stopping.is_set():
                    return
                self._down_since_s = self._clock.monotonic()
                self._died(code, self._down_since_s - began_s)
            if await self._stopped_within(self.rest_s):
                return
            try:
                await self._restart()
            except (WorkerError, ConfigError, TensorError) as error:
                # The first one was built from the same task, so it is this machine that changed.
                self.failures += 1
                self._events.emit(
                    "learner-failed",
                    f"learner couldn't be restarted: {error}; next try in {self.rest_s:g} s",
                    level="warning",
                )

    def _died(self, code: int, lived_s: float) -> None:
        self.failures = 0 if lived_s >= LONG_LIFE_S else self.failures + 1
        self._before = LearnerTotals(self.totals.updates, self.totals.env_steps, self.totals.episodes)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with code {code}"
        self._events.emit(
            "learner-died", f"learner {how}; it is started again from the board", code=code, lived_s=lived_s
        )

    async def _stopped_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._stopping.wait()
        except TimeoutError:
            return False
        return True

    @property
    def rest_s(self) -> float:
        """Seconds from a death to the next start; they double with each in a row."""
        doublings = min(max(self.failures - 1, 0), 16)
        return min(self._config.restart_min_s * 2.0**doublings, self._config.restart_max_s)

    async def _restart(self) -> None:
        link = await LearnerLink.spawn(self._start)
        self._link = link
        try:
            await self._resume(await link.hello())
        except BaseException:
            self._link = None
            await link.kill()
            raise
        self._down_since_s = None
        self.restarts += 1
        self._events.emit("learner-restarted", "learner runs again", pid=link.pid, restarts=self.restarts)

    async def _resume(self, hello: Hello) -> None:
        if self.spec is None or self.board is None or _spec(hello) != self.spec:
            raise LayoutMismatchError("a restarted learner has another layout than its predecessor")
        await self._attach(restore=self.board.published_once)

    def reported(self, report: Report) -> None:
        """Count what the learner says that it did."""
        new = report.updates + self._before.updates - self.totals.updates
        now_s = self._clock.monotonic()
        self.speed.add(report.env_steps + self._before.env_steps - self.totals.env_steps, now_s)
        self.totals = LearnerTotals(
            self._before.updates + report.updates,
            self._before.env_steps + report.env_steps,
            self._before.episodes + report.episodes,
        )
        self.returns.extend(report.returns)
        self.metrics = report.metrics
        if report.moments:
            self.moments = report.moments
        self.reported_s = now_s
        self._flush()  # it has published, so there may be room for what was posted meanwhile
        self._on_report(report, new)


def _spec(hello: Hello) -> BoardSpec:
    return BoardSpec.from_wire(msgspec.msgpack.decode(hello.spec))
