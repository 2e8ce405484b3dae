"""All learners of this node: the first, which the supervisor keeps, and its helpers under Hogwild.

Under a regime of k learners, k − 1 helpers step the first one's vector in shared memory, each with its own
optimizer state, environments and seed (Hogwild, Recht 2011, arXiv 1106.5730). The first alone owns the board,
so nothing changes for strategies; the policy version counts its updates. Helpers come and go while it runs.

What helpers did counts for this node: the node's totals and normaliser moments are those of all its
processes, past ones too, added up; each process is told the others' moments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from p2pdrl.clock import Clock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.config.regime import Regime
from p2pdrl.errors import ConfigError, TensorError
from p2pdrl.node.children.helper import Helper
from p2pdrl.node.children.supervisor import LearnerSupervisor, LearnerTotals
from p2pdrl.node.events import EventLog
from p2pdrl.tensors.moments import Moments
from p2pdrl.tensors.shm import SharedRegion
from p2pdrl.transport.codec import decode
from p2pdrl.workers.protocol import Others, Pace, Progress, Report, Start

__all__ = ["Crew", "pooled"]

LEAVE_S = 1.0
ACCELERATORS = ("cuda", "mps", "xpu")
_SEED_STEP = 0x9E3779B1  # 2³²/φ, odd: seeds of helpers and of neighbouring nodes don't meet


class Crew:
    """The learners of this node.

    Args:
        supervisor: keeps the first.
        start: what that one is told first; helpers get other seeds.
        config: restart options.
        clock: time.
        events: what is told.
        on_report: called after a helper's report, with the number of new updates.
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
        self._helpers: dict[Helper, asyncio.Task[None]] = {}
        self._helped = LearnerTotals()
        self._gone: dict[str, bytes] = {}
        self._pace: Pace | None = None
        self._progress: Progress | None = None
        self._learners = 1
        self._failed: asyncio.Future[None] | None = None
        self._error: BaseException | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids of the helpers that run."""
        return tuple(helper.pid for helper in self._helpers if helper.pid is not None)

    @property
    def helpers(self) -> tuple[Helper, ...]:
        """The helpers, whether or not they run at the moment."""
        return tuple(self._helpers)

    @property
    def totals(self) -> LearnerTotals:
        """What all learners of this boot did."""
        first, helped = self._supervisor.totals, self._helped
        return LearnerTotals(
            first.updates + helped.updates,
            first.env_steps + helped.env_steps,
            first.episodes + helped.episodes,
        )

    @property
    def moments(self) -> dict[str, bytes]:
        """What the normalisers of all learners of this boot counted, msgpack by stream."""
        return pooled([self._supervisor.moments, self._gone, *self._helpers_moments()])

    async def change(self, regime: Regime, epoch: int) -> None:
        """Let the learners work by another regime.

        Raises:
            ConfigError: there is no memory for it.
            WorkerError: the first learner isn't built yet.
        """
        await self._dismiss()
        device = self._supervisor.device
        if regime.learners > 1 and device.startswith(ACCELERATORS):
            regime = msgspec.structs.replace(regime, learners=1)
            text = f"learners on {device} can't share a vector: one runs (node.learner.device=cpu lets more)"
            self._events.emit("one-learner", text, level="warning")
        try:
            self._supervisor.work(regime, epoch)
        except TensorError as error:
            raise ConfigError(f"the learner can't work so: {error}") from error
        self._learners = regime.learners
        if self._pace is not None:
            self.tell(self._pace)
        region = self._supervisor.workplace.shared
        for number in range(1, regime.learners):
            if region is not None:
                self._employ(number, region)

    def tell(self, message: Pace | Progress) -> None:
        """Send a message to all learners, and to each that replaces one of them."""
        if isinstance(message, Pace):
            self._pace = message
            # The bound is the node's; its learners share it.
            message = Pace(message.paused, message.max_updates_per_s / self._learners)
        else:
            self._progress = message
        self._supervisor.tell(message)
        for helper in self._helpers:
            helper.tell(message)

    def share(self, others: dict[str, bytes]) -> None:
        """Tell each learner what all others, here and elsewhere, counted.

        Args:
            others: of all other nodes and of this node's earlier boots, msgpack by stream.
        """
        if not others:
            return
        helped = self._helpers_moments()
        self._supervisor.tell(Others(pooled([others, self._gone, *helped])))
        first = self._supervisor.moments
        for number, helper in enumerate(self._helpers):
            rest = helped[:number] + helped[number + 1 :]
            helper.tell(Others(pooled([others, self._gone, first, *rest])))

    async def watch(self) -> None:
        """Wait for ever; raise what ended a helper's keeping, before or by now.

        Raises:
            WorkerError: it died of the same so often that another try is in vain; else it is a bug of ours.
        """
        if self._error is not None:
            raise self._error
        self._failed = asyncio.get_running_loop().create_future()
        await self._failed

    async def stop(self) -> None:
        """End the helpers, once their last reports are read; calling it again does nothing."""
        await self._dismiss()

    def _employ(self, number: int, region: SharedRegion) -> None:
        spec = self._supervisor.spec
        if spec is None:
            return
        helper = Helper(
            start=msgspec.structs.replace(
                self._start, seed=(self._start.seed + number * _SEED_STEP) % 2**31, actors=0
            ),
            region=region,
            spec=spec,
            config=self._config,
            clock=self._clock,
            events=self._events,
            on_report=self._heard,
            on_end=self._ended,
        )
        if self._pace is not None:
            helper.tell(Pace(self._pace.paused, self._pace.max_updates_per_s / self._learners))
        if self._progress is not None:
            helper.tell(self._progress)
        task = asyncio.create_task(helper.run(), name=f"helper {number}")
        task.add_done_callback(self._done)
        self._helpers[helper] = task

    async def _dismiss(self) -> None:
        tasks = set(self._helpers.values())
        if not tasks:
            return
        for helper, task in self._helpers.items():
            if not helper.stop():
                task.cancel()
        _, late = await asyncio.wait(tasks, timeout=LEAVE_S)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late)
        self._helpers.clear()

    def _done(self, task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is None or self._error is not None:
            return
        self._error = error
        if self._failed is not None and not self._failed.done():
            self._failed.set_exception(error)

    def _heard(self, report: Report, before: Report | None) -> None:
        updates, env_steps, episodes = (
            (0, 0, 0) if before is None else (before.updates, before.env_steps, before.episodes)
        )
        new = report.updates - updates
        self._helped.updates += new
        self._helped.env_steps += report.env_steps - env_steps
        self._helped.episodes += report.episodes - episodes
        self._supervisor.returns.extend(report.returns)
        self._supervisor.speed.add(report.env_steps - env_steps, self._clock.monotonic())
        self._on_report(report, new)

    def _ended(self, last: Report) -> None:
        self._gone = pooled([self._gone, last.moments])

    def _helpers_moments(self) -> list[dict[str, bytes]]:
        return [{} if helper.last is None else helper.last.moments for helper in self._helpers]


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
