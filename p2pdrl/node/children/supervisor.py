"""Keeps one learner running, and carries its requests to the strategy and the answers back.

The board lives in the daemon's memory, so a learner killed −9 loses at most the update it was in: its
successor takes parameters, optimizer state and untaken deltas off the board.

An update's way: `learner_link` reads the learner's message; `LearnerSupervisor.reported` counts it;
`LearnerRequestChannel.posted` makes a `LearnerRequest` of what waits for an answer; the strategy takes it
from its `LearnerPort`, and answers there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.learner_mode import FREE, LearnerMode
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.task import AlgorithmConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError, P2PDRLError, TensorError, WorkerError
from p2pdrl.node.accounting.counters import ZERO, Counts
from p2pdrl.node.background import beside, set_within
from p2pdrl.node.children.actors import ActorPool
from p2pdrl.node.children.child_process import REAP_S
from p2pdrl.node.children.draws import DrawPort
from p2pdrl.node.children.hang_watchdog import HangWatchdog, kill_if_it_hangs
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.node.children.restarts import Death, RestartPolicy, advice
from p2pdrl.node.children.stage_port import StagePort
from p2pdrl.node.events import EventLog
from p2pdrl.node.experience.sampler import ReplaySampler
from p2pdrl.node.state.replay_store import ReplayStore
from p2pdrl.strategies.protocol import AnswerKind, LearnerRequest
from p2pdrl.telemetry.rate import RateMeter
from p2pdrl.tensors.board import BoardSpec, DaemonBoard
from p2pdrl.tensors.shared_memory import GradientRing, SharedRegion, SharedVector
from p2pdrl.tensors.sidecar import SidecarLayout
from p2pdrl.tensors.unroll_ring import UnrollSpec
from p2pdrl.workers.protocol import (
    DataShare,
    Hello,
    PostedRequest,
    ReplayRows,
    Report,
    RequestAnswer,
    Start,
    Stop,
    TrainingNews,
    WorkMode,
)

__all__ = ["LearnerPort", "LearnerRequestChannel", "LearnerSupervisor"]

NO_SIDECAR = SidecarLayout()


class LearnerRequestChannel:
    """The learner mode in force, its shared memory, and the learner's requests under it.

    Each process gets the learner mode anew, with a ring of its own, so that nothing which still writes into a
    slot of a dead learner's can spoil a gradient of its successor's. Requests are numbered from one again
    with each process and whenever the learner went on alone: synchronous strategies see by it that this
    one's state isn't what they think. An answer names the request itself, so it never meets another one of
    the same number.
    """

    def __init__(self) -> None:
        self.learner_mode: LearnerMode = FREE
        self.epoch = 0
        self._ring: GradientRing | None = None
        self._ring_region: SharedRegion | None = None
        self._shared_region: SharedRegion | None = None
        self._number = 0
        self._posted = 0
        """Number, as the learner counts, of its last request in this learner mode; 0 for none."""
        self._requests: asyncio.Queue[LearnerRequest] = asyncio.Queue()
        self._open: dict[int, tuple[LearnerRequest, int]] = {}
        """By our numbers: the requests, and the numbers that the learner gave."""

    @property
    def shared(self) -> SharedRegion | None:
        """The vector that several learners step, where the learner mode wants one."""
        return self._shared_region

    def arrange(
        self, learner_mode: LearnerMode, epoch: int, size: int, sidecar: SidecarLayout = NO_SIDECAR
    ) -> tuple[WorkMode, Sequence[SharedRegion]]:
        """Put another learner mode into force; requests made before are void.

        Args:
            sidecar: of the learner, whose optimizers' state learners may share.

        Returns:
            The message to the learner, and the regions whose descriptors go along.

        Raises:
            TensorError: the system gives no shared memory; the old learner mode is over all the same.
        """
        self.learner_mode, self.epoch = learner_mode, epoch
        self._close_shared()
        if learner_mode.learners > 1:
            statistics = sidecar.under("optimizer") if learner_mode.shared_statistics else NO_SIDECAR
            self._shared_region = SharedRegion.create(SharedVector.nbytes_of(size, statistics), "hogwild")
        return self.renew(size)

    def renew(self, size: int) -> tuple[WorkMode, Sequence[SharedRegion]]:
        """The same for the learner mode in force: the learner gets a new ring of its own."""
        self._open.clear()
        self._number = self._posted = 0
        while not self._requests.empty():
            self._requests.get_nowait()
        self._close_ring()
        slots = self.learner_mode.slots
        if slots:
            self._ring_region = SharedRegion.create(GradientRing.nbytes_of(slots, size), "gradients")
            self._ring = GradientRing(self._ring_region, slots, size)
        regions = [region for region in (self._ring_region, self._shared_region) if region is not None]
        ring_nbytes, shared_nbytes = (
            0 if region is None else region.nbytes for region in (self._ring_region, self._shared_region)
        )
        return WorkMode(self.learner_mode, self.epoch, ring_nbytes, shared_nbytes), regions

    def posted(self, posted: PostedRequest) -> None:
        """Queue the learner's request; one of an earlier learner mode is dropped.

        Raises:
            TensorError: it names a slot that there isn't.
        """
        # An epoch has two modes where its strategy couldn't be started: then its learner trains alone.
        if posted.epoch != self.epoch or posted.kind != self.learner_mode.sends:
            return
        self._posted = posted.number
        vector = None
        if posted.kind == "gradients":
            if self._ring is None:
                raise TensorError("the learner posted a gradient, and there is no ring")
            vector = self._ring.slot(posted.slot)
        self._number = 1 if posted.alone else self._number + 1
        request = LearnerRequest(
            self._number, posted.kind, posted.policy_version, posted.samples, vector, posted.left
        )
        self._open[request.number] = request, posted.number
        self._requests.put_nowait(request)

    def preempt(self) -> None:
        """Have the learner end the unroll that it collects for its next request.

        It has to have posted one in this learner mode, since only then its next one's number is known here.
        """
        if self._ring is not None and not self._open and self._posted:
            self._ring.preempted = self._posted + 1

    async def next_request(self) -> LearnerRequest:
        """Wait for the next request; cancelling loses none."""
        return await self._requests.get()

    def answered(
        self,
        request: LearnerRequest,
        kind: AnswerKind,
        content: int,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> RequestAnswer | None:
        """Return the message that answers a request; None when nobody waits for it any more."""
        waiting, theirs = self._open.get(request.number, (None, 0))
        if waiting is not request:
            return None
        del self._open[request.number]
        return RequestAnswer(theirs, self.epoch, kind, content, learning_rate, end_update)

    def close(self) -> None:
        """Free the memory."""
        self._close_ring()
        self._close_shared()

    def _close_ring(self) -> None:
        self._ring = None
        if self._ring_region is not None:
            self._ring_region.close()
            self._ring_region = None

    def _close_shared(self) -> None:
        if self._shared_region is not None:
            self._shared_region.close()
            self._shared_region = None


END_TIMEOUT_S = 3.0
LEAVE_S = 1.0
"""In which a process that was asked to end and has hung up is to be gone."""
STARTING_TOLD_S = 15.0
"""After so long it is told that a learner is still being built, and again after twice as long each time …"""
STARTING_TOLD_MOST_S = 600.0
"""… but at least so often."""
INLINE_BYTES = 1 << 20
"""Longer vectors are copied in a thread."""


class _CantStartError(P2PDRLError):
    """The system starts no process now."""


class LearnerSupervisor:
    """The learner process of this node, through all its restarts.

    Args:
        window: episodes that the mean return is taken over.
        on_report: called after each report, with the number of new updates.
        actors: act for the learner; None where it does so itself.
        replay: where a replay memory's rows lie; None gives them memory that ends with the daemon.
        sampler: brings rows of a replay memory elsewhere; None where there is none.
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
        actors: ActorPool | None = None,
        replay: ReplayStore | None = None,
        sampler: ReplaySampler | None = None,
    ) -> None:
        self._sampler = sampler
        self._start = start
        self._config = config
        self._clock = clock
        self._events = events
        self._on_report = on_report
        self._actors = actors
        self._replay = replay if replay is not None else ReplayStore(None)
        self._replay_nbytes = 0
        self._link: LearnerLink | None = None
        self._region: SharedRegion | None = None
        self.requests = LearnerRequestChannel()
        """The learner mode in force, and what the learner asks under it."""
        self.draws = DrawPort(lambda: self._link if self._down_since_s is None else None)
        """The process as a shard of the replay memory."""
        self.stages = StagePort(lambda: self._link if self._down_since_s is None else None)
        """The learner as a rank of a pipeline."""
        self.told: dict[type[TrainingNews], TrainingNews] = {}
        """The newest message of each kind, for each learner that replaces this one."""
        self._answered: DataShare | None = None
        """The last share that went out before an answer."""
        self._before = ZERO
        """What the learners before the present one did."""
        self._task: asyncio.Task[None] | None = None
        self._flushing: asyncio.Task[bool] | None = None
        self._stopping = asyncio.Event()
        self._begun = asyncio.Event()
        self.restart_policy = RestartPolicy(config)
        self._starting_since_s: float | None = None
        self._down_since_s: float | None = None
        self.spec: BoardSpec | None = None
        self.board: DaemonBoard | None = None
        self.totals = ZERO
        self.returns: deque[float] = deque(maxlen=window)
        self.metrics: dict[str, float] = {}
        self.moments: dict[str, bytes] = {}
        self.device = ""
        self.spaces: dict[str, str] = {}
        """What observations and actions are, in words."""
        self.restarts = 0
        self.speed = RateMeter(10.0)
        """Environment steps a second."""
        self.busy_steps_per_s = 0.0
        """Those without the time in which the learner waited for others; 0 while that isn't known."""
        self.reported_s: float | None = None
        """Monotonic time of the last report."""
        self.loan = 0
        """Number of the `LendActors` that the learner has last said it follows."""

    @property
    def pid(self) -> int | None:
        """Process id of the learner; None while there is none."""
        return None if self._link is None else self._link.pid

    @property
    def down_s(self) -> float | None:
        """Seconds since the learner died; None while one runs or is being built for the first time."""
        since_s = self._down_since_s
        return None if since_s is None else self._clock.monotonic() - since_s

    @property
    def failures(self) -> int:
        """Deaths of the learner without a minute of life between."""
        return self.restart_policy.in_a_row

    @property
    def starting_s(self) -> float | None:
        """Seconds since a learner was started that is still being built; None while there is none."""
        since_s = self._starting_since_s
        return None if since_s is None else self._clock.monotonic() - since_s

    @property
    def stopped_s(self) -> float:
        """For how long the learner's process is known to have been stopped."""
        return 0.0 if self._link is None else self._link.stopped_s

    async def build(self) -> DaemonBoard:
        """Start the first learner and wait until its model is built; return the board made for it.

        That takes as long as it takes. A process that was killed meanwhile, or stood still, is replaced.

        Raises:
            ConfigError: the task can't be run as configured.
            WorkerError: the learner can't be started, or ended by itself while it was built.
        """
        while (hello := await self._first_hello()) is None:  # noqa: ASYNC110
            await asyncio.sleep(self.restart_policy.backoff_s)
        spec = _spec(hello)
        self.device, self.spaces = hello.device, hello.spaces
        board = self.open(spec)
        self._open_experience(hello, spec)
        await self._open_replay(hello)
        return board

    def _open_experience(self, hello: Hello, spec: BoardSpec) -> None:
        if self._sampler is not None:
            self._sampler.open(hello, spec)
            return
        if self._actors is not None:
            self._actors.open(_unrolls(hello), spec)
        if self._start.replay == "shard":
            self.draws.open(_samples(hello), hello.replay_places)

    async def _open_replay(self, hello: Hello) -> None:
        if hello.replay_nbytes and not self._replay_nbytes:
            await asyncio.to_thread(self._replay.region, hello.replay_nbytes)
            self._replay_nbytes = hello.replay_nbytes

    def open(self, spec: BoardSpec) -> DaemonBoard:
        """Make the board; where no learner is to run here, that is all that is needed.

        Raises:
            TensorError: the system gives no such memory.
        """
        self.spec = spec
        self._region = SharedRegion.create(spec.nbytes, "board")
        self.board = DaemonBoard(self._region, spec)
        return self.board

    async def _first_hello(self) -> Hello | None:
        link = self._link = await self._spawn()
        try:
            return await self._hello(link)
        except WorkerError as error:
            death = await link.ended()
            self._link = None
            self._died(death, 0.0)
            if death.cause is not None:
                raise WorkerError(f"the learner {death.how}, while it was built. {advice(death)}") from error
        return None

    async def _spawn(self) -> LearnerLink:
        return await LearnerLink.spawn(self._start, self._config, self._found_stopped)

    async def _hello(self, link: LearnerLink) -> Hello:
        """Wait until a learner is built, and tell now and then that it isn't yet."""
        self._starting_since_s = self._clock.monotonic()
        try:
            async with beside(self._tell_starting(link.pid), "learner-starting"):
                return await link.hello()
        finally:
            self._starting_since_s = None

    async def _tell_starting(self, pid: int) -> None:
        rest_s = STARTING_TOLD_S
        while True:
            await asyncio.sleep(rest_s)
            rest_s = min(2 * rest_s, STARTING_TOLD_MOST_S)
            text = (
                f"learner is starting for {self.starting_s or 0.0:.0f} s: its process lives, and is waited "
                "for; a busy machine or a slow disk makes it take long"
            )
            self._events.emit("learner-starting", text, level="warning", pid=pid)

    def _found_stopped(self, pid: int) -> None:
        deadline_s = self._config.stopped_deadline_s
        then = (
            f"is replaced after {deadline_s:g} s (node.learner.stopped_deadline_s)"
            if deadline_s
            else "is waited for"
        )
        text = f"the learner's process is stopped (SIGSTOP); it {then} unless it goes on: kill -CONT {pid}"
        self._events.emit("learner-stopped", text, level="warning", pid=pid)

    async def begin(self, *, restore: bool) -> None:
        """Let the learner begin, or the next one, if it died; with ``restore`` from what is on the board."""
        if self._link is None or self.spec is None:
            raise WorkerError("the learner isn't built yet")
        with contextlib.suppress(WorkerError):
            await self._attach(restore=restore)
        self._supervised()

    def wake(self, start: Start | None = None, sampler: ReplaySampler | None = None) -> None:
        """Run a learner from now on where there was none: it goes on from what is on the board.

        Args:
            start: what it is told first, where that isn't what it was to be.
            sampler: brings it rows of a replay memory elsewhere.
        """
        if start is not None:
            self._start, self._sampler = start, sampler
        if self._task is None:
            self._supervised()

    def _supervised(self) -> None:
        self._task = asyncio.create_task(self._supervise(), name="learner-supervisor")
        self._begun.set()

    async def watch(self) -> None:
        """Wait until the learner, once there is one, is stopped for good.

        Raises:
            ConfigError: a running one says that it can't go on as configured.
            WorkerError: it says that it failed for good.
        """
        await self._begun.wait()
        if self._task is not None:
            await asyncio.shield(self._task)

    def tell(self, message: TrainingNews) -> None:
        """Send a message to the learner, unless it was the last of its kind, and to each that replaces it."""
        news = self.told.get(type(message)) != message
        self.told[type(message)] = message
        if news and self._link is not None:
            self._link.tell(message)

    def work(self, learner_mode: LearnerMode, epoch: int) -> None:
        """Have the learner, and each that replaces it, work by another learner mode; old requests are void.

        Raises:
            TensorError: the system gives no shared memory for it.
            WorkerError: the learner isn't built yet.
        """
        if self.spec is None:
            raise WorkerError("the learner isn't built yet")
        self.stages.close()
        spec = self.spec
        order, regions = self.requests.arrange(learner_mode, epoch, spec.layout.size, spec.sidecar)
        if self._link is not None:
            self._link.tell(order, regions)

    def answer(
        self,
        request: LearnerRequest,
        kind: AnswerKind,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Answer the learner's request; one that is void is passed over."""
        content = 0
        if kind == "set" and self.board is not None:
            self._flush()
            content = self.board.content_id
        message = self.requests.answered(request, kind, content, learning_rate, end_update=end_update)
        if message is not None and self._link is not None:
            share = self.told.get(DataShare)
            if isinstance(share, DataShare) and share != self._answered:
                self._link.answer(share)  # news come later than answers: the next gradient is to know it
                self._answered = share
            self._link.answer(message)

    def set_window(self, window: int) -> None:
        """Take the mean return over the last ``window`` episodes from now on."""
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
            if not task.cancelled():
                task.exception()  # told by then, and `watch` raises it, if anybody does watch
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
        """Free the board and the learner mode's memory. Nobody may use them afterwards."""
        self.board = None
        self.requests.close()
        if self._region is not None:
            self._region.close()
            self._region = None
        self._replay.close()
        self.draws.close()
        if self._sampler is not None:
            self._sampler.close()

    def _flush(self) -> None:
        """Move pending deltas to the board, if it has room by now."""
        board, spec = self.board, self.spec
        if board is None or spec is None or not board.pending:
            return
        if 4 * spec.layout.size <= INLINE_BYTES:
            board.flush()
        elif self._flushing is None or self._flushing.done():
            if self._flushing is not None:
                self._flushing.result()  # raises a bug of ours
            self._flushing = asyncio.create_task(asyncio.to_thread(board.flush), name="board-flush")

    async def _flushed(self) -> None:
        """Wait for the thread that may be writing to the board."""
        if self._flushing is not None:
            await self._flushing

    async def _attach(self, *, restore: bool) -> None:
        if self._link is None or self._region is None or self.spec is None:
            raise WorkerError("the learner isn't built yet")
        await self._link.attach(self._region, self.spec.nbytes, restore=restore)
        if self._replay_nbytes:
            rows = self._replay.region(self._replay_nbytes)
            self._link.tell(ReplayRows(rows.nbytes), [rows])
        if self._sampler is not None:
            self._link.tell(*self._sampler.told())
        elif self._actors is not None:
            self._link.tell(*self._actors.collected())
        if (slots := self.draws.told()) is not None:
            self._link.tell(*slots)
        order, regions = self.requests.renew(self.spec.layout.size)
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
                watch = HangWatchdog(self.stages, self._clock)
                noting = watch.noting
                async with beside(kill_if_it_hangs(link.pid, watch, self._events), "learner-hangs"):
                    await link.converse(
                        noting(self.reported),
                        noting(self.requests.posted),
                        noting(self.stages.heard),
                        noting(self.draws.heard),
                    )
                death = await link.ended(timeout_s=LEAVE_S if self._stopping.is_set() else REAP_S)
                self._link = None
                self.draws.died()
                self.stages.died("its learner died")
                if self._stopping.is_set():
                    return
                self._down_since_s = self._clock.monotonic()
                self._died(death, self._down_since_s - began_s)
            if await set_within(self._stopping, self.restart_policy.backoff_s):
                return
            try:
                await self._restart()
            except (ConfigError, TensorError, _CantStartError) as error:
                # The first one was built from the same task, so it is this machine that changed.
                self.restart_policy.failed_to_start()
                self._tell_failed(str(error))

    def _died(self, death: Death, lived_s: float) -> None:
        """Count and tell a death, with the error that it died of.

        Raises:
            WorkerError: the next learner would die of the same.
        """
        self.restart_policy.died(death, lived_s)
        self._before = self.totals
        give_up_reason = self.restart_policy.give_up_reason
        then = (
            "; it is started again from the board"
            if give_up_reason is None and self.board is not None
            else ""
        )
        self._events.emit(
            "learner-died",
            f"learner {death.how}{then}",
            level="info" if give_up_reason is None and death.cause is None else "warning",
            code=death.code,
            lived_s=lived_s,
            error=death.document,
        )
        if give_up_reason is not None:
            raise WorkerError(give_up_reason)

    def _tell_failed(self, why: str, error: dict[str, object] | None = None) -> None:
        text = f"learner couldn't be restarted: {why}; next try in {self.restart_policy.backoff_s:g} s"
        self._events.emit("learner-failed", text, level="warning", error=error)

    async def _restart(self) -> None:
        """Start another learner, and let it go on from the board; one that dies at that is counted and told.

        Raises:
            WorkerError: the next one would die of the same.
            ConfigError, TensorError, _CantStartError: nothing of the learner's own is to blame.
        """
        try:
            link = self._link = await self._spawn()
        except WorkerError as error:
            raise _CantStartError(str(error)) from error
        try:
            await self._resume(await self._hello(link))
        except WorkerError:
            death = await link.ended()
            self._link = None
            self.restart_policy.died(death, 0.0)
            self._tell_failed(f"it {death.how}", death.document)
            if (give_up_reason := self.restart_policy.give_up_reason) is not None:
                raise WorkerError(give_up_reason) from None
            return
        except BaseException:
            self._link = None
            await link.kill()
            raise
        if self._down_since_s is None:
            self._events.emit("learner-started", "a learner runs", pid=link.pid)
            return
        self._down_since_s = None
        self.restarts += 1
        self._events.emit("learner-restarted", "learner runs again", pid=link.pid, restarts=self.restarts)

    async def _resume(self, hello: Hello) -> None:
        if self.spec is None or self.board is None or _spec(hello) != self.spec:
            raise LayoutMismatchError("a restarted learner has another layout than its predecessor")
        if self._sampler is not None and not self._sampler.opened:
            self._sampler.open(hello, self.spec)
        elif self._sampler is not None:
            if not self._sampler.fits(hello):
                raise LayoutMismatchError("a restarted learner wants other samples than its predecessor")
        elif self._actors is not None and _unrolls(hello) != self._actors.spec:
            raise LayoutMismatchError("a restarted learner wants other unrolls than its predecessor")
        self.device = hello.device
        await self._open_replay(hello)
        await self._attach(restore=self.board.published_once)

    def reported(self, report: Report) -> None:
        """Count what the learner reports."""
        now_s = self._clock.monotonic()
        before = self.totals
        self.totals = self._before + Counts(report.env_steps, report.episodes, report.updates)
        self.speed.add(self.totals.env_steps - before.env_steps, now_s)
        self.returns.extend(report.returns)
        self.metrics, self.busy_steps_per_s = report.metrics, report.busy_steps_per_s
        if report.moments:
            self.moments = report.moments
        self.reported_s = now_s
        self.loan = report.loan
        self._flush()  # it has published, so there may be room for what was posted meanwhile
        self._on_report(report, self.totals.updates - before.updates)


def _spec(hello: Hello) -> BoardSpec:
    return BoardSpec.from_wire(msgspec.msgpack.decode(hello.spec))


def _samples(hello: Hello) -> UnrollSpec:
    return UnrollSpec.from_wire(msgspec.msgpack.decode(hello.samples))


def _unrolls(hello: Hello) -> UnrollSpec:
    return UnrollSpec.from_wire(msgspec.msgpack.decode(hello.unrolls))


class LearnerPort:
    """Implements `strategies.protocol.LearnerHandle`, for one strategy.

    Args:
        progress: tells how far the swarm is towards its last environment step, 0 to 1, as learners know.
        answering: called before each answer: what it tells the learner counts for the next gradient.
    """

    def __init__(
        self,
        supervisor: LearnerSupervisor,
        algorithm: AlgorithmConfig,
        progress: Callable[[], float],
        answering: Callable[[], None] = lambda: None,
    ) -> None:
        self._supervisor = supervisor
        self._algorithm = algorithm
        self._progress = progress
        self._answering = answering

    @property
    def board(self) -> DaemonBoard:
        """The daemon's end of the board."""
        if self._supervisor.board is None:
            raise WorkerError("the learner isn't built yet")
        return self._supervisor.board

    @property
    def learning_rate(self) -> float:
        """The algorithm's learning rate now, annealing included."""
        algorithm = self._algorithm
        if algorithm.anneal == "linear":
            return algorithm.learning_rate * (1.0 - min(max(self._progress(), 0.0), 1.0))
        return algorithm.learning_rate

    async def next_request(self) -> LearnerRequest:
        """Wait for the learner's next request; cancelling loses none."""
        return await self._supervisor.requests.next_request()

    def answer(
        self,
        request: LearnerRequest,
        kind: AnswerKind,
        learning_rate: float | None = None,
        *,
        end_update: bool = False,
    ) -> None:
        """Answer a request; one of an earlier mode, or of a learner that died, is passed over.

        Annealing only lowers the algorithm's learning rate, which is the same on all nodes: what peers make
        of it never goes beyond.
        """
        if learning_rate is not None:
            learning_rate = max(0.0, min(self._algorithm.learning_rate, learning_rate))
        self._answering()
        self._supervisor.answer(request, kind, learning_rate, end_update=end_update)

    def preempt(self) -> None:
        """Have the learner end the unroll that it collects for its next request."""
        self._supervisor.requests.preempt()
