"""All learners of this node: the first, which the supervisor keeps, and workers beside it under Hogwild.

In a mode of k learners, k − 1 workers step the first one's vector in shared memory without locks, each with
its own environments and seed, and its own optimizer state unless that is shared, too (Hogwild: Recht 2011,
arXiv 1106.5730). The first alone owns
the board, so nothing changes for strategies; the policy version counts its updates. Workers come and go while
it runs. What they did counts for this node: its totals and normaliser moments are those of all its processes,
past ones too, and each process is told the others' moments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.learner_mode import LearnerMode
from p2pdrl.config.node import LearnerConfig
from p2pdrl.errors import ConfigError, LayoutMismatchError, TensorError, WorkerError
from p2pdrl.node.accounting.counters import ZERO, Counts
from p2pdrl.node.background import FirstFailure
from p2pdrl.node.children.learner_link import LearnerLink
from p2pdrl.node.children.restarts import Death, RestartPolicy
from p2pdrl.node.children.supervisor import LearnerSupervisor
from p2pdrl.node.events import EventLog
from p2pdrl.tensors.board import BoardSpec
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shared_memory import SharedRegion
from p2pdrl.transport.codec import decode
from p2pdrl.workers.protocol import (
    DataShare,
    LearnerPace,
    LendActors,
    Others,
    Progress,
    Report,
    Start,
    Stop,
    TrainingNews,
)

__all__ = ["HogwildWorker", "LearnerPool", "pooled"]


class HogwildWorker:
    """A further learner process, through all its restarts.

    One that dies is started again after a while; what it had reported stays counted. It has no board, so
    nothing else of it is lost.

    Args:
        start: what it is told first; its seed is its own.
        on_report: called with each report and the one before it of the same process.
        on_end: called with the last report of a process that has ended, if there was one.
        shared_statistics: whether the optimizers' state lies in ``region``, too.
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
        shared_statistics: bool = False,
    ) -> None:
        self._start = start
        self._region = region
        self._shared_statistics = shared_statistics
        self._spec = spec
        self._config = config
        self._clock = clock
        self._events = events
        self._on_report = on_report
        self._on_end = on_end
        self._link: LearnerLink | None = None
        self.told: dict[type[TrainingNews], TrainingNews] = {}
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

    def tell(self, message: TrainingNews) -> None:
        """Send a message to the worker, unless it was the last of its kind, and to each that replaces it."""
        news = self.told.get(type(message)) != message
        self.told[type(message)] = message
        if news and self._conversing and self._link is not None:
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
        policy = RestartPolicy(self._config)
        while True:
            self._began_s = float("inf")
            error = None
            try:
                death = await self._live()
            except (WorkerError, ConfigError, LayoutMismatchError) as problem:
                policy.failed_to_start()
                how = f"can't work: {problem}"
            else:
                policy.died(death, max(0.0, self._clock.monotonic() - self._began_s))
                how, error = death.how, death.document
            if self._stopping:
                return
            give_up_reason = policy.give_up_reason
            then = f"; next try in {policy.backoff_s:g} s" if give_up_reason is None else ""
            self._events.emit(
                "worker-died", f"worker of the learner {how}{then}", level="warning", error=error
            )
            if give_up_reason is not None:
                raise WorkerError(f"a worker: {give_up_reason}")
            await asyncio.sleep(policy.backoff_s)

    async def _live(self) -> Death:
        """Run one process to its end; return how it ended.

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
            await link.join(self._region, shared_statistics=self._shared_statistics)
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


LEAVE_S = 1.0
ACCELERATORS = ("cuda", "mps", "xpu")
_SEED_STEP = 0x9E3779B1  # 2³²/φ, odd: seeds of workers and of neighbouring nodes don't meet


class LearnerPool:
    """The learners of this node.

    Args:
        start: what that one is told first; workers get other seeds.
        on_report: called after a worker's report, with the number of new updates.
    """

    def __init__(
        self,
        *,
        supervisor: LearnerSupervisor,
        start: Start,
        config: LearnerConfig,
        clock: Clock,
        events: EventLog,
        on_report: Callable[[Report, int], None],
    ) -> None:
        self._supervisor = supervisor
        self._start = start
        self._config = config
        self._clock = clock
        self._events = events
        self._on_report = on_report
        self._workers: dict[HogwildWorker, asyncio.Task[None]] = {}
        self._workers_did = ZERO
        self._gone: dict[str, bytes] = {}
        self._pace: LearnerPace | None = None
        self.share_told: DataShare | None = None
        """This node's part, its learners together; None before any was told."""
        self._learners = 1
        self._failure = FirstFailure()

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the workers that run."""
        return tuple(worker.pid for worker in self._workers if worker.pid is not None)

    @property
    def workers(self) -> tuple[HogwildWorker, ...]:
        """The workers, whether or not they run at the moment."""
        return tuple(self._workers)

    @property
    def totals(self) -> Counts:
        """What all learners of this boot did."""
        return self._supervisor.totals + self._workers_did

    @property
    def moments(self) -> dict[str, bytes]:
        """What the normalisers of all learners of this boot counted, msgpack by stream."""
        return pooled([self._supervisor.moments, self._gone, *self._workers_moments()])

    async def change(self, learner_mode: LearnerMode, epoch: int) -> None:
        """Have the learners work by another learner mode.

        Raises:
            ConfigError: there is no memory for it.
            WorkerError: the first learner isn't built yet.
        """
        await self.stop()
        device = self._supervisor.device
        if learner_mode.learners > 1 and device.startswith(ACCELERATORS):
            learner_mode = msgspec.structs.replace(learner_mode, learners=1)
            text = f"learners on {device} can't share a vector: one runs (node.learner.device=cpu lets more)"
            self._events.emit("one-learner", text, level="warning")
        try:
            self._supervisor.work(learner_mode, epoch)
        except TensorError as error:
            raise ConfigError(f"the learner can't work so: {error}") from error
        self._learners = learner_mode.learners
        if self._pace is not None:
            self.tell(self._pace)
        if self.share_told is not None:
            self.divide(self.share_told)
        region = self._supervisor.requests.shared
        for number in range(1, learner_mode.learners):
            if region is not None:
                self._start_worker(number, region)

    def tell(self, message: LearnerPace | Progress) -> None:
        """Send a message to all learners, and to each that replaces one of them."""
        if isinstance(message, LearnerPace):
            self._pace = message
            # The bound is the node's; its learners share it.
            message = LearnerPace(message.paused, message.max_updates_per_s / self._learners)
        self._supervisor.tell(message)
        for worker in self._workers:
            worker.tell(message)

    def divide(self, share: DataShare) -> None:
        """Divide this node's part of the data among its learners; ranks are nodes' in ``share``."""
        self.share_told = share
        self._supervisor.tell(self._part(share, 0))
        for number, worker in enumerate(self._workers, 1):
            worker.tell(self._part(share, number))

    def _part(self, share: DataShare, number: int) -> DataShare:
        """The part of one of our learners: each node has as many as we have.

        A node that has updates to itself shares out data among its learners, but no update: each applies its
        steps in full.
        """
        each = self._learners
        return msgspec.structs.replace(
            share,
            rank=share.rank * each + number,
            learners=share.learners * each,
            total_speed=1.0 if share.learners == 1 else share.total_speed * each,
        )

    def share(self, others: dict[str, bytes]) -> None:
        """Tell each learner what all others, here and elsewhere, counted.

        Args:
            others: of all other nodes and of this node's earlier boots, msgpack by stream.
        """
        if not others:
            return
        moments = self._workers_moments()
        self._supervisor.tell(Others(pooled([others, self._gone, *moments])))
        first = self._supervisor.moments
        for number, worker in enumerate(self._workers):
            rest = moments[:number] + moments[number + 1 :]
            worker.tell(Others(pooled([others, self._gone, first, *rest])))

    async def watch(self) -> None:
        """Wait for ever; raise what ended a worker's keeping, before or by now.

        Raises:
            WorkerError: it died of the same so often that another try is in vain; else it is a bug of ours.
        """
        await self._failure.watch()

    def _start_worker(self, number: int, region: SharedRegion) -> None:
        spec = self._supervisor.spec
        if spec is None:
            return
        worker = HogwildWorker(
            start=msgspec.structs.replace(
                self._start,
                seed=(self._start.seed + number * _SEED_STEP) % 2**31,
                actors=0,
                remote_actors=0,
                replay="own",
            ),
            region=region,
            spec=spec,
            config=self._config,
            clock=self._clock,
            events=self._events,
            on_report=self._heard,
            on_end=self._ended,
            shared_statistics=self._supervisor.requests.learner_mode.shared_statistics,
        )
        for message in self._supervisor.told.values():
            if not isinstance(message, Others | DataShare | LendActors):
                worker.tell(message)
        if self.share_told is not None:
            worker.tell(self._part(self.share_told, number))
        task = asyncio.create_task(worker.run(), name=f"worker {number}")
        task.add_done_callback(self._failure.note)
        self._workers[worker] = task

    async def stop(self) -> None:
        """End the workers, once their last reports are read; calling it again does nothing."""
        tasks = set(self._workers.values())
        if not tasks:
            return
        for worker, task in self._workers.items():
            if not worker.stop():
                task.cancel()
        _, late = await asyncio.wait(tasks, timeout=LEAVE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        self._workers.clear()

    def _heard(self, report: Report, before: Report | None) -> None:
        new = Counts(report.env_steps, report.episodes, report.updates)
        if before is not None:
            new -= Counts(before.env_steps, before.episodes, before.updates)
        self._workers_did += new
        self._supervisor.returns.extend(report.returns)
        self._supervisor.speed.add(new.env_steps, self._clock.monotonic())
        self._on_report(report, new.updates)

    def _ended(self, last: Report) -> None:
        self._gone = pooled([self._gone, last.moments])

    def _workers_moments(self) -> list[dict[str, bytes]]:
        return [{} if worker.last is None else worker.last.moments for worker in self._workers]


def pooled(parts: Iterable[dict[str, bytes]]) -> dict[str, bytes]:
    """Merge moments of disjoint sets of samples, msgpack by stream.

    Raises:
        WireError: one can't be read.
        LayoutMismatchError: a stream has two shapes.
    """
    by_name: dict[str, list[bytes]] = {}
    for part in parts:
        for name, data in part.items():
            by_name.setdefault(name, []).append(data)
    return {name: data[0] if len(data) == 1 else _merge(data) for name, data in by_name.items()}


def _merge(data: list[bytes]) -> bytes:
    moments = Moments.merge(Moments.from_wire(decode(one, Any, "moments")) for one in data)
    return msgspec.msgpack.encode(moments.to_wire())
