"""A supervisor whose learners do as a plan says, for the tests beside this one."""

from __future__ import annotations

import numpy as np

from p2pdrl.clock import SystemClock
from p2pdrl.config.node import LearnerConfig
from p2pdrl.node.children.supervisor import LearnerSupervisor
from p2pdrl.workers.protocol import Report, Start

START = Start(b"{}", 0, "cpu", 1, False)
QUICK = LearnerConfig(restart_min_s=0.01, restart_max_s=0.05)


class SkippingClock(SystemClock):
    """The system's time, of which a test skips some."""

    def __init__(self) -> None:
        self.ahead_s = 0.0

    def monotonic(self) -> float:
        return super().monotonic() + self.ahead_s


class Supervised:
    """A supervisor and what it told."""

    def __init__(self, events, config: LearnerConfig = QUICK) -> None:
        self.reports: list[tuple[Report, int]] = []
        self.events = events
        self.clock = SkippingClock()
        self.on_report = lambda report, new: self.reports.append((report, new))
        self.one = LearnerSupervisor(
            start=START,
            config=config,
            window=4,
            clock=self.clock,
            events=events,
            on_report=lambda report, new: self.on_report(report, new),  # noqa: PLW0108 - tests replace it
        )

    async def begin(self) -> None:
        await self.one.build()
        await self.one.begin(restore=False)

    def told(self, kind: str) -> int:
        return [event["kind"] for event in self.events.since(0)].count(kind)

    def now(self) -> tuple[float, int]:
        out = np.empty(4, np.float32)
        version = self.one.board.now(out).policy_version
        return float(out[0]), version
