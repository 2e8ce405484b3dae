"""Ends a learner that hangs, so that `supervisor` starts another from the board.

Learners bound their waits; libraries and environments don't all: torch.distributed waits without end for a
process that froze while a group met. Two are judged, by how long they have said nothing:

    ordered to be a stage, no answer yet   75 s more than it was ever silent before: it may be in an update
    rank 0, answered, has made updates     75 s, or 10 times as long as it was ever silent if that is more

Nobody else is, by what it says: other ranks bound their waits, and how long an update takes nobody knows,
since a step of an environment may take as long as it likes. But any learner may be stopped (SIGSTOP) or hang
as a whole, which shows in its process: `Standstill`.

Silence is counted in looks, so that time in which this process was frozen itself doesn't count.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import psutil

from p2pdrl.clock import Clock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.node.events import EventLog
from p2pdrl.pipeline.plan import StageOrder
from p2pdrl.workers.protocol import FromLearner, Report

if TYPE_CHECKING:
    from p2pdrl.node.children.stage_port import StagePort

__all__ = [
    "HANGS_S",
    "Activity",
    "HangWatchdog",
    "Standstill",
    "activity_of",
    "kill_if_it_hangs",
]

HANGS_S = 75.0
"""After so long. To import torch and to meet takes far less; a first unroll of a slow environment may not."""
LOOKS = 4
"""In that time."""
TIMES = 10.0
"""The longest silence of a learner at work, before it counts as hanging."""

LOOK_S = 3.0
"""Between two looks at a learner's process; its signs of life come more often."""
WAITING = frozenset({psutil.STATUS_SLEEPING, psutil.STATUS_IDLE, psutil.STATUS_STOPPED})
"""States of a process that neither runs, wants to, nor waits for a disk or its memory."""

Message = TypeVar("Message", bound=FromLearner)


class HangWatchdog:
    """Judges one learner process, from its first message to its last, by its order as a pipeline's stage."""

    def __init__(self, stages: StagePort, clock: Clock) -> None:
        self._stages = stages
        self._clock = clock
        self._counted_s = self._looked_s = clock.monotonic()
        self._silent_s = 0.0
        self._longest_s = 0.0
        self._order: StageOrder | None = None
        self._ordered_s = 0.0
        self._updates = 0

    def heard(self, message: FromLearner) -> None:
        """Note a message, before anything is done about it."""
        self._count()
        if not self._stages.unanswered:
            self._longest_s = max(self._longest_s, self._silent_s)
        self._silent_s = 0.0
        if isinstance(message, Report):
            self._updates = message.updates

    def noting(self, handle: Callable[[Message], None]) -> Callable[[Message], None]:
        """Return what notes a message, and passes it on."""

        def note(message: Message) -> None:
            self.heard(message)
            handle(message)

        return note

    def look(self) -> float:
        """Return for how many seconds the learner has hung; 0 when it isn't known to hang.

        To be called `LOOKS` times in `HANGS_S`. Whoever looks much later was frozen, and may have yet to read
        what the learner said: it is judged at the next look.
        """
        self._count()
        now_s = self._clock.monotonic()
        late = now_s - self._looked_s > 1.5 * HANGS_S / LOOKS
        self._looked_s = now_s
        silent_s = min(self._silent_s, self._ordered_s)
        return silent_s if not late and silent_s >= self._bound_s() else 0.0

    def _bound_s(self) -> float:
        """For how long it may say nothing, as things are."""
        if self._order is None:
            return float("inf")
        if self._stages.unanswered:
            return HANGS_S + self._longest_s
        if self._order.rank == 0 and self._updates > 0:
            return max(HANGS_S, TIMES * self._longest_s)
        return float("inf")

    def _count(self) -> None:
        """Count the time since this was last done, but not more than there is between two looks."""
        now_s = self._clock.monotonic()
        passed_s = min(now_s - self._counted_s, HANGS_S / LOOKS)
        self._counted_s = now_s
        self._silent_s += passed_s
        self._ordered_s += passed_s
        if self._stages.order is not self._order:
            self._order, self._ordered_s = self._stages.order, 0.0


async def kill_if_it_hangs(pid: int, watch: HangWatchdog, events: EventLog) -> None:
    """Look at a learner until it hangs, and kill it then; cancelled when it ends before."""
    while not (silent_s := watch.look()):  # noqa: ASYNC110 - nothing tells of silence
        await asyncio.sleep(HANGS_S / LOOKS)
    text = f"the learner is to be a stage and has said nothing for {silent_s:.0f} s; it is killed"
    events.emit("learner-hangs", text, level="warning")
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class Activity(NamedTuple):
    """What a process is at."""

    state: str
    """As psutil calls it."""
    cpu_s: float
    """Processor time that it and the processes under it have used."""


def activity_of(pid: int) -> Activity | None:
    """Return what process ``pid`` is at; None when that can't be read: it is gone, or about to."""
    try:
        process = psutil.Process(pid)
        state, cpu_s = process.status(), 0.0
        for each in (process, *process.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                times = each.cpu_times()
                cpu_s += times.user + times.system
    except (psutil.Error, OSError):
        return None
    return Activity(state, cpu_s)


class Standstill:
    """Judges whether a process stands still, by its signs of life and by what the system says of it. Pure.

    A process that is stopped stands still. So does one that gives no sign of life, waits, and uses no
    processor time: then not even the thread runs whose only task is to give them. One that computes, swaps,
    or wants a processor and gets none, doesn't, and one in a step that takes long gives its signs.

    The configuration bounds how long either may last.
    """

    def __init__(self, config: LearnerConfig, now_s: float) -> None:
        self._stopped_limit_s = config.stopped_deadline_s or float("inf")
        self._hung_limit_s = config.hung_deadline_s or float("inf")
        shortest_s = min(self._stopped_limit_s, self._hung_limit_s)
        self.look_s = min(LOOK_S, shortest_s / 4)
        """To be waited between two looks."""
        self._looked_s = now_s
        self._beaten = True
        self._seen: Activity | None = None
        self.stopped_s = 0.0
        """For how long it has been stopped."""
        self._hung_s = 0.0

    def beat(self) -> None:
        """Note a sign of life."""
        self._beaten = True
        self.stopped_s = self._hung_s = 0.0

    def look(self, now_s: float, activity: Callable[[], Activity | None]) -> str | None:
        """Return why the process is to be killed, in words; None while it isn't.

        Whoever looks much later than agreed was frozen, and may have yet to read what came meanwhile.

        ``activity`` is asked only when there was no sign of life since the last look.
        """
        passed_s, self._looked_s = now_s - self._looked_s, now_s
        beaten, self._beaten = self._beaten, False
        before, self._seen = self._seen, None if beaten else activity()
        if beaten or self._seen is None or passed_s > 2 * self.look_s + 1.0:
            return None
        self.stopped_s = self.stopped_s + passed_s if self._seen.state == psutil.STATUS_STOPPED else 0.0
        idle = before is not None and self._seen.cpu_s <= before.cpu_s and self._seen.state in WAITING
        self._hung_s = self._hung_s + passed_s if idle else 0.0
        if self.stopped_s >= self._stopped_limit_s:
            return f"its process had been stopped for {self.stopped_s:.0f} s"
        if self._hung_s >= self._hung_limit_s:
            return f"it had given no sign of life and used no processor for {self._hung_s:.0f} s"
        return None
